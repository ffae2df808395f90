"""The seam between the engine and the two ways to drive vLLM: the offline ``LLM`` and ``AsyncLLM``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from paceline.schema import EngineStats, PacelineError


class VllmError(PacelineError):
    """vLLM failed, or died; the message says at what and how it went on."""


@dataclass(frozen=True)
class Delta:
    """What vLLM handed out for a request: new tokens with a log-probability each, in the order of emission.

    ``passes`` has one entry for each pass that emitted them, the number of its tokens; ``finish`` is vLLM's reason
    (``stop``, ``length``, ``abort``, ``error``, ``repetition``) where the request ended.
    """

    request_id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    passes: Sequence[int]
    finish: str | None = None


class PassCounts(msgspec.Struct, kw_only=True):
    """What vLLM's scheduler counted since the engine was built; ``seconds`` of passes, ``drafts`` are rows with one."""

    passes: int = 0
    tokens_prefilled: int = 0
    tokens_emitted: int = 0
    prompts_shared: int = 0
    preemptions: int = 0
    drafts: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    seconds: float = 0.0

    def add_to(self, stats: EngineStats) -> None:
        """Book them as an engine's counters."""
        stats.forwards = self.passes
        stats.tokens_prefilled = self.tokens_prefilled
        stats.prompts_shared = self.prompts_shared
        stats.preemptions = self.preemptions
        stats.tokens_drafted = self.tokens_drafted
        stats.tokens_accepted = self.tokens_accepted
        stats.forward_seconds = self.seconds


class Front(Protocol):
    """One vLLM. Everything that reaches the workers goes through ``rpc``, so all of it works in any process.

    ``context`` is the longest sequence, ``vocabulary`` the size of the policy's, in tokens. ``kv_tokens`` is the room
    of the KV cache. Any call may raise VllmError.
    """

    context: int
    vocabulary: int
    kv_tokens: int

    def add(self, request_id: str, prompt: Sequence[int], params: Any) -> None:
        """Queue a request; ``params`` are vLLM's own. ValueError where vLLM refuses it; nothing is queued then."""

    def poll(self, timeout_s: float) -> list[Delta]:
        """What was emitted since; waits at most ``timeout_s`` for something. Where passes run here, it runs one."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that are in flight; nothing more is handed out for them."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, its extension's included; their results in order of rank."""

    def pause(self) -> list[Delta]:
        """Let no pass run until ``resume``; returns what the passes before it emitted. Requests stay in flight."""

    def resume(self) -> None:
        """Go on after ``pause``."""

    def reset_prefix_cache(self, running: bool) -> None:
        """Forget shared prompts; with ``running`` the KV of requests in flight is computed anew as well."""

    def sleep(self, level: int) -> None:
        """Give memory back (vLLM's levels 1 and 2). No request may be in flight."""

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, all of it or what ``tags`` name (``weights``, ``kv_cache``)."""

    def counts(self) -> PassCounts:
        """A copy of what the scheduler counted."""

    def close(self) -> None:
        """End vLLM and free the process for another one."""


@dataclass
class Launch:
    """How a vLLM is started: engine arguments, environment, and whether its core runs in this process."""

    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    in_process: bool = True
    mend: bool = True
