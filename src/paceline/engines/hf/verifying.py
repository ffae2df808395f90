"""The verifying pass: one forward over all that the rows bring, and the decision about their drafts."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.engines.hf.schedule import Share
from paceline.forward.attention import PassRow
from paceline.forward.runner import Runner
from paceline.sampling.accept import LogitsError, Verdict, VerifyRow
from paceline.schema import EngineStats

Verifier = Callable[[torch.Tensor, Sequence[VerifyRow], int], list[Verdict]]
"""What decides a verifying pass, with the signature of ``sampling.accept.accept``."""


def verify(
    runner: Runner, decide: Verifier, shares: Sequence[Share], seed: int, stats: EngineStats
) -> tuple[list[Verdict], int]:
    """Verdicts of the decoding shares, which are in slot order, and how many other tokens were filled.

    ``seed`` is the run's noise key. Tokens that were filled and the times are counted in ``stats``. Raises what
    ``decide`` raises, and LogitsError, naming the requests, where committed tokens have keys or values that are not
    finite: nothing that comes behind them means anything.
    """
    started = time.perf_counter()
    tokens, rows, keep, asked = [], [], [], []
    offset = prefilled = 0
    for share in shares:
        row, drafted, slot = share.row, share.draft_tokens, share.slot
        tokens.append(np.concatenate([row.uncached(share.count), drafted]))
        rows.append(PassRow(slot, row.cached, share.count, share.parents))
        if share.decodes:
            keep.append(np.arange(offset + share.count - 1, offset + share.count + len(drafted)))
            laws = (None, None) if share.draft is None else (share.draft.laws, share.draft.law_of)
            prompt, response = row.request.prompt, row.response
            asked.append(VerifyRow(row.request_id, row.spec, row.seed, prompt, response, drafted, share.parents, *laws))
        prefilled += share.count - 1 if share.decodes else share.count
        offset += share.count + len(drafted)
    kept = np.concatenate(keep) if keep else np.empty(0, dtype=np.int64)
    logits_NV = runner.forward(tokens, rows, kept)
    forwarded = time.perf_counter()
    failures: dict[str, str] = {}
    verdicts: list[Verdict] = []
    try:
        verdicts = decide(logits_NV, asked, seed) if asked else []
    except LogitsError as error:
        failures |= error.failures
    if (unsound_N := runner.unsound()) is not None:
        failures |= _unsound(shares, unsound_N)  # says where it begins, and not only what comes of it
    if failures:
        raise LogitsError(failures)
    stats.forwards += 1
    stats.tokens_prefilled += prefilled
    stats.forward_seconds += forwarded - started
    stats.accept_seconds += time.perf_counter() - forwarded
    return verdicts, prefilled


def _unsound(shares: Sequence[Share], unsound_N: np.ndarray) -> dict[str, str]:
    """The requests whose committed tokens are among the unsound ones of a pass, with a line each."""
    failures, offset = {}, 0
    for share in shares:
        row, found = share.row, np.flatnonzero(unsound_N[offset : offset + share.count])
        if len(found):
            at = row.cached + int(found[0]) - row.prompt_length
            where = f"prompt position {at + row.prompt_length}" if at < 0 else f"response position {at}"
            failures[row.request_id] = (
                f"request {row.request_id}, {where}: the policy's states are NaN or infinite; nothing of this pass was "
                "emitted. Check the weights, or policy.dtype"
            )
        offset += share.count + share.drafted
    return failures
