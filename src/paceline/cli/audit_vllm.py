"""What ``paceline audit --engine vllm`` is pointed at: vLLM on toy policies made on the spot, or on a model."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from paceline.audit.models import PROMPTS
from paceline.audit.vllm import Build, VllmSubject, Wanted, World
from paceline.audit.vllm_toys import save_toy
from paceline.config import Config, load_config
from paceline.engines.base import Engine
from paceline.engines.vllm.versions import require_vllm
from paceline.rl.policy import Policy
from paceline.schema import PacelineError

_CONTEXT = 256
_TOY_PROMPTS = ("Hello", "ab", "abc", "the end", "1 2 3", "x", "zz9", "Q")


def vllm_subject(policy: str, config: Config, texts: Sequence[str] | None, witness: bool) -> VllmSubject:
    """vLLM with the drafter and the settings of ``config``, on ``policy``, which is ``toy`` or a model.

    The toys are a policy of its own output matrix and one that ties it to the embeddings. Whatever is drafted is
    verified, also where it does not pay. PacelineError, one line, where vLLM or the model cannot be had.
    """
    version = require_vllm()
    if config.policy.dtype == "float64":
        raise PacelineError("policy.dtype=float64: vLLM has no such dtype; set float32")
    folder = tempfile.TemporaryDirectory(prefix="paceline-audit-")
    if policy == "toy":
        if texts is not None:
            raise PacelineError("--policy toy has prompts of its own; name a model for others")
        paths = {tied: save_toy(Path(folder.name) / tied, tied=tied == "tied") for tied in ("policy", "tied")}
        texts = _TOY_PROMPTS
    else:
        paths = {"policy": Path(policy)}
    loaded = {
        world: Policy.load(load_config(None, [f"policy.path={path}", f"policy.dtype={config.policy.dtype}"]).policy, 0)
        for world, path in paths.items()
    }
    first = loaded["policy"]
    if policy != "toy":
        paths = {"policy": Path(folder.name)}
        first.save_pretrained(paths["policy"])
    limit = int(getattr(first.model.config.get_text_config(), "max_position_embeddings", 0) or _CONTEXT)
    context = config.engine.context or min(limit, _CONTEXT)
    shown = {
        "policy": policy,
        "vllm": version,
        "drafter": config.drafter.kind,
        "front": config.engine.vllm.front,
        "mend": str(config.engine.vllm.mend).lower(),
    }
    shown |= {name: str(value) for name, value in config.engine.vllm.speculative.items()}
    subject = VllmSubject(
        builder(config, context, first),
        {world: World(path, loaded[world].engine_model()) for world, path in paths.items()},
        name=policy,
        engine_name=f"vLLM {version}",
        settings=shown,
        prompts=[first.encode_prompt(text) for text in texts or PROMPTS],
        context=context,
        eos_ids=first.eos_ids,
        decode=lambda ids: first.decode(np.asarray(ids)),
        tokenizer=first.tokenizer,
        speculates=config.drafter.kind != "none",
        faults=_expected(config.engine.vllm.mend),
        witness=witness,
    )
    subject.folder = folder
    return subject


def _expected(mend: bool) -> dict[str, str]:
    """The faults that show in an audit: those that are refused, and without ``mend`` the others too."""
    from paceline.engines.vllm.workarounds import faults_here

    return {name: str(fault) for name, fault in faults_here().items() if fault.answer == "refused" or not mend}


def builder(config: Config, context: int, policy: Policy) -> Build:
    """Builds engines for ``audit.vllm.VllmSubject`` with the settings of ``config``."""
    from paceline.engines.vllm.engine import VllmEngine

    def build(wanted: Wanted) -> Engine:
        options = replace(config.engine, context=context, slots=wanted.slots or config.engine.slots)
        return VllmEngine(
            wanted.path,
            config=options,
            drafter=config.drafter if wanted.speculate else replace(config.drafter, kind="none"),
            budget=replace(config.budget, mode="fixed"),
            dtype=config.policy.dtype,
            seed=config.seed,
            eos_ids=policy.eos_ids,
            decode=lambda ids: policy.decode(np.asarray(ids)),
            tokenizer=wanted.path,
            refit_names=wanted.refit_names,
            allow_lossy=config.allow_lossy,
            logprobs=wanted.logprobs,
        )

    return build
