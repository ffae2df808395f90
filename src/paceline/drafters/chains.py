"""Drafts for engines that verify chains only: the best path of a tree, and the refusal of what is malformed."""

from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.budget.allocate import PRIOR_ACCEPTANCE, pruned
from paceline.schema import SOURCES, Draft, as_tokens


def best_chain(draft: Draft) -> Draft:
    """The path of a tree from which most tokens are expected, the largest sum of path probabilities, as a chain.

    Without ``probs`` every node counts as likely after its parent as any other. Raises ValueError where ``parents`` are
    not those of a tree whose parents come first.
    """
    if draft.parents is None:
        return draft
    parents = np.asarray(draft.parents)
    count = len(draft.tokens)
    if parents.shape != (count,) or (count and parents.dtype.kind not in "iu"):
        raise ValueError("parents")
    if (parents >= np.arange(count)).any() or (parents < -1).any():
        raise ValueError("parents")
    if np.array_equal(parents, np.arange(-1, count - 1)):
        return msgspec.structs.replace(draft, parents=None)
    above = parents.tolist()
    own = [1.0] * count if draft.probs is None else np.asarray(draft.probs, dtype=np.float64).tolist()
    reached, expected = [1.0] * count, [0.0] * count
    for node, parent in enumerate(above):
        before, sum_before = (reached[parent], expected[parent]) if parent >= 0 else (1.0, 0.0)
        reached[node] = before * PRIOR_ACCEPTANCE if draft.probs is None else min(before, own[node])
        expected[node] = sum_before + reached[node]
    path, node = [], int(np.argmax(expected))
    while node >= 0:
        path.append(node)
        node = above[node]
    return msgspec.structs.replace(pruned(draft, np.array(path[::-1], dtype=np.int64)), parents=None)


def as_chain(draft: Draft, most: int) -> Draft:
    """A chain of int32 tokens, at most ``most`` of them; ValueError for a malformed draft. Ids are not looked at."""
    tokens = np.asarray(draft.tokens)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError("tokens")
    for beside in (draft.sources, draft.probs):
        if beside is not None and beside.shape != tokens.shape:
            raise ValueError("shapes")
    if tokens.dtype != np.int32:
        clipped = tokens.clip(-1, np.iinfo(np.int32).max)  # what does not fit is no token of any vocabulary
        draft = msgspec.structs.replace(draft, tokens=as_tokens(clipped))
    if draft.parents is not None:
        draft = best_chain(draft)
    if len(draft.tokens) > most:
        draft = pruned(draft, np.arange(max(most, 0)))
    return draft


def impossible(drafts: Sequence[Draft], vocabulary: int) -> list[bool]:
    """Whether each of the chains names a token or a source that does not exist."""
    if not drafts:
        return []
    tokens_N = np.concatenate([draft.tokens for draft in drafts])
    is_bad_N = tokens_N.view(np.uint32) >= vocabulary
    sources = [draft.sources for draft in drafts if draft.sources is not None]
    if not is_bad_N.any() and not (sources and (np.concatenate(sources) >= len(SOURCES)).any()):
        return [False] * len(drafts)
    return [_is_impossible(draft, vocabulary) for draft in drafts]


def _is_impossible(draft: Draft, vocabulary: int) -> bool:
    if draft.sources is not None and (draft.sources >= len(SOURCES)).any():
        return True
    return bool((draft.tokens.view(np.uint32) >= vocabulary).any())
