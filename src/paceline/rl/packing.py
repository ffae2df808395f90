"""Packs rollouts for training: what siblings have in common, prompt and opening, is computed once.

The responses to one prompt form a prefix tree. Its nodes, parents first, are laid out as one sequence in which a node
attends to its ancestors and itself and sits at the position that its depth gives it. Attention and position of every
node are then those of the rollouts it belongs to, so the log-probabilities and, summed by autograd, the gradients are
the same as with one row per rollout; only the number of computed tokens shrinks.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.schema import Tokens

_LEAST_FILL = 0.75


@dataclass(frozen=True)
class Tree:
    """Rollouts of one prompt. ``segments`` are runs of nodes (start, stop, parent); the prompt's parent is -1.

    ``predictors[row]`` holds, for each response token of that row, the node whose hidden state predicts it. A
    response's last token predicts nothing that is trained, so it is no node unless another response goes on from it.
    """

    tokens: Tokens
    segments: tuple[tuple[int, int, int], ...]
    predictors: dict[int, npt.NDArray[np.int64]]

    @property
    def size(self) -> int:
        """Number of nodes, the prompt included."""
        return len(self.tokens)

    def positions(self) -> npt.NDArray[np.int64]:
        """Depth of each node."""
        depth = np.zeros(self.size, np.int64)
        for start, stop, parent in self.segments:
            depth[start:stop] = (depth[parent] + 1 if parent >= 0 else 0) + np.arange(stop - start)
        return depth

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """(L, L): whether the row's node may attend to the column's node."""
        mask = np.zeros((self.size, self.size), np.bool_)
        for start, stop, parent in self.segments:
            if parent >= 0:
                mask[start:stop] = mask[parent]
            mask[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)
        return mask


@dataclass(frozen=True)
class Packed:
    """One batch of trees, padded on the right. ``N`` runs over the response tokens in the order of the rows given.

    ``predictor_N`` indexes the flattened (B * L) nodes. ``mask_BLL`` is None where every tree is a plain chain: then
    the ordinary causal mask is right, as padding on the right is seen by no real token.
    """

    ids_BL: npt.NDArray[np.int64]
    positions_BL: npt.NDArray[np.int64]
    mask_BLL: npt.NDArray[np.bool_] | None
    predictor_N: npt.NDArray[np.int64]
    target_N: npt.NDArray[np.int64]


def build_trees(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    attention_cost: float,
    max_nodes: int | None = None,
    share: bool = True,
) -> list[Tree]:
    """Prefix trees over the rows, in a deterministic order; every row is in exactly one.

    A node costs 1 + ``attention_cost`` x nodes of its tree, in units of its matrix products, so one dense tree of long
    responses can cost more than it saves: a row opens a new tree where that is cheaper, or where the tree would exceed
    ``max_nodes``. ``share`` False gives each row its own.
    """
    rows_of: dict[bytes, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"rollout {row}: the prompt is empty; its first response token has nothing to follow")
        rows_of[np.asarray(prompt, np.int32).tobytes() if share else str(row).encode()].append(row)
    trees = []
    for rows in rows_of.values():
        rows.sort(key=lambda row: (responses[row].tolist(), row))
        open_rows = rows[:1]
        size = len(prompts[rows[0]]) + _inputs(responses[rows[0]])
        for before, row in itertools.pairwise(rows):
            alone = len(prompts[row]) + _inputs(responses[row])
            joined = size + _inputs(responses[row]) - _common(responses[before], responses[row])
            worth = _cost(joined, attention_cost) <= _cost(size, attention_cost) + _cost(alone, attention_cost)
            if worth and (max_nodes is None or joined <= max_nodes):
                open_rows.append(row)
                size = joined
            else:
                trees.append(_tree(prompts, responses, open_rows))
                open_rows, size = [row], alone
        trees.append(_tree(prompts, responses, open_rows))
    return trees


def _inputs(response: Tokens) -> int:
    return max(len(response) - 1, 0)


def _common(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix of two responses' inputs (all but their last tokens)."""
    length = min(_inputs(left), _inputs(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if differs.size else length


def _cost(nodes: int, attention_cost: float) -> float:
    return nodes * (1 + attention_cost * nodes)


def _tree(prompts: Sequence[Tokens], responses: Sequence[Tokens], rows: Sequence[int]) -> Tree:
    """The prefix tree of ``rows``, whose responses are sorted: each shares its longest prefix with the one before."""
    prompt = prompts[rows[0]]
    pieces, segments = [prompt], [(0, len(prompt), -1)]
    predictors: dict[int, npt.NDArray[np.int64]] = {}
    size, path = len(prompt), np.zeros(0, np.int64)
    previous: Tokens | None = None
    for row in rows:
        response, length = responses[row], _inputs(responses[row])
        shared = 0 if previous is None else _common(previous, response)
        fresh = np.arange(size, size + length - shared)
        if fresh.size:
            parent = int(path[shared - 1]) if shared else len(prompt) - 1
            segments.append((size, size + len(fresh), parent))
            pieces.append(response[shared:length])
        path = np.concatenate([path[:shared], fresh])
        predictors[row] = np.concatenate([[len(prompt) - 1], path])[: len(response)]
        size, previous = size + len(fresh), response
    return Tree(np.concatenate(pieces).astype(np.int32), tuple(segments), predictors)


def pack(trees: Sequence[Tree], responses: Sequence[Tokens]) -> Packed:
    """Lay ``trees`` out as one padded batch; ``responses`` are those that the trees were built from."""
    length = max(tree.size for tree in trees)
    ids_BL = np.zeros((len(trees), length), np.int64)
    positions_BL = np.tile(np.arange(length), (len(trees), 1))
    chains = all(len(tree.segments) <= 2 for tree in trees)
    mask_BLL = None if chains else np.tile(np.eye(length, dtype=np.bool_), (len(trees), 1, 1))
    predictors: dict[int, npt.NDArray[np.int64]] = {}
    for b, tree in enumerate(trees):
        ids_BL[b, : tree.size] = tree.tokens
        positions_BL[b, : tree.size] = tree.positions()
        if mask_BLL is not None:
            mask_BLL[b, : tree.size, : tree.size] = tree.ancestors()
        predictors |= {row: nodes + b * length for row, nodes in tree.predictors.items()}
    rows = range(len(responses))
    predictor_N = np.concatenate([predictors[row] for row in rows])
    target_N = np.concatenate([responses[row] for row in rows]).astype(np.int64)
    return Packed(ids_BL, positions_BL, mask_BLL, predictor_N, target_N)


def microbatches(trees: Sequence[Tree], max_tokens: int) -> list[list[int]]:
    """Rows of each micro-batch: trees of like size, at most ``max_tokens`` padded nodes together (or a single tree).

    A tree much smaller than the widest opens the next batch, so padding stays below a quarter of the work; sizes fall
    by a quarter from cut to cut, so such cuts are few.
    """
    batches: list[list[int]] = []
    count = widest = 0
    for tree in sorted(trees, key=lambda tree: -tree.size):
        if not batches or (count + 1) * widest > max_tokens or tree.size < _LEAST_FILL * widest:
            batches.append([])
            count, widest = 0, tree.size
        batches[-1] += sorted(tree.predictors)
        count += 1
    return batches
