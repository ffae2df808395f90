"""One budget for a whole batch: the most probable nodes of all drafts share what a fixed length would have spent."""

from collections.abc import Sequence

from paceline.budget.allocate import best_nodes, pruned
from paceline.schema import Draft, PacelineError


def pool(drafts: Sequence[Draft], nodes: int) -> list[Draft]:
    """The ``nodes`` most probable nodes of ``drafts``; a node is kept only with its ancestors.

    Raises PacelineError for a draft without probabilities.
    """
    drafts = [draft for draft in drafts if len(draft.tokens)]
    for draft in drafts:
        if draft.probs is None:
            raise PacelineError("--pool: the drafter gives no probabilities, so its nodes cannot compete; leave it out")
    if sum(len(draft.tokens) for draft in drafts) <= nodes:
        return drafts
    kept = zip(drafts, best_nodes(drafts, nodes), strict=True)
    return [pruned(draft, keep) for draft, keep in kept if len(keep)]
