"""Passes of the reference engine: one engine for every batch and draft, built anew each time."""

import importlib.metadata
from collections.abc import Iterator, Sequence

import torch
from msgspec.structs import replace

from paceline.config import BudgetConfig, Config, SentinelConfig
from paceline.drafters.prober import Prober
from paceline.engines.hf.engine import HFEngine
from paceline.forward.attention import NAME
from paceline.rl.policy import Policy
from paceline.rl.probes import Point, Probe, Ran, timed


def probes(config: Config, rows: Sequence[int], drafted: Sequence[int]) -> Iterator[tuple[Probe, Sequence[int]]]:
    """One probe for all lengths."""
    yield HFProbe(config, Policy.load(config.policy, config.seed), max(rows)), drafted


class HFProbe:
    """The engine of a run, but that nothing watches it and every pass drafts as much; implements ``Probe``."""

    def __init__(self, config: Config, policy: Policy, rows: int) -> None:
        self._config, self._policy = config, policy
        self._vocabulary = int(policy.model.config.get_text_config().vocab_size)
        engine = self._engine(rows, 0)
        self.context = engine.context
        engine.close()

    def measure(self, rows: int, drafted: int, passes: int, prompt: int) -> Point:
        """As ``Probe``."""
        engine = self._engine(rows, drafted)
        try:
            return timed(engine, rows, drafted, passes, prompt, self._vocabulary)
        finally:
            engine.close()

    def ran(self) -> Ran:
        """As ``Probe``."""
        device = self._policy.device
        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        versions = [f"{package} {importlib.metadata.version(package)}" for package in ("transformers", "torch")]
        return Ran(kind="hf", version=", ".join(versions), device=f"{device}{name}", attention=NAME)

    def _engine(self, rows: int, drafted: int) -> HFEngine:
        own = replace(
            self._config.engine, slots=rows, scouts=0, share_prompts=False, sentinel=SentinelConfig(canaries=0)
        )
        return HFEngine(
            self._policy.engine_model(),
            drafter=Prober(self._vocabulary, drafted) if drafted else None,
            budget=max(drafted, 1),
            budget_config=BudgetConfig(mode="fixed"),
            config=own,
            seed=self._config.seed,
            eos_ids=(),
        )
