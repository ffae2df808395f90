"""Acceptance: which drafted tokens a verifying pass keeps, and what it emits.

By sample-match a drafted token is kept while it equals the policy's own keyed sample. At every position of a draft the
policy's sample is taken with the noise of that position (``sampling.keyed``), so the samples do not know what was
drafted. The walk starts at the last committed token and follows the child that equals the sample; where no child does,
the sample itself is emitted and the walk ends. What is emitted is therefore what plain decoding would have emitted on
the same logits, for any drafter, chain or tree. Needs no residual distribution.

Under ``rejection`` and ``block`` the children that were drawn from a law are decided first (``sampling.choose``); the
sample is then taken from what remains of the policy's law, with the same noise, and point masses follow it as before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling import kernels
from paceline.sampling.choose import Choice, choose
from paceline.sampling.choose import DraftLawError as DraftLawError
from paceline.sampling.keyed import block_logsumexp, greedy_sample, keyed_sample
from paceline.sampling.noise import draft_position, signed64
from paceline.sampling.processors import Prefix, Spec, process
from paceline.sampling.rows import Layout, check_drafts
from paceline.sampling.rows import MalformedDraftError as MalformedDraftError
from paceline.sampling.rows import VerifyRow as VerifyRow
from paceline.sampling.rows import chain_parents as chain_parents
from paceline.sampling.rows import depths as depths
from paceline.sampling.rows import limit_depth as limit_depth
from paceline.schema import PacelineError, Tokens

Acceptance = Literal["coupled", "rejection", "block"]


class LogitsError(PacelineError):
    """The policy produced logits that no distribution has; nothing of the pass is emitted.

    ``failures`` has one line for each request that failed, by its id.
    """

    def __init__(self, failures: Mapping[str, str]) -> None:
        super().__init__(next(iter(failures.values())))
        self.failures = dict(failures)


@dataclass(frozen=True)
class Verdict:
    """What a pass emits for one request, and which drafted nodes it kept (indices in walk order).

    ``tokens`` has one entry more than ``path``: the policy's own sample after the last accepted node.
    """

    tokens: Tokens
    path: npt.NDArray[np.int64]
    processed_logprobs: npt.NDArray[np.float64]
    raw_logprobs: npt.NDArray[np.float64]
    margins: npt.NDArray[np.float64]


@torch.inference_mode()
def accept(
    logits_NV: torch.Tensor, rows: Sequence[VerifyRow], run_seed: int, acceptance: Acceptance = "coupled"
) -> list[Verdict]:
    """Decide a verifying pass: one ``Verdict`` per row.

    ``logits_NV`` holds, row after row, the raw logits at the root (the last committed token) and at each drafted node.
    Under ``coupled`` acceptance laws of drafts are not looked at. A position with NaN or infinite logits, or no token
    left to sample, ends what a row emits before it, as plain decoding would; nothing behind it matters. Raises
    LogitsError, naming request and response position, for each row of which that is the first position;
    DraftLawError where a law excludes the token that was drawn from it or is not one; and MalformedDraftError for a
    draft that is none: ids outside the vocabulary, parents that are not earlier nodes, arrays of other lengths.
    """
    check_drafts(rows, logits_NV.shape[-1], with_laws=acceptance != "coupled")
    layout = Layout(rows)
    total = len(layout.row_N)
    if logits_NV.shape[0] != total:
        raise ValueError(f"{logits_NV.shape[0]} rows of logits for {total} positions to verify")
    device = logits_NV.device
    of_N = [rows[index] for index in layout.row_N.tolist()]
    emitted_N = np.array([len(row.response) for row in of_N])
    seed_N = torch.from_numpy(np.array([signed64(row.seed) for row in of_N], dtype=np.int64)).to(device)
    specs_N = [row.spec for row in of_N]

    def prefix(n: int) -> Prefix:
        row = of_N[n]
        drafted = layout.token_N[layout.path(n)].astype(np.int32)
        return row.prompt, np.concatenate([row.response, drafted])

    # The kernels read half precision as it is; everything else is given a float32 copy of it.
    is_read_as_it_is = kernels.serve(logits_NV) and all(spec.is_identity for spec in specs_N)
    processed_NV = logits_NV if is_read_as_it_is else process(logits_NV, specs_N, prefix)
    blocks_NG = block_logsumexp(processed_NV)
    choice = None
    if acceptance != "coupled" and any(row.is_soft for row in rows):
        key_N = torch.from_numpy(draft_position(emitted_N, layout.node_N)).to(device)
        choice = choose(processed_NV, blocks_NG, rows, layout, acceptance == "block", run_seed, seed_N, key_N)
    sample_N, margin_N = _sample(
        processed_NV,
        blocks_NG,
        specs_N,
        choice,
        torch.from_numpy(layout.token_N).to(device),
        run_seed,
        seed_N,
        torch.from_numpy(emitted_N + layout.depth_N).to(device),
    )
    processed_N, raw_N, sound_N = _logprobs(logits_NV, processed_NV, blocks_NG, specs_N, sample_N)
    kept_N = _walk(layout, sample_N, choice)
    # Only what is emitted must be sound, and reading every drafted position's logits once more would cost.
    sound_N[kept_N] &= logits_NV[kept_N].isfinite().all(-1)
    # One transfer for everything that the host needs.
    columns = [column.double() for column in (margin_N, processed_N, raw_N, sample_N, sound_N, kept_N)]
    margin, processed, raw, sample, sound, kept = torch.stack(columns).cpu().numpy()
    verdicts: list[Verdict] = []
    failures: dict[str, str] = {}
    for index, row in enumerate(rows):
        start, stop = layout.starts[index], layout.starts[index + 1]
        nodes = np.flatnonzero(kept[start:stop]) + start
        last = int(nodes[layout.depth_N[nodes].argmax()])
        path = np.array(layout.path(last), dtype=np.int64)
        emitted = np.concatenate([[start], path])
        unsound = np.flatnonzero(sound[emitted] == 0)
        if len(unsound):
            if unsound[0] == 0:
                failures[row.request_id] = (
                    f"request {row.request_id}, response position {len(row.response)}: the policy's logits are NaN or "
                    "infinite, or its processors leave no token; nothing of this pass was emitted. Check the weights "
                    "and the parameters"
                )
                continue
            emitted = emitted[: unsound[0]]
            path = emitted[1:]
        verdicts.append(
            Verdict(
                tokens=sample[emitted].astype(np.int32),
                path=path - start - 1,
                processed_logprobs=processed[emitted],
                raw_logprobs=raw[emitted],
                margins=margin[emitted],
            )
        )
    if failures:
        raise LogitsError(failures)
    return verdicts


def _sample(
    logits_NV: torch.Tensor,
    blocks_NG: torch.Tensor,
    specs_N: Sequence[Spec],
    choice: Choice | None,
    token_N: torch.Tensor,
    run_seed: int,
    seed_N: torch.Tensor,
    position_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each position would emit, (N,) int64, and how near that was to something else; logits are processed."""
    sample_N, margin_N = keyed_sample(logits_NV, blocks_NG, run_seed, seed_N, position_N)
    for laws in choice.laws if choice is not None else []:
        at_P = laws.parent_P
        sample_N[at_P], margin_N[at_P] = laws.sample(run_seed, seed_N[at_P], position_N[at_P])
    greedy_N = _greedy(specs_N, logits_NV.device)
    if greedy_N is not None:
        argmax_N, lead_N = greedy_sample(logits_NV)
        sample_N = torch.where(greedy_N, argmax_N, sample_N)
        margin_N = torch.where(greedy_N, lead_N, margin_N)
    if choice is not None:
        is_taken_N = choice.taken_N >= 0
        sample_N = torch.where(is_taken_N, token_N[choice.taken_N], sample_N)
        margin_N = torch.where(is_taken_N, torch.inf, margin_N).minimum(choice.margin_N)
    return sample_N, margin_N


def _logprobs(
    logits_NV: torch.Tensor,
    processed_NV: torch.Tensor,
    blocks_NG: torch.Tensor,
    specs_N: Sequence[Spec],
    sample_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Processed and raw log-probabilities of what is emitted, and whether there is a law at all; each (N,)."""
    total_N = torch.logsumexp(blocks_NG.double(), dim=-1)
    processed_N = processed_NV.gather(1, sample_N[:, None])[:, 0] - total_N
    greedy_N = _greedy(specs_N, logits_NV.device)
    if greedy_N is not None:
        # The law of a greedy position is a point mass.
        processed_N = processed_N.masked_fill(greedy_N, 0.0)
    if processed_NV is logits_NV and greedy_N is None:
        return processed_N, processed_N, total_N.isfinite()
    raw_NV = logits_NV if logits_NV.dtype in (torch.float32, torch.float64) else logits_NV.float()
    raw_total_N = torch.logsumexp(block_logsumexp(raw_NV).double(), dim=-1)
    return processed_N, raw_NV.gather(1, sample_N[:, None])[:, 0] - raw_total_N, total_N.isfinite()


def _greedy(specs_N: Sequence[Spec], device: torch.device) -> torch.Tensor | None:
    greedy = [spec.params.temperature == 0 for spec in specs_N]
    return torch.tensor(greedy, device=device) if any(greedy) else None


def _walk(layout: Layout, sample_N: torch.Tensor, choice: Choice | None) -> torch.Tensor:
    """Which nodes are kept: a node is, if its parent is and it was taken there, or equals what the parent emits."""
    device = sample_N.device
    index_N = torch.arange(len(layout.parent_N), device=device)
    parent_N = torch.from_numpy(layout.parent_N).to(device)
    is_root_N = parent_N == index_N
    kept_N = is_root_N.clone()
    match_N = (torch.from_numpy(layout.token_N).to(device) == sample_N[parent_N]) & ~is_root_N
    if choice is not None:
        taken_N = choice.taken_N[parent_N]
        match_N = torch.where(taken_N >= 0, taken_N == index_N, match_N & choice.follows_N)
    for _ in range(int(layout.depth_N.max(initial=0))):
        kept_N = is_root_N | (kept_N[parent_N] & match_N)
    return kept_N
