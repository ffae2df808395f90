"""The engine of a run: which one the configuration asks for, and what the loop wants of either kind."""

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from paceline.budget.steptime import StepTimeTable, plain_generation_seconds
from paceline.config import HEADS, Config, HeadConfig
from paceline.cotrain.export import join_mtp, stored_head, write_head
from paceline.drafters import make_drafter
from paceline.drafters.heads import Head, HeadKind, MtpHead, make_head
from paceline.engines.hf import HFEngine
from paceline.engines.identity import Identity, check_identity
from paceline.engines.vllm.launch import PLUGIN_KINDS
from paceline.rl.policy import Policy
from paceline.sampling.grammar import Vocabulary
from paceline.schema import CANARY, PacelineError, Rollout, RolloutRequest
from paceline.signals import deaf_to_stop_signals
from paceline.typed_yaml import load_by_path

if TYPE_CHECKING:
    from paceline.engines.vllm.engine import VllmEngine

RunEngine: TypeAlias = "HFEngine | VllmEngine"
"""What the loop drives: an ``engines.base.Engine`` that also generates, and keeps what it learned over a resume."""


def make_engine(config: Config, policy: Policy, export: Path, has_grammars: bool) -> RunEngine:
    """The engine that ``config`` asks for, with its drafter, at the policy's weights.

    vLLM loads the policy from ``export``, a directory that is written here and may go when the engine is closed.
    PacelineError, one line, for what the engine cannot honour, and where vLLM is missing or of another version.
    """
    if config.engine.kind == "vllm":
        return _vllm(config, policy, export, has_grammars)
    vocabulary = Vocabulary(policy.tokenizer) if has_grammars else None
    return HFEngine(
        policy.engine_model(),
        drafter=make_drafter(config.drafter, vocabulary=vocabulary, policy=policy.traits(config)),
        budget=config.drafter.budget,
        budget_config=config.budget,
        config=config.engine,
        seed=config.seed,
        eos_ids=policy.eos_ids,
        decode=lambda tokens: policy.decode(np.asarray(tokens)),
        tokenizer=vocabulary,
        refit_names=policy.refit_names(),
        verifier=None if config.engine.verifier is None else load_by_path(config.engine.verifier, "function"),
        allow_lossy=config.allow_lossy,
    )


def _vllm(config: Config, policy: Policy, export: Path, has_grammars: bool) -> "VllmEngine":
    if config.policy.dtype == "float64":
        raise PacelineError("policy.dtype=float64: vLLM has no such dtype; set float32, or engine.kind=hf")
    # Read when vLLM is imported; its notes of what it loads would drown the run's own lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from paceline.engines.vllm.versions import require_vllm

    require_vllm()
    from paceline.engines.vllm.engine import VllmEngine

    try:
        policy.save_pretrained(export)
    except OSError as error:
        raise PacelineError(f"out={config.out}: the policy cannot be written there for vLLM to load: {error}") from None
    # vLLM ends its processes by SIGTERM, so that one they hear.
    with deaf_to_stop_signals(signal.SIGTERM), _gone_if_it_fails(export):
        # A warm start is the loop's affair: on a resume there must be none.
        drafter = replace(config.drafter, history=replace(config.drafter.history, warm=None))
        if drafts(config) and drafter.kind in HEADS:
            drafter = replace(drafter, head=_written_head(config, policy, export))
        return VllmEngine(
            export,
            config=config.engine,
            drafter=drafter,
            budget=config.budget,
            dtype=config.policy.dtype,
            seed=config.seed,
            eos_ids=policy.eos_ids,
            decode=lambda tokens: policy.decode(np.asarray(tokens)),
            tokenizer=export if has_grammars or config.sampling.stop else None,
            refit_names=policy.refit_names(),
            allow_lossy=config.allow_lossy,
        )


def head_of(config: Config, policy: Policy, counts: npt.NDArray[np.int64] | None = None) -> Head:
    """The head that ``config`` asks for, as every drafter of the run starts. ModelError where it cannot be had.

    ``counts``, (V,), say how often each token occurs, for a draft vocabulary that is chosen now.
    """
    # A policy with an adapter has other layers than its checkpoint; a head starts from the merged ones.
    plain = policy.model if policy.adapter is None else policy.engine_model()
    return make_head(cast("HeadKind", config.drafter.model_kind), config.drafter.head, plain, config.seed, counts)


def _written_head(config: Config, policy: Policy, export: Path) -> HeadConfig:
    """Where vLLM finds the head: beside the policy or, as its own families have it, among the policy's weights."""
    head = head_of(config, policy)
    if isinstance(head, MtpHead):
        join_mtp(head, export)
        return replace(config.drafter.head, path=None)
    path = write_head(stored_head(head, policy=config.policy.path, version=0), export / "head")
    return replace(config.drafter.head, path=str(path))


@contextmanager
def _gone_if_it_fails(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def drafts(config: Config) -> bool:
    """Whether a run of ``config`` drafts at all."""
    return config.drafter.kind != "none" and config.drafter.budget > 0


def check(
    engine: RunEngine, config: Config, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]
) -> Identity:
    """The identity check where the engine promises equal tokens; elsewhere nothing but the time of plain decoding."""
    if isinstance(engine, HFEngine):
        return check_identity(engine, requests, rollouts)
    if drafts(config) and config.drafter.kind not in PLUGIN_KINDS:  # vLLM's own draft for every request
        return Identity("not checked", float("nan"))
    # Requests of this name leave nothing behind in history.
    plain = [replace(r, request_id=f"{CANARY}plain/{r.request_id}", speculate=False) for r in requests]
    started = time.perf_counter()
    engine.generate(plain)
    return Identity("not checked", time.perf_counter() - started)


def projected_plain_seconds(engine: RunEngine, config: Config, lengths: Sequence[int]) -> float:
    """Seconds that plain decoding of responses of these lengths would take; NaN where no pass was measured."""
    if isinstance(engine, HFEngine):
        table = engine.table
    else:
        table = StepTimeTable()
        table.load_state(engine.state().get("step_times", ()))
    return plain_generation_seconds(lengths, config.engine.slots, table)


@contextmanager
def resting(engine: RunEngine) -> Iterator[None]:
    """Within it vLLM sleeps, where ``engine.vllm.sleep`` says so: its memory is the trainer's then."""
    if isinstance(engine, HFEngine) or not engine.config.vllm.sleep:
        yield
        return
    engine.sleep()
    yield
    engine.wake()
