"""What a profile asks of a vLLM: that the plug-in drafts at random, and what its passes run with."""

from typing import Any

from paceline.engines.vllm.engine import VllmEngine
from paceline.engines.vllm.versions import require_vllm


def draft_at_random(engine: VllmEngine) -> None:
    """From now on the plug-in drafts random tokens for every request, as many as the budget has, and all are verified.

    Only while no request is in flight.
    """
    engine._plugin("probe")


def execution(engine: VllmEngine) -> dict[str, Any]:
    """Plain values: ``version``, ``device``, ``attention``, ``graphs``, ``captured`` and what else of it is timed.

    ``captured`` are the sizes in tokens that CUDA graphs are kept for. ``vocabulary`` is the policy's.
    """
    found: dict[str, Any] = engine._front.rpc("paceline_execution")[0]
    return {"version": require_vllm(), "vocabulary": engine._front.vocabulary, **found}
