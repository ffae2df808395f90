"""The seam between the engine and the two ways to drive vLLM: the offline ``LLM`` and ``AsyncLLM``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.engines.vllm.counts import PassCounts
from paceline.schema import PacelineError


class VllmError(PacelineError):
    """vLLM failed, or died; the message says at what, and what to do."""


@dataclass(frozen=True)
class Delta:
    """What vLLM handed out for a request: new tokens with a log-probability each, in the order of emission.

    ``passes`` has one entry for each pass that emitted them, the number of its tokens. ``cached`` is how many tokens of
    the prompt were not computed for it. Where the request ended, ``finish`` is vLLM's reason (``stop``, ``length``,
    ``abort``, ``error``, ``repetition``), and ``drafts`` has how many tokens were drafted, and how many of them kept,
    in each pass that verified some; None where vLLM does not say.
    """

    request_id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    passes: Sequence[int]
    cached: int = 0
    finish: str | None = None
    drafts: Sequence[tuple[int, int]] | None = None


@dataclass
class Launch:
    """How a vLLM is started: engine arguments, environment, and whether its core runs in this process."""

    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    in_process: bool = True
    mend: bool = True


class Front(Protocol):
    """One vLLM. What must reach the workers goes through ``rpc``, so it works wherever they are.

    ``context`` is the longest sequence, ``vocabulary`` the size of the policy's, both in tokens. Any call may raise
    VllmError.
    """

    context: int
    vocabulary: int

    def add(self, request_id: str, prompt: Sequence[int], params: Any) -> None:
        """Queue a request; ``params`` are vLLM's own. Raises one of ``failures.refusals``, with nothing queued."""

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
