"""What vLLM's scheduler counts, pass by pass."""

import time
from typing import Any

import msgspec


class PassCounts(msgspec.Struct, kw_only=True):
    """Counters since vLLM was started. ``drafts`` are rows of passes that verified a draft, ``seconds`` of passes.

    Of the passes that emitted a token, ``passes_plain`` verified no draft.
    ``tokens_accepted`` counts what a draft's verification kept, tokens beyond the end of a response included; what was
    emitted of them is counted request by request (``outputs.Answer``).
    """

    passes: int = 0
    passes_plain: int = 0
    preemptions: int = 0
    drafts: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    seconds: float = 0.0

    def less(self, other: "PassCounts") -> "PassCounts":
        """What was counted beyond ``other``."""
        return PassCounts(**{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__})


class Tally:
    """One of vLLM's statistics loggers; keeps ``counts``. Built by vLLM, or by hand with no arguments."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        del vllm_config, engine_index
        self.counts = PassCounts()
        self._last = time.perf_counter()

    def started(self) -> None:
        """A pass begins now; the time since the last one is nobody's."""
        self._last = time.perf_counter()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Book one pass of the engine's core."""
        now = time.perf_counter()
        counts, seconds, self._last = self.counts, now - self._last, now
        if iteration_stats is not None:
            counts.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None or not (scheduler_stats.num_running_reqs or iteration_stats is not None):
            return
        counts.passes += 1
        counts.seconds += seconds
        drafting = scheduler_stats.spec_decoding_stats
        if drafting is None or not drafting.num_drafts:
            counts.passes_plain += iteration_stats is not None
        else:
            counts.drafts += drafting.num_drafts
            counts.tokens_drafted += drafting.num_draft_tokens
            counts.tokens_accepted += drafting.num_accepted_tokens

    def log(self) -> None:
        """Nothing to print."""

    def log_engine_initialized(self) -> None:
        """Nothing to print."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Of no interest."""

    def record_admission_rejection(self, *_: Any, **__: Any) -> None:
        """Of no interest."""
