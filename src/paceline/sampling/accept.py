"""Acceptance by sample-match: a drafted token is kept while it equals the policy's own keyed sample.

At every position of a draft the policy's sample is taken with the noise of that position (``sampling.keyed``), so the
samples do not know what was drafted. The walk starts at the last committed token and follows the child that equals the
sample; where no child does, the sample itself is emitted and the walk ends. What is emitted is therefore what plain
decoding would have emitted on the same logits, for any drafter, chain or tree. Needs no residual distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.keyed import block_logsumexp, greedy_sample, keyed_sample
from paceline.sampling.noise import signed64
from paceline.sampling.processors import Prefix, Spec, process
from paceline.schema import PacelineError, Tokens


class LogitsError(PacelineError):
    """The policy produced logits that no distribution has; nothing of the pass is emitted."""


@dataclass(frozen=True)
class VerifyRow:
    """One request in a verifying pass: its parameters and prefix, and the draft below its last committed token.

    ``tokens[i]`` and ``parents[i]`` describe drafted node i; parents are indices of earlier nodes, or -1 for the root.
    """

    request_id: str
    spec: Spec
    seed: int
    prompt: Tokens
    response: Tokens
    tokens: Tokens
    parents: Tokens


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


class _Layout:
    """The rows' nodes laid end to end: per row its root, then its drafted nodes, in order."""

    def __init__(self, rows: Sequence[VerifyRow]) -> None:
        sizes = np.array([1 + len(row.tokens) for row in rows])
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.row_N = np.repeat(np.arange(len(rows)), sizes)
        total = int(self.starts[-1])
        self.token_N = np.full(total, -1, dtype=np.int64)
        self.parent_N = np.arange(total)
        self.depth_N = np.zeros(total, dtype=np.int64)
        for row, start in zip(rows, self.starts, strict=False):
            count = len(row.tokens)
            if not count:
                continue
            nodes = slice(start + 1, start + 1 + count)
            self.token_N[nodes] = row.tokens
            self.parent_N[nodes] = start + 1 + row.parents
            self.depth_N[nodes] = depths(row.parents)

    def path(self, node: int) -> list[int]:
        """The drafted nodes from below the root down to ``node``."""
        nodes: list[int] = []
        while self.parent_N[node] != node:
            nodes.append(node)
            node = int(self.parent_N[node])
        return nodes[::-1]


def chain_parents(count: int) -> Tokens:
    """The parents of a chain of ``count`` drafted tokens: -1, 0, 1, ..."""
    return np.arange(-1, count - 1, dtype=np.int32)


def depths(parents: Tokens) -> npt.NDArray[np.int64]:
    """The depth of each drafted node, 1 for the root's children. ValueError unless parents come before children."""
    count = len(parents)
    index = np.arange(count)
    if (parents >= index).any() or (parents < -1).any():
        raise ValueError("the parents of a draft must come before their children, with -1 for the root")
    if (parents == index - 1).all():
        return index + 1
    depth = np.zeros(count + 1, dtype=np.int64)
    for node, parent in enumerate(parents):
        depth[node + 1] = depth[parent + 1] + 1
    return depth[1:]


def limit_depth(parents: Tokens, deepest: int) -> tuple[npt.NDArray[np.int64], Tokens]:
    """The nodes of a draft no deeper than ``deepest`` and their parents, renumbered among themselves."""
    kept = np.flatnonzero(depths(parents) <= deepest)
    renumbered = np.full(len(parents) + 1, -1, dtype=np.int32)
    renumbered[kept] = np.arange(len(kept))
    return kept, renumbered[parents[kept]]


@torch.inference_mode()
def accept(logits_NV: torch.Tensor, rows: Sequence[VerifyRow], run_seed: int) -> list[Verdict]:
    """Decide a verifying pass: one ``Verdict`` per row.

    ``logits_NV`` holds, row after row, the raw logits at the root (the last committed token) and at each drafted node.
    Raises LogitsError, naming request and response position, where an emitted position has NaN or infinite logits or
    no token left to sample; positions that are not emitted do not matter.
    """
    layout = _Layout(rows)
    total = len(layout.row_N)
    if logits_NV.shape[0] != total:
        raise ValueError(f"{logits_NV.shape[0]} rows of logits for {total} positions to verify")
    device = logits_NV.device
    of_N = [rows[index] for index in layout.row_N.tolist()]
    position_N = np.array([len(row.response) for row in of_N]) + layout.depth_N
    seed_N = np.array([signed64(row.seed) for row in of_N], dtype=np.int64)

    def prefix(n: int) -> Prefix:
        row = of_N[n]
        drafted = layout.token_N[layout.path(n)].astype(np.int32)
        return row.prompt, np.concatenate([row.response, drafted])

    sample_N, margin_N, processed_N, raw_N, sound_N = _sample(
        logits_NV,
        [row.spec for row in of_N],
        prefix,
        run_seed,
        torch.from_numpy(seed_N).to(device),
        torch.from_numpy(position_N).to(device),
    )
    kept_N = _walk(layout, sample_N)
    # Only what is emitted must be sound, and reading every drafted position's logits once more would cost.
    sound_N[kept_N] &= logits_NV[kept_N].isfinite().all(-1)
    # One transfer for everything that the host needs.
    columns = [column.double() for column in (margin_N, processed_N, raw_N, sample_N, sound_N, kept_N)]
    margin, processed, raw, sample, sound, kept = torch.stack(columns).cpu().numpy()
    verdicts = []
    for index, row in enumerate(rows):
        start, stop = layout.starts[index], layout.starts[index + 1]
        nodes = np.flatnonzero(kept[start:stop]) + start
        last = int(nodes[layout.depth_N[nodes].argmax()])
        path = np.array(layout.path(last), dtype=np.int64)
        emitted = np.concatenate([[start], path])
        if not sound[emitted].all():
            where = len(row.response) + int(np.flatnonzero(sound[emitted] == 0)[0])
            raise LogitsError(
                f"request {row.request_id}, response position {where}: the policy's logits are NaN or infinite, or its "
                "processors leave no token; nothing of this pass was emitted. Check the weights and the parameters"
            )
        verdicts.append(
            Verdict(
                tokens=sample[emitted].astype(np.int32),
                path=path - start - 1,
                processed_logprobs=processed[emitted],
                raw_logprobs=raw[emitted],
                margins=margin[emitted],
            )
        )
    return verdicts


def _sample(
    logits_NV: torch.Tensor,
    specs_N: Sequence[Spec],
    prefix: Callable[[int], Prefix],
    run_seed: int,
    seed_N: torch.Tensor,
    position_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, margins, processed and raw log-probabilities and soundness of all N positions."""
    device = logits_NV.device
    processed_NV = process(logits_NV, specs_N, prefix)
    blocks_NG = block_logsumexp(processed_NV)
    sample_N, margin_N = keyed_sample(processed_NV, blocks_NG, run_seed, seed_N, position_N)
    total_N = torch.logsumexp(blocks_NG.double(), dim=-1)
    processed_N = processed_NV.gather(1, sample_N[:, None])[:, 0] - total_N
    untouched = processed_NV is logits_NV
    greedy = [spec.params.temperature == 0 for spec in specs_N]
    if any(greedy):
        greedy_N = torch.tensor(greedy, device=device)
        argmax_N, lead_N = greedy_sample(processed_NV)
        sample_N = torch.where(greedy_N, argmax_N, sample_N)
        margin_N = torch.where(greedy_N, lead_N, margin_N)
        # The law of a greedy position is a point mass.
        processed_N = processed_N.masked_fill(greedy_N, 0.0)
    if untouched and not any(greedy):
        raw_N = processed_N
    else:
        raw_NV = logits_NV if logits_NV.dtype in (torch.float32, torch.float64) else logits_NV.float()
        raw_total_N = torch.logsumexp(block_logsumexp(raw_NV).double(), dim=-1)
        raw_N = raw_NV.gather(1, sample_N[:, None])[:, 0] - raw_total_N
    return sample_N, margin_N, processed_N, raw_N, total_N.isfinite()


def _walk(layout: _Layout, sample_N: torch.Tensor) -> torch.Tensor:
    """Which nodes are kept: a node is, if its parent is and it equals the parent's sample."""
    device = sample_N.device
    parent_N = torch.from_numpy(layout.parent_N).to(device)
    is_root_N = parent_N == torch.arange(len(parent_N), device=device)
    kept_N = is_root_N.clone()
    match_N = (torch.from_numpy(layout.token_N).to(device) == sample_N[parent_N]) & ~is_root_N
    for _ in range(int(layout.depth_N.max(initial=0))):
        kept_N = is_root_N | (kept_N[parent_N] & match_N)
    return kept_N
