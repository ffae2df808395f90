"""The peer itself: drafts of arctic-inference's ``SuffixDecodingCache``, where that package is installed."""

from importlib import import_module
from typing import Any

from paceline.drafters.baselines.base import Baseline, Live, Proposal, require
from paceline.schema import SOURCES, Outcome, PacelineError, as_tokens

_OTHER = SOURCES.index("other")


class ArcticDrafter(Baseline):
    """One cache for all prompts, or with ``per_prompt`` one for each; the other options are the peer's own.

    Raises:
        PacelineError: if arctic-inference cannot be imported.
    """

    def __init__(
        self,
        depth: int = 24,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
        per_prompt: bool = False,
        window: int = 10_000,
    ) -> None:
        super().__init__()
        require(depth >= 2, "depth", depth, ">= 2")
        require(factor >= 0, "factor", factor, ">= 0")
        require(offset >= 0, "offset", offset, ">= 0")
        require(0 <= min_prob <= 1, "min_prob", min_prob, "in [0, 1]")
        require(window >= 1, "window", window, ">= 1 output")
        try:
            self._make = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
        except ImportError as error:
            raise PacelineError(
                f"baseline arctic: cannot import arctic_inference.suffix_decoding ({error}); "
                "install the package arctic-inference"
            ) from error
        self.depth = depth
        self.factor = factor
        self.offset = offset
        self.min_prob = min_prob
        self.tree = tree
        self.per_prompt = per_prompt
        self.window = window
        self._caches: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self._started = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all trees as the peer counts them."""
        trees = [tree for cache in self._caches.values() for tree in (cache._global_tree, *cache._local_trees.values())]
        return sum(tree.estimate_memory() for tree in trees)

    def begin(self, live: Live) -> None:
        """The peer evicts what has the same id, so each request gets a number of its own."""
        key = live.request.prompt_key if self.per_prompt else ""
        if key not in self._caches:
            self._caches[key] = self._make(max_tree_depth=self.depth, max_cached_requests=self.window)
        self._started += 1
        self._numbers[live.name] = self._started
        self._caches[key].start_request(self._started, live.request.prompt)

    def extend(self, live: Live, tokens: list[int], outcome: Outcome) -> None:  # noqa: ARG002
        """The peer's two trees grow."""
        self._cache(live).add_active_response(self._numbers[live.name], tokens)

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:  # noqa: ARG002
        """The output stays in the peer's cache, unless it was aborted."""
        number, cache = self._numbers.pop(live.name), self._cache(live)
        cache.stop_request(number)
        if not remember and number in cache.cached_requests:
            cache.evict_cached_response(number)

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """What the peer speculates."""
        found = self._cache(live).speculate(
            self._numbers[live.name],
            as_tokens(live.tail(self.depth)),
            max_spec_tokens=budget,
            max_spec_factor=self.factor,
            max_spec_offset=self.offset,
            min_token_prob=self.min_prob,
            use_tree_spec=self.tree,
        )
        sources = [_OTHER] * len(found.token_ids)
        return Proposal(found.token_ids, sources, found.parents if self.tree else None, found.probs)

    def _cache(self, live: Live) -> Any:
        return self._caches[live.request.prompt_key if self.per_prompt else ""]
