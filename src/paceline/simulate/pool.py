"""One budget for a whole batch: the most probable nodes of all drafts share what a fixed length would have spent."""

from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.schema import Draft, PacelineError, as_tokens


def pool(drafts: Sequence[Draft], nodes: int) -> list[Draft]:
    """The ``nodes`` most probable nodes of ``drafts``; a node is kept only with its ancestors.

    Ties go to earlier drafts and earlier nodes. Raises PacelineError for a draft without probabilities.
    """
    drafts = [draft for draft in drafts if len(draft.tokens)]
    for draft in drafts:
        if draft.probs is None:
            raise PacelineError("--pool: the drafter gives no probabilities, so its nodes cannot compete; leave it out")
    if sum(len(draft.tokens) for draft in drafts) <= nodes:
        return drafts
    values = np.concatenate([np.asarray(draft.probs, dtype=np.float64) for draft in drafts])
    chosen = np.zeros(values.size, dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:nodes]] = True
    kept, start = [], 0
    for draft in drafts:
        part = _part(draft, chosen[start : start + len(draft.tokens)])
        start += len(draft.tokens)
        if part is not None:
            kept.append(part)
    return kept


def _part(draft: Draft, chosen: np.ndarray) -> Draft | None:
    """The chosen nodes of a draft whose ancestors are all chosen; None where none is."""
    parents: list[int] | None = None
    if draft.parents is None:
        chosen = np.logical_and.accumulate(chosen)
    else:
        parents, place = [], {-1: -1}
        for node, parent in enumerate(draft.parents.tolist()):
            chosen[node] = chosen[node] and parent in place
            if chosen[node]:
                place[node] = len(parents)
                parents.append(place[parent])
    if not chosen.any():
        return None
    assert draft.probs is not None
    return msgspec.structs.replace(
        draft,
        tokens=as_tokens(draft.tokens[chosen]),
        parents=None if parents is None else as_tokens(parents),
        sources=None if draft.sources is None else draft.sources[chosen],
        probs=draft.probs[chosen],
    )
