"""Decides which tokens drawn from laws are kept: the probabilities of ``sampling.soft`` meet their uniforms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling import kernels
from paceline.sampling.noise import MOST_SOFT_NODES, Purpose, uniforms
from paceline.sampling.rows import Layout, VerifyRow
from paceline.sampling.soft import Indices, Laws, SoftNodes, block_laws, rejection_laws
from paceline.schema import DraftLawError as DraftLawError

if TYPE_CHECKING:
    from paceline.sampling.kernels.launch import FusedLaws


@dataclass(frozen=True)
class Choice:
    """What was decided at each of the N positions of a pass about the children that were drawn.

    ``taken_N`` is the child that is kept, -1 where none is; then the token is sampled from the residual of the
    position, which ``laws`` hold. ``follows_N`` marks nodes that are kept where they equal the sample. ``margin_N`` is
    the distance, in log probability, of the closest decision.
    """

    taken_N: torch.Tensor
    follows_N: torch.Tensor
    margin_N: torch.Tensor
    laws: "list[Laws | FusedLaws]"


def choose(
    logits_NV: torch.Tensor,
    blocks_NG: torch.Tensor,
    rows: Sequence[VerifyRow],
    layout: Layout,
    blockwise: bool,
    run_seed: int,
    seed_N: torch.Tensor,
    key_N: torch.Tensor,
) -> Choice:
    """Decide about the drawn nodes of a pass; ``logits_NV`` are processed, ``blocks_NG`` their block sums.

    With ``blockwise`` chains are decided as a whole, trees node by node as without. ``key_N`` are the nodes'
    ``noise.draft_position``s. A draft ends where the policy has no distribution: nothing can be emitted behind such a
    position, so nodes below it are not looked at. Raises DraftLawError.
    """
    device, total = logits_NV.device, len(layout.row_N)
    is_open_N = _open(blocks_NG, layout)
    choice = Choice(
        taken_N=torch.full((total,), -1, dtype=torch.int64, device=device),
        follows_N=torch.ones(total, dtype=torch.bool, device=device),
        margin_N=torch.full((total,), torch.inf, dtype=torch.float64, device=device),
        laws=[],
    )
    is_soft = [row.is_soft for row in rows]
    in_block = [soft and blockwise and row.is_chain for soft, row in zip(is_soft, rows, strict=True)]
    for as_block, chosen in ((True, in_block), (False, [a and not b for a, b in zip(is_soft, in_block, strict=True)])):
        if not any(chosen):
            continue
        soft = soft_nodes(rows, layout, np.flatnonzero(chosen), logits_NV.shape[1], as_block, is_open_N)
        if not len(soft.node_M):
            continue
        chains = (layout.row_N[soft.node_M], layout.depth_N[soft.node_M]) if as_block else None
        laws = _laws(logits_NV, blocks_NG, soft, chains)
        _check(laws.log_accept_M, soft, rows, layout)
        choice.laws.append(laws)
        node_M, parent_M, order = (
            torch.from_numpy(index).to(device)
            for index in (soft.node_M, soft.parent_M, soft.rank_M if chains is None else chains[1])
        )
        uniform_M = uniforms(run_seed, seed_N[node_M], key_N[node_M], {Purpose.ACCEPT: 1})[0][:, 0]
        ahead_M = laws.log_accept_M - uniform_M.log()
        choice.follows_N[node_M] = False
        choice.margin_N.scatter_reduce_(0, parent_M, ahead_M.abs(), "amin")
        if chains is not None:
            # The longest prefix that may be kept is, with every node above its end.
            group = torch.from_numpy(chains[0]).to(device)
            last = torch.zeros(len(rows), dtype=torch.int64, device=device)
            last.scatter_reduce_(0, group, torch.where(ahead_M >= 0, order, 0), "amax")
            is_taken_M = order <= last[group]
        else:
            # Of the children of a position the first that may be kept is.
            first_N = torch.full((total,), MOST_SOFT_NODES, dtype=torch.int64, device=device)
            first_N.scatter_reduce_(0, parent_M, torch.where(ahead_M >= 0, order, MOST_SOFT_NODES), "amin")
            is_taken_M = order == first_N[parent_M]
        choice.taken_N[parent_M[is_taken_M]] = node_M[is_taken_M]
    return choice


def _open(blocks_NG: torch.Tensor, layout: Layout) -> npt.NDArray[np.bool_]:
    """Which positions have a distribution of the policy's, and none above them lacks one; (N,)."""
    found: npt.NDArray[np.bool_] = torch.logsumexp(blocks_NG.double(), dim=-1).isfinite().cpu().numpy()
    if not found.all():
        for depth in range(1, int(layout.depth_N.max()) + 1):
            level = np.flatnonzero(layout.depth_N == depth)
            found[level] &= found[layout.parent_N[level]]
    return found


def soft_nodes(
    rows: Sequence[VerifyRow],
    layout: Layout,
    chosen: Indices,
    vocabulary: int,
    points: bool,
    is_open_N: npt.NDArray[np.bool_] | None = None,
) -> SoftNodes:
    """The drawn nodes of the ``chosen`` rows; with ``points`` their point masses too, as law -1.

    Those below positions that are not open are left out.
    """
    nodes, laws_of, laws, held = [], [], [], 0
    for index in chosen:
        row, start = rows[index], int(layout.starts[index]) + 1
        assert row.law_of is not None
        assert row.laws is not None
        if row.laws.ndim != 2 or row.laws.shape[1] != vocabulary:
            raise DraftLawError(
                f"request {row.request_id}: the draft's laws have shape {tuple(row.laws.shape)}, the policy's "
                f"vocabulary is {vocabulary}; drafter and policy must share it"
            )
        if len(row.tokens) > MOST_SOFT_NODES:
            raise DraftLawError(
                f"request {row.request_id}: {len(row.tokens)} drafted nodes; drafts drawn from laws hold at most "
                f"{MOST_SOFT_NODES}, lower the budget"
            )
        kept = np.arange(len(row.tokens)) if points else np.flatnonzero(row.law_of >= 0)
        if is_open_N is not None:
            kept = kept[is_open_N[layout.parent_N[start + kept]]]
        nodes.append(start + kept)
        laws_of.append(np.where(row.law_of[kept] < 0, -1, row.law_of[kept].astype(np.int64) + held))
        laws.append(row.laws)
        held += len(row.laws)
    node_M, law_M = np.concatenate(nodes), np.concatenate(laws_of)
    parent_M = layout.parent_N[node_M]
    # Nodes stand in the order of their drawing; a stable sort puts siblings side by side in it.
    by_parent = np.argsort(parent_M, kind="stable")
    first = np.flatnonzero(np.diff(parent_M[by_parent], prepend=-1))
    rank_M = np.empty(len(node_M), dtype=np.int64)
    rank_M[by_parent] = np.arange(len(node_M)) - np.repeat(first, np.diff(first, append=len(node_M)))
    return SoftNodes(node_M, parent_M, layout.token_N[node_M], law_M, rank_M, torch.cat(laws))


def _laws(
    logits_NV: torch.Tensor, blocks_NG: torch.Tensor, soft: SoftNodes, chains: tuple[Indices, Indices] | None
) -> "Laws | FusedLaws":
    """The laws of block acceptance of ``chains`` (each node's chain and depth), of rejection without them."""
    # Trees whose nodes have siblings are rare enough to do without a kernel.
    if kernels.serve(logits_NV) and (chains is not None or not soft.rank_M.any()):
        from paceline.sampling.kernels import launch

        if chains is None:
            return launch.rejection_laws(logits_NV, blocks_NG, soft)
        return launch.block_laws(logits_NV, blocks_NG, soft, *chains)
    if chains is None:
        return rejection_laws(logits_NV, soft)
    return block_laws(logits_NV, soft, *chains)


def _check(log_accept_M: torch.Tensor, soft: SoftNodes, rows: Sequence[VerifyRow], layout: Layout) -> None:
    wrong = log_accept_M.isnan()
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        node = soft.node_M[first]
        row = rows[int(layout.row_N[node])]
        raise DraftLawError(
            f"request {row.request_id}, response position {len(row.response) + int(layout.depth_N[node]) - 1}: token "
            f"{int(soft.token_M[first])} was drafted, and the law it was drawn from excludes it; give the logits that "
            "were sampled, processors and dtype included"
        )
