"""The front on vLLM's ``AsyncLLM``: its core decodes in a process of its own, whether or not anybody polls."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine, Sequence
from copy import copy
from typing import Any, TypeVar

from paceline.engines.vllm.counts import PassCounts, Tally
from paceline.engines.vllm.failures import named, one_line, refusals
from paceline.engines.vllm.front import Delta, Launch, VllmError
from paceline.engines.vllm.offline import Environment
from paceline.engines.vllm.outputs import deltas

T = TypeVar("T")

_JOIN_S = 10.0


class AsyncFront:
    """One ``AsyncLLM`` with an event loop in a thread of its own; implements ``front.Front``.

    Requests are answered between two polls as well, so more of them keep it busy while rewards are computed.
    """

    def __init__(self, launch: Launch) -> None:
        self._tally = Tally()
        self._resets = 0
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._in_flight: set[str] = set()
        self._handler_waits = False
        self._environment = Environment(launch.environment)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-vllm", daemon=True)
        self._thread.start()
        self._engine: Any = None
        try:
            self._engine = self._run(self._start(launch))
        except Exception as error:
            self._stop_loop()
            raise VllmError(f"vLLM did not start: {one_line(error)}") from error
        self.context = int(self._engine.model_config.max_model_len)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())

    def add(self, request_id: str, prompt: Sequence[int], params: Any) -> None:
        """Queue a request; one of ``failures.refusals`` where vLLM refuses it."""
        if not self._in_flight:
            self._tally.started()
        with named("adding a request", passed=refusals()):
            self._run(self._add(request_id, list(prompt), params))
        self._in_flight.add(request_id)

    def poll(self, timeout_s: float) -> list[Delta]:
        """What was emitted since; each ``Delta`` is of one pass."""
        outputs: list[Any] = []
        if self._in_flight:
            with contextlib.suppress(queue.Empty):
                self._take(self._found.get(timeout=timeout_s), outputs)
        return self._drain(outputs)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that are in flight."""
        with named("aborting requests"):
            self._run(self._engine.abort(list(request_ids)))
        self._in_flight.difference_update(request_ids)
        gone, kept = set(request_ids), []
        with contextlib.suppress(queue.Empty):
            while True:
                output = self._found.get_nowait()
                if isinstance(output, Exception) or output.request_id not in gone:
                    kept.append(output)
        for output in kept:
            self._found.put(output)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""
        with named(f"calling {method}"):
            return list(self._run(self._engine.collective_rpc(method, args=args)))

    def pause(self) -> list[Delta]:
        """Let no pass run until ``resume``; returns all that the passes before emitted."""
        with named("pausing"):
            self._run(self._pause())
        return self._drain([])

    def resume(self) -> None:
        """Go on."""
        with named("resuming"):
            self._run(self._engine.resume_generation())

    def reset_prefix_cache(self, running: bool) -> None:
        """Forget shared prompts, and with ``running`` the KV of what is in flight."""
        # What requests in flight hold on to vLLM does not forget: later ones must not find it.
        self._resets += 1
        with named("resetting the prefix cache"):
            self._run(self._engine.reset_prefix_cache(reset_running_requests=running))

    def sleep(self, level: int) -> None:
        """Give memory back."""
        with named("going to sleep"):
            self._run(self._engine.sleep(level))

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again."""
        with named("waking up"):
            self._run(self._engine.wake_up(None if tags is None else list(tags)))

    def counts(self) -> PassCounts:
        """A copy of what the scheduler counted."""
        return copy(self._tally.counts)

    def close(self) -> None:
        """End the core's process and the event loop."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self._run(_shut_down(engine))
        self._stop_loop()

    async def _start(self, launch: Launch) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**launch.arguments), stat_loggers=[lambda *_: self._tally])
        get_output = engine.engine_core.get_output_async

        async def get_and_tell() -> Any:
            self._handler_waits = True
            try:
                return await get_output()
            finally:
                self._handler_waits = False

        engine.engine_core.get_output_async = get_and_tell
        return engine

    async def _add(self, request_id: str, prompt: list[int], params: Any) -> None:
        text = {"prompt_token_ids": prompt, "cache_salt": str(self._resets)}
        collector = await self._engine.add_request(request_id, text, params)
        # The collector would merge the outputs of passes that nobody has taken yet.
        collector.put = self._found.put
        if (early := collector.output) is not None:
            self._found.put(early)

    async def _pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        # What the core sent before it paused may still be on its way through the output handler.
        while not (self._handler_waits and self._engine.engine_core.outputs_queue.empty()):
            if self._engine.errored:
                raise self._engine.dead_error
            await asyncio.sleep(0)

    def _drain(self, outputs: list[Any]) -> list[Delta]:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._found.get_nowait(), outputs)
        found = deltas(outputs)
        self._in_flight.difference_update(delta.request_id for delta in found if delta.finish is not None)
        return found

    def _take(self, output: Any, outputs: list[Any]) -> None:
        if isinstance(output, Exception):
            with named("a pass"):
                raise output
        outputs.append(output)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._environment.restore()


async def _shut_down(engine: Any) -> None:
    engine.shutdown()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_JOIN_S)
