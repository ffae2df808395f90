"""What ``paceline audit`` is pointed at, from its options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.audit.learned import LearnedSubject
from paceline.audit.models import PROMPTS, ModelSubject, foreign_engines, generate_engines, paceline_engines
from paceline.audit.subject import Joined, Subject, ToySubject
from paceline.cli.audit_vllm import vllm_subject
from paceline.config import load_config
from paceline.drafters import make_drafter
from paceline.rl.policy import Policy
from paceline.schema import PacelineError
from paceline.typed_yaml import ConfigError


def subject_of(
    policy: str,
    config_path: Path | None,
    overrides: Sequence[str],
    engine: str,
    settings: Sequence[str],
    prompts: Path | None,
    witness: bool,
) -> Subject:
    """The subject that the options name. PacelineError, one line, for what does not go together or is not there."""
    if engine == "vllm":
        return vllm_subject(
            policy,
            load_config(config_path, [*overrides, *_vllm_settings(settings), "engine.kind=vllm"]),
            None if prompts is None else _lines(prompts),
            witness,
        )
    if settings and engine != "transformers":
        raise PacelineError(
            f"--setting {settings[0]}: belongs to --engine transformers; paceline's are SECTION.KEY=VALUE"
        )
    if policy == "toy":
        if engine != "paceline" or prompts is not None or not witness:
            raise PacelineError(
                "--policy toy has an engine and prompts of its own, and its laws; name a model for others"
            )
        config = load_config(config_path, overrides)
        acceptance = config.engine.acceptance
        return Joined(ToySubject(acceptance=acceptance), LearnedSubject(acceptance))
    config = load_config(config_path, [*overrides, f"policy.path={policy}"])
    loaded = Policy.load(config.policy, config.seed)
    texts = PROMPTS if prompts is None else _lines(prompts)
    tokens = [loaded.encode_prompt(text) for text in texts]
    traits = loaded.traits(config)
    limit = int(getattr(loaded.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)

    def decode(ids: Sequence[int]) -> str:
        return loaded.decode(ids)  # type: ignore[arg-type]

    shown: dict[str, str] = {"policy": policy, "dtype": config.policy.dtype}
    if engine == "paceline":
        shown |= {
            "acceptance": config.engine.acceptance,
            "drafter": config.drafter.kind,
            "invariant": str(config.engine.invariant),
        }
        build = paceline_engines(
            loaded.engine_model(),
            config,
            tokens,
            eos_ids=loaded.eos_ids,
            decode=decode,
            drafter=lambda: make_drafter(config.drafter, policy=traits),
        )
    elif engine == "transformers":
        chosen: dict[str, Any] = {"prompt_lookup_num_tokens": 4} if not settings else dict(map(_setting, settings))
        shown |= {name: str(value) for name, value in chosen.items()}
        if isinstance(chosen.get("assistant_model"), str):
            assistant = load_config(config_path, [*overrides, f"policy.path={chosen['assistant_model']}"])
            chosen["assistant_model"] = Policy.load(assistant.policy, config.seed).engine_model()
        build = generate_engines(
            loaded.engine_model(), chosen, eos_ids=loaded.eos_ids, decode=decode, allow_lossy=config.allow_lossy
        )
    elif ":" in engine:
        build = foreign_engines(engine, policy)
    else:
        raise PacelineError(f"--engine {engine}: must be paceline, transformers, vllm or MODULE:FUNCTION")
    return ModelSubject(
        build,
        name=policy,
        engine_name=engine,
        settings=shown,
        prompts=tokens,
        vocabulary=traits.vocabulary_size,
        context=min(config.engine.context or limit, limit),
        eos_ids=loaded.eos_ids,
        decode=decode,
        witness=loaded.engine_model() if witness else None,
        bitwise=engine == "paceline" and config.engine.invariant,
        exact=engine == "paceline" and config.policy.dtype == "float64",
        keyed=engine == "paceline" and (config.engine.acceptance == "coupled" or config.drafter.kind != "draft_model"),
    )


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"--prompts {path}: cannot be read: {error}") from None
    if not lines:
        raise PacelineError(f"--prompts {path}: holds no prompt; give one a line")
    return lines


def _vllm_settings(settings: Sequence[str]) -> list[str]:
    """Settings of paceline by their dotted names; others are keys of vLLM's own ``speculative_config``."""
    own = dict(_setting(text) for text in settings if "." not in text.partition("=")[0])
    dotted = [text for text in settings if "." in text.partition("=")[0]]
    return dotted + ([f"engine.vllm.speculative={yaml.safe_dump(own, default_flow_style=True).strip()}"] if own else [])


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--setting {text}: must be KEY=VALUE")
    return name, yaml.safe_load(value)
