"""Passes of vLLM: an engine for each drafted length, started as a run with such a budget would start it."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from paceline.config import BudgetConfig, Config, DrafterConfig, SentinelConfig
from paceline.rl.engine import make_engine
from paceline.rl.policy import Policy
from paceline.rl.probes import Point, Probe, Ran, timed

if TYPE_CHECKING:
    from paceline.engines.vllm.engine import VllmEngine


def probes(config: Config, rows: Sequence[int], drafted: Sequence[int]) -> Iterator[tuple[Probe, Sequence[int]]]:
    """A probe for each length, one after another: graphs are captured for one length, and a process has one vLLM."""
    # It is only written for vLLM to load, and would take vLLM's memory.
    policy = Policy.load(replace(config.policy, device="cpu"), config.seed)
    for length in drafted:
        with tempfile.TemporaryDirectory(prefix="paceline-profile-") as folder:
            engine = _engine(config, policy, Path(folder) / "policy", max(rows), length)
            try:
                yield VllmProbe(engine, length), (length,)
            finally:
                engine.close()


class VllmProbe:
    """One vLLM whose plug-in drafts ``drafted`` random tokens for every request; implements ``Probe``."""

    def __init__(self, engine: "VllmEngine", drafted: int) -> None:
        from paceline.engines.vllm import probe

        self._engine = engine
        self.context = engine.context
        execution = probe.execution(engine)
        self._vocabulary = execution.pop("vocabulary")
        self._ran = Ran(kind="vllm", **execution)
        if drafted:
            probe.draft_at_random(engine)

    def measure(self, rows: int, drafted: int, passes: int, prompt: int) -> Point:
        """As ``Probe``."""
        return timed(self._engine, rows, drafted, passes, prompt, self._vocabulary)

    def ran(self) -> Ran:
        """As ``Probe``."""
        return self._ran


def _engine(config: Config, policy: Policy, export: Path, rows: int, drafted: int) -> "VllmEngine":
    """The run's engine, but that its passes run when they are asked for, nothing watches it, and it shares no prompt.

    Its plug-in drafts, whoever drafts in the run.
    """
    own = replace(
        config.engine,
        slots=max(rows, config.engine.slots),
        share_prompts=False,
        sentinel=SentinelConfig(canaries=0, checksums=False),
        vllm=replace(config.engine.vllm, front="offline", in_process=True, sleep=0, speculative={}),
    )
    drafter = DrafterConfig(kind="history" if drafted else "none", budget=drafted)
    told = replace(config, engine=own, drafter=drafter, budget=BudgetConfig(mode="fixed"))
    return cast("VllmEngine", make_engine(told, policy, export, has_grammars=False))
