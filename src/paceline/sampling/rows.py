"""A verifying pass as data: what each request brings, its draft as a tree, and the nodes of all requests end to end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.processors import Spec
from paceline.schema import DraftLawError, PacelineError, Tokens


class MalformedDraftError(PacelineError, ValueError):
    """A draft that no verifier can look at: ids that are no tokens, or a tree that is none."""


@dataclass(frozen=True)
class VerifyRow:
    """One request in a verifying pass: its parameters and prefix, and the draft below its last committed token.

    ``tokens[i]`` and ``parents[i]`` describe drafted node i; parents are indices of earlier nodes, or -1 for the root.
    ``laws`` and ``law_of`` are those of ``schema.Draft``.
    """

    request_id: str
    spec: Spec
    seed: int
    prompt: Tokens
    response: Tokens
    tokens: Tokens
    parents: Tokens
    laws: torch.Tensor | None = None
    law_of: Tokens | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every drafted node follows the one before it."""
        return bool((self.parents == chain_parents(len(self.parents))).all())

    @property
    def is_soft(self) -> bool:
        """Whether nodes were drawn from laws that matter: a greedy row has one right token, whoever drew it."""
        drawn = self.law_of is not None and bool((self.law_of >= 0).any())
        return drawn and self.spec.params.temperature > 0


def check_drafts(rows: Sequence[VerifyRow], vocabulary: int, *, with_laws: bool) -> None:
    """Raise MalformedDraftError, or DraftLawError for its laws, for the first draft that cannot be verified."""
    for row in rows:
        is_empty = not len(row.tokens) and not len(row.parents)
        if is_empty and row.law_of is None:
            continue
        wrong = None if is_empty else _fault(row, vocabulary)
        if wrong is not None:
            raise MalformedDraftError(f"request {row.request_id}: its draft's {wrong}")
        if row.law_of is None or not with_laws:
            continue
        held = len(row.laws) if isinstance(row.laws, torch.Tensor) and row.laws.ndim else 0
        law_of = np.asarray(row.law_of)
        if law_of.shape != np.shape(row.tokens) or law_of.dtype.kind not in "iu":
            raise DraftLawError(
                f"request {row.request_id}: the draft's law_of must name a row of its laws for each node"
            )
        if ((law_of < -1) | (law_of >= held)).any():
            raise DraftLawError(
                f"request {row.request_id}: the draft's law_of names rows {law_of.min()} to {law_of.max()} of {held} "
                "laws; it must name the row that each node was drawn from, or -1"
            )


def _fault(row: VerifyRow, vocabulary: int) -> str | None:
    """What is wrong with the tokens or the parents of a draft."""
    tokens, parents = np.asarray(row.tokens), np.asarray(row.parents)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return f"tokens must be a list of integers, got shape {tokens.shape} of {tokens.dtype}"
    if parents.shape != tokens.shape or parents.dtype.kind not in "iu":
        return f"parents must be one integer a token, got shape {parents.shape} of {parents.dtype} for {len(tokens)}"
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        outside = tokens.min() if tokens.min() < 0 else tokens.max()
        return f"token {outside} is outside the policy's vocabulary of {vocabulary}"
    if parents.min() < -1 or (parents >= np.arange(len(parents))).any():
        return "parents must come before their children, with -1 for the root"
    return None


class Layout:
    """The rows' nodes laid end to end: per row its root, then its drafted nodes, in order.

    Of each of the N positions: its row, its node in the draft (-1: the root), its token (-1), its parent's position (a
    root is its own) and its depth (0). ``starts`` are the roots, and N.
    """

    def __init__(self, rows: Sequence[VerifyRow]) -> None:
        sizes = np.array([1 + len(row.tokens) for row in rows])
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.row_N = np.repeat(np.arange(len(rows)), sizes)
        total = int(self.starts[-1])
        self.node_N = np.arange(total) - self.starts[self.row_N] - 1
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
