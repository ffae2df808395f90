"""What the sentinel sees of a vLLM: its workers' weights, and what canaries accept."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.engines.intake import RequestError
from paceline.engines.sentinel import Part
from paceline.engines.vllm.front import Front
from paceline.engines.vllm.launch import PLUGIN_KINDS
from paceline.engines.vllm.weights import Weights
from paceline.schema import Rollout, RolloutRequest

if TYPE_CHECKING:
    from paceline.engines.vllm.engine import VllmEngine


class Watch:
    """Implements ``engines.sentinel.Watched`` for an engine, through its front."""

    def __init__(self, engine: "VllmEngine", front: Front, weights: Weights) -> None:
        self._engine = engine
        self._front = front
        self._weights = weights
        self._is_plugin = engine.drafter.kind in PLUGIN_KINDS

    def checksums(self, part: Part) -> Mapping[str, int]:
        """Of the tensors of each worker, as vLLM lays them out."""
        found = self._front.rpc("paceline_checksums", part)
        if len(found) == 1:
            return dict(found[0])
        return {f"{rank}/{name}": value for rank, sums in enumerate(found) for name, value in sums.items()}

    def versions(self) -> tuple[int, int | None]:
        """Only a model that drafts has weights of its own."""
        return self._engine.version, self._weights.drafter_version

    def answer(self, requests: Sequence[RolloutRequest]) -> list[Rollout] | None:
        """None while requests are in flight, and where vLLM refuses the canaries."""
        engine = self._engine
        if engine.busy or engine.speculative is None:
            return None
        is_off = not self._is_plugin and not engine.sentinel.is_drafting
        try:
            if is_off:
                self.set_drafting(True)
            with engine.aside():
                return engine.generate(requests)
        except RequestError:
            return None
        finally:
            if is_off:
                self.set_drafting(False)

    def set_drafting(self, on: bool) -> None:
        """Draft or decode plainly from the next pass on."""
        if self._is_plugin:
            self._front.rpc("paceline_plugin", "set_drafting", on)
        elif self._engine.speculative is not None:
            self._front.rpc("paceline_drafting", on)

    def reload_drafter(self) -> bool:
        """Load a drafting model's weights again; the plug-in renews a lost drafter by itself."""
        return not self._is_plugin and self._weights.drafter_version is not None and self._weights.reload_drafter()
