"""Which known fault of vLLM explains a check that failed."""

from collections.abc import Collection
from typing import Any

from paceline.audit.certificate import Check

#: The faults of ``engines.vllm.workarounds`` by what they leave behind: from the most particular to the most general.
_ORDER = (
    "ignored_parameters",
    "top_k_without_drafts",
    "seeded_chunk",
    "partial_layer",
    "tied_head",
    "expand_batch_to_tokens",
    "min_tokens_of_bonus",
    "placeholder_drafts",
)


def explained(check: Check, case: Any, ties: bool, here: Collection[str]) -> str | None:
    """The name of the fault among ``here`` whose mark ``check`` bears; None for one that nothing explains.

    ``case`` is a ``VllmCase``, ``ties`` says whether its policy ties the output to the embeddings.
    """
    params = case.params
    law = check.p_value is not None or check.name in ("support", "log-probabilities", "ends")
    marks = {
        "ignored_parameters": case.drafted and bool(params.get("min_p") or params.get("logit_bias")),
        "top_k_without_drafts": case.drafted and check.name == "errors" and ("top_k" in params or case.company),
        "seeded_chunk": check.name == "errors" and "offset" in check.says,
        "partial_layer": law and case.refit == "part",
        "tied_head": law and bool(case.refit) and ties,
        "expand_batch_to_tokens": case.drafted
        and params.get("temperature", 1.0) > 0
        and (law or check.name == "errors"),
        "min_tokens_of_bonus": case.drafted and law and bool(params.get("min_tokens")),
        "placeholder_drafts": case.drafted and law,
    }
    return next((name for name in _ORDER if name in here and marks[name]), None)
