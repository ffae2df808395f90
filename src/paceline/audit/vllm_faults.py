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
    params, drafts = case.params, case.drafted
    failed = check.name == "errors"
    law = check.p_value is not None or check.name in ("support", "log-probabilities", "ends")
    marks = {
        "ignored_parameters": drafts and bool(params.get("min_p") or params.get("logit_bias")),
        "top_k_without_drafts": drafts and failed and "numel() == 0" in check.says,
        "seeded_chunk": failed and "offset" in check.says,
        "partial_layer": case.refit == "part" and (law or check.name == "speculation"),
        "tied_head": law and bool(case.refit) and ties,
        "expand_batch_to_tokens": drafts
        and params.get("temperature", 1.0) > 0
        and (law or failed or check.name == "alone, again"),
        "min_tokens_of_bonus": drafts and law and bool(params.get("min_tokens")),
        "placeholder_drafts": drafts and law,
    }
    return next((name for name in _ORDER if name in here and marks[name]), None)
