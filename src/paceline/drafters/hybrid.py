"""History and a model that drafts, together: for each request what is worth most at the moment."""

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from paceline.budget.allocate import Nodes
from paceline.config import HybridConfig
from paceline.drafters.base import Drafter, Guided, Learned, Observer, Prefetcher, Reads, Renewable, Seen
from paceline.drafters.chains import best_chain
from paceline.drafters.gains import Asking, Standing
from paceline.drafters.guarded import GuardedDrafter
from paceline.drafters.history import HistoryDrafter
from paceline.drafters.merge import HISTORY, MODEL, ROOT, Blend, Merged
from paceline.schema import Draft, Outcome, PacelineError, Rollout, RolloutRequest, as_tokens

_LOG = logging.getLogger(__name__)


class _Live:
    """A request in flight; ``merged`` is the last draft's tree, of which the first ``own`` nodes are history's.

    ``joins`` says that its drafts are point masses, of which one tree may be made.
    """

    __slots__ = ("chosen", "is_asked", "joins", "merged", "own", "standing")

    def __init__(self, *, joins: bool) -> None:
        self.joins = joins
        self.merged: Merged | None = None
        self.chosen: frozenset[int] = frozenset()
        self.own = 0
        self.is_asked = False
        self.standing = Standing()


class HybridDrafter:
    """Implements ``drafters.base.Drafter``, ``Learned`` and ``Paced``, and ``Observer``, ``Prefetcher`` and ``Reads``
    where a part of it does.

    History is asked for every request, the model only for those where what it should bring beyond history is worth its
    time (``pace``; in pace 0 for all). Both drafts of a request become one tree: equal beginnings are the same nodes,
    each with the probability that was learned for what the two say of it (``merge.Blend``), the most probable first.
    With ``config.graft`` history goes on below what the model alone drafts. With ``config.extend`` a model that drafts
    token by token follows history's best path where that is likelier than its own choice, and so goes on where it ends:
    a pass for every token of it, as for any that it drafts, so that it stops where those do not pay. Only under coupled
    acceptance.

    Under rejection and block acceptance (``coupled`` false) a drawn node must not be kept or left out for what it is,
    so a request gets one source's draft, decided before anything is drawn; greedy requests, whose drafts are point
    masses, excepted. With ``chains`` drafts are chains, the tree's best path. A part that raises is lost, which is an
    event, and the other goes on. What it remembers is its ``history``'s alone.
    """

    def __init__(
        self,
        history: HistoryDrafter,
        model: Drafter,
        config: HybridConfig | None = None,
        *,
        coupled: bool = True,
        chains: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.config = config or HybridConfig()
        self.coupled = coupled
        self.chains = chains
        self._tell: Callable[[str, str], None] = lambda event, line: _LOG.warning("%s: %s", event, line)
        self.history = GuardedDrafter(history, self._told, "the model drafts on alone")
        self.model = GuardedDrafter(model, self._told, "history drafts on alone")
        self._clock = clock
        self._blend = Blend()
        self._asking = Asking(clock())
        self._live: dict[str, _Live] = {}
        if isinstance(history, Prefetcher):
            self.verifying = self.history.verifying
        self._observer: Drafter | None = None
        self._shown: dict[str, int] = {}
        if isinstance(model, Observer):
            self.attach, self.observe = self.model.attach, self._observe
        if isinstance(model, Reads):
            self.reading_seconds = self.model.reading_seconds

    # The seam

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known to both."""
        for request in requests:
            joins = self.coupled or request.params.temperature == 0
            self._live[request.request_id] = _Live(joins=joins)
        self.history.start(requests)
        self.model.start(requests)

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A draft for each request that either knows how to go on with, at most ``budget`` nodes."""
        said = {draft.request_id: draft for draft in self.history.propose(request_ids, budget)}
        for name in request_ids:
            live, draft = self._live[name], said.get(name)
            live.merged = None
            live.standing.expect(0.0 if draft is None or draft.probs is None else float(draft.probs.sum()))
        asked = self._whom_to_ask(request_ids)
        self._plant([name for name in asked if self._live[name].joins], said)
        started, read = self._clock(), self.model.reading_seconds()
        drawn = {draft.request_id: draft for draft in self._ask(asked, budget)}
        for name in asked:
            if name not in drawn or (name in said and said[name].length != drawn[name].length):
                self._live[name].merged = None
            elif drawn[name].laws is not None:
                said.pop(name, None)
        merged = self._merge(said, drawn, budget)
        if asked:
            read = self.model.reading_seconds() - read
            self._asking.was_asked(len(asked), max(self._clock() - started - read, 0.0), self._clock())
        return list((said | drawn | merged).values())

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens were emitted; what each part was right about is learned."""
        lessons = []
        for outcome in outcomes:
            live = self._live[outcome.request_id]
            if live.merged is not None:
                tokens = outcome.tokens.tolist()
                lessons += live.merged.lessons(tokens)
                self._judge(live, tokens)
            elif live.is_asked and not live.joins:
                self._asking.alone.learn(live.standing.state, outcome.accepted)
            live.merged, live.is_asked = None, False
        self._blend.learn(lessons)
        self.history.commit(outcomes)
        self.model.commit(outcomes)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete."""
        for rollout in rollouts:
            del self._live[rollout.request_id]
            self._shown.pop(rollout.request_id, None)
        self.history.finish(rollouts)
        self.model.finish(rollouts)

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that were decoded elsewhere become history; the model has no use for them."""
        self.history.absorb(rollouts)

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``."""
        self._loosen()
        self.history.on_weights(version)
        self.model.on_weights(version)

    def pace(self, tokens_per_second: float, node_seconds: float = 0.0) -> None:
        """What a second is worth now, in tokens of the whole batch, and what verifying a node takes of it.

        With 0 drafts are wanted whole.
        """
        self._asking.cost.pace(tokens_per_second)
        self.model.pace(tokens_per_second, node_seconds)

    def fresh(self) -> "HybridDrafter":
        """Another of the same settings with nothing in flight; PacelineError where a part cannot be made anew."""
        history, model = self.history.inner, self.model.inner
        if not isinstance(model, Renewable) or not isinstance(history, HistoryDrafter):
            raise PacelineError(f"{type(model).__name__} cannot be made anew; start the engine again")
        return HybridDrafter(
            history.fresh(), model.fresh(), self.config, coupled=self.coupled, chains=self.chains, clock=self._clock
        )

    def tell_to(self, tell: Callable[[str, str], None]) -> None:
        """Events go to ``tell`` from now on: a name and one line each."""
        self._tell = tell

    def _told(self, event: str, line: str) -> None:
        self._tell(event, line)

    # The model's weights

    @property
    def weights(self) -> Mapping[str, Any]:
        """The weights of the model, by their names in its checkpoint."""
        return self._learned().weights

    @property
    def weights_version(self) -> int:
        """The version of the policy that the model's weights were made for."""
        return self._learned().weights_version

    def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """The model takes over weights. WeightsError, with nothing loaded, where they do not fit."""
        self._learned().load_weights(version, tensors)
        self._loosen()

    def reload(self) -> bool:
        """The model loads again what it loaded last, or is made anew where it was lost; False where it cannot."""
        return self.model.revive() if self.model.lost else self._learned().reload()

    def _learned(self) -> Learned:
        model = self.model.inner
        if not isinstance(model, Learned):
            raise AttributeError(f"{type(model).__name__} has no weights")
        return model

    def _loosen(self) -> None:
        self._blend.loosen()
        self._asking.loosen()

    def _observe(self, seen: Sequence[Seen]) -> None:
        """States for the model. One that was made anew in the middle of requests gets those of later ones only."""
        if self.model.inner is not self._observer:
            self._observer, self._shown = self.model.inner, {}
        whole = [part for part in seen if part.start <= self._shown.get(part.request_id, 0)]
        self._shown |= {part.request_id: part.start + len(part.states) for part in whole}
        self.model.observe(whole)

    # Whom the model drafts for

    def _whom_to_ask(self, names: Sequence[str]) -> list[str]:
        if self.model.lost:
            return []
        rows = [(self._live[name].standing, self._live[name].joins) for name in names]
        return [names[n] for n in self._asking.chosen(rows, self._clock())]

    def _ask(self, names: list[str], budget: int) -> list[Draft]:
        if not names:
            return []
        model = self.model.inner
        if self.config.extend and isinstance(model, Guided):
            model.guide(self._guided)
        # All that a depth of the model makes known is laid on the tree, and leaves cost no pass.
        drafts = self.model.propose(names, budget * (getattr(model, "width", 1) if self.coupled else 1))
        for draft in drafts:
            self._live[draft.request_id].is_asked = True
        return drafts

    # One tree of two drafts

    def _plant(self, names: Sequence[str], said: Mapping[str, Draft]) -> None:
        """A tree for each request, with history's draft on it."""
        trees = {name: Merged() for name in names}
        drafts = [said[name] for name in names if name in said]
        lay(trees, HISTORY, drafts, [(draft.request_id, ROOT) for draft in drafts])
        for name, tree in trees.items():
            live = self._live[name]
            live.merged, live.own = tree, len(tree)

    def _guided(self, name: str, drafted: Sequence[int], token: int, claim: float) -> tuple[int, float] | None:
        tree = self._live[name].merged
        return None if tree is None else tree.guide(self._blend, drafted, token, claim)

    def _merge(self, said: Mapping[str, Draft], drawn: Mapping[str, Draft], budget: int) -> dict[str, Draft]:
        trees = {name: tree for name in drawn if (tree := self._live[name].merged) is not None}
        if not trees:
            return {}
        drafts = [drawn[name] for name in trees]
        lay(trees, MODEL, drafts, [(draft.request_id, ROOT) for draft in drafts])
        chosen = {name: tree.best(self._blend, budget) for name, tree in trees.items()}
        if self.config.graft:
            for name in self._graft(trees, {name: nodes for name, (nodes, _) in chosen.items()}, budget):
                chosen[name] = trees[name].best(self._blend, budget)
        for name, (nodes, _) in chosen.items():
            self._live[name].chosen = frozenset(nodes)
        return {
            name: self._draft(trees[name], nodes, probs, said.get(name) or drawn[name])
            for name, (nodes, probs) in chosen.items()
        }

    def _graft(self, trees: Mapping[str, Merged], chosen: Mapping[str, Sequence[int]], budget: int) -> set[str]:
        """History goes on below the chosen nodes that only the model drafts; the requests that gained by it."""
        places = [
            (name, node)
            for name, nodes in chosen.items()
            for node in nodes
            if node >= self._live[name].own and not trees[name].knows(HISTORY, node)
        ]
        history = self.history.inner
        if not places or not isinstance(history, HistoryDrafter):
            return set()
        paths = [(name, as_tokens(trees[name].path(node))) for name, node in places]
        drafts = self.history.attempt(lambda: history.propose_after(paths, budget)) or []
        grown = [(draft, place) for draft, place in zip(drafts, places, strict=False) if len(draft.tokens)]
        lay(trees, HISTORY, [draft for draft, _ in grown], [place for _, place in grown])
        return {name for _, (name, _) in grown}

    def _draft(self, tree: Merged, nodes: Sequence[int], probs: Sequence[float], like: Draft) -> Draft:
        numbers = {node: number for number, node in enumerate(nodes)} | {ROOT: ROOT}
        draft = Draft(
            request_id=like.request_id,
            tokens=as_tokens([tree.tokens[node] for node in nodes]),
            length=like.length,
            version=like.version,
            parents=as_tokens([numbers[tree.parents[node]] for node in nodes]),
            sources=np.array([tree.sources[node] for node in nodes], dtype=np.uint8),
            probs=np.array(probs, dtype=np.float32),
            prefetched=like.prefetched,
        )
        return best_chain(draft) if self.chains else draft

    def _judge(self, live: _Live, said: Sequence[int]) -> None:
        """What the model brought beyond history's own draft, as far as ``said`` tells."""
        assert live.merged is not None
        alone = together = 0
        for at, _ in live.merged.follow(said):
            alone += at != ROOT and at < live.own
            together += at in live.chosen
        self._asking.judge(live.standing, together - alone)


def lay(trees: Mapping[str, Merged], side: int, drafts: Sequence[Draft], places: Sequence[tuple[str, int]]) -> None:
    """Lay drafts of one side on the trees, each at its place: a request's name and a node."""
    nodes = Nodes(drafts)
    tokens = [token for draft in drafts for token in draft.tokens.tolist()]
    claims, sources = nodes.claims_N.tolist(), nodes.sources_N.tolist()
    starts = nodes.starts.tolist()
    for draft, (name, at), first, last in zip(drafts, places, starts[:-1], starts[1:], strict=True):
        parents = range(-1, last - first - 1) if draft.parents is None else draft.parents.tolist()
        trees[name].add(side, tokens[first:last], list(parents), claims[first:last], sources[first:last], at)
