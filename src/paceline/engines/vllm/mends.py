"""What takes the place of functions of vLLM that are at fault; ``workarounds`` says which, where and since when."""

from collections.abc import Callable
from typing import Any

import torch

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""(owner, its attribute, what makes the right one of the original)"""


def replacements() -> dict[str, Replacement]:
    """Fault -> what is replaced; imports vLLM."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    return {
        "expand_batch_to_tokens": (rejection_sampler, "expand_batch_to_tokens", lambda _: expand),
        "top_k_without_drafts": (rejection_sampler, "apply_top_k_top_p", of_any_rows),
        "placeholder_drafts": (rejection_sampler, "rejection_sample", rejecting_placeholders),
        "min_tokens_of_bonus": (Sampler, "apply_logits_processors", counting_drafts),
        "seeded_chunk": (CachedRequestState, "__post_init__", with_offsets),
    }


def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    """What the original promises: the value of each request, once for each of its tokens."""
    ends = cu_num_tokens.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    if replace_from != replace_to:
        x = x.masked_fill(x == replace_from, replace_to)
    return x.repeat_interleave(counts, output_size=num_tokens)


def of_any_rows(original: Any) -> Any:
    """The cut-offs of logits (N, V), also where N is 0."""

    def apply_top_k_top_p(logits_NV: Any, k: Any, p: Any) -> Any:
        return original(logits_NV, k, p) if len(logits_NV) else logits_NV

    return apply_top_k_top_p


def rejecting_placeholders(original: Any) -> Any:
    """Rejection sampling in which a placeholder (-1) is rejected, and its position sampled from the whole law.

    The original gets one more token, which has no probability: what is drafted as that is rejected, and nothing is
    taken from the others. Where drafts come with their law, the law of a placeholder is no token at all.
    """

    def rejection_sample(drafts_N: Any, *between: Any, **more: Any) -> Any:
        is_placeholder_N = drafts_N < 0
        if not is_placeholder_N.any():
            return original(drafts_N, *between, **more)
        counts, longest, ends, draft_probs_NV, logits_NV, *rest = between
        vocabulary = logits_NV.shape[1]
        if draft_probs_NV is not None:
            draft_probs_NV = _widened(draft_probs_NV.masked_fill(is_placeholder_N[:, None], 0.0), 0.0)
        logits_NV = _widened(logits_NV, -float("inf"))
        drafts_N = drafts_N.masked_fill(is_placeholder_N, vocabulary)
        return original(drafts_N, counts, longest, ends, draft_probs_NV, logits_NV, *rest, **more)

    return rejection_sample


def counting_drafts(original: Any) -> Any:
    """The processors of a sampler; ``min_tokens`` counts the drafts before the token that follows them."""
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

    def apply_logits_processors(self: Any, logits_RV: Any, sampling: Any, predict_bonus_token: bool) -> Any:
        counting = [p for p in sampling.logitsprocs.non_argmax_invariant if isinstance(p, MinTokensLogitsProcessor)]
        if not predict_bonus_token or not counting:
            return original(self, logits_RV, sampling, predict_bonus_token)
        drafts: Any = sampling.spec_token_ids or ()
        held: list[tuple[Any, str, Any]] = []
        for processor in counting:
            over = [
                row
                for row, (least, said, *_) in processor.min_toks.items()
                if row < len(drafts) and len(said) + len(drafts[row]) >= least
            ]
            for places in ("logits_slice", "restore_logits_slice"):
                if hasattr(processor, places):
                    held.append((processor, places, getattr(processor, places)))
                    setattr(processor, places, _without(getattr(processor, places), over))
        try:
            return original(self, logits_RV, sampling, predict_bonus_token)
        finally:
            for processor, places, masked in held:
                setattr(processor, places, masked)

    return apply_logits_processors


def with_offsets(original: Any) -> Any:
    """Generators of the CPU have no offset to set back; what was drawn for nothing stays drawn."""

    class WithOffset(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            del offset
            return self

    def after(state: Any) -> None:
        original(state)
        if state.generator is not None and state.generator.device.type == "cpu":
            seeded, state.generator = state.generator, WithOffset("cpu")
            state.generator.set_state(seeded.get_state())

    return after


def head_owner() -> Any:
    """The class of vLLM that gives heads that draft what they share with the policy; None where none does that so."""
    try:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Owner
    except ImportError:
        return None
    return Owner if hasattr(Owner, "_maybe_share_lm_head") else None


def keeping_its_own(original: Any) -> Any:
    """A head whose checkpoint has an output matrix keeps it, whatever it equals."""

    def _maybe_share_lm_head(self: Any, policy: Any) -> None:
        own = self.model.lm_head if getattr(self.model, "has_own_lm_head", False) else None
        original(self, policy)
        if own is not None:
            self.model.lm_head = own

    return _maybe_share_lm_head


def _without(places: tuple[Any, Any], rows: list[int]) -> tuple[Any, Any]:
    """Places (rows, tokens) of a matrix, those in ``rows`` left out."""
    if not rows:
        return places
    is_kept = ~torch.isin(places[0], torch.tensor(rows, dtype=places[0].dtype, device=places[0].device))
    return places[0][is_kept], places[1][is_kept]


def _widened(values_NV: Any, value: float) -> Any:
    """With one more column, filled with ``value``."""
    return torch.nn.functional.pad(values_NV, (0, 1), value=value)
