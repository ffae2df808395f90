"""The front on the engine of vLLM's offline ``LLM``, with its core in this process or in one of its own."""

import gc
import os
import queue
import time
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch

from paceline.engines.vllm.counts import PassCounts, Tally
from paceline.engines.vllm.failures import named, one_line, refusals
from paceline.engines.vllm.front import Delta, Launch, VllmError
from paceline.engines.vllm.outputs import deltas


class OfflineFront:
    """One ``LLMEngine``; implements ``front.Front``. With ``launch.in_process`` passes run in ``poll`` alone."""

    def __init__(self, launch: Launch) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from paceline.engines.vllm.workarounds import mend_process

        mend_process()
        self._in_process = launch.in_process
        set_threads = torch.set_num_threads
        self._environment = Environment(
            {**launch.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if launch.in_process else "1"}
        )
        try:
            self._engine: Any = LLMEngine.from_engine_args(
                EngineArgs(**launch.arguments), usage_context=UsageContext.LLM_CLASS
            )
        except Exception as error:
            self._free()
            raise VllmError(f"vLLM did not start: {one_line(error)}") from error
        finally:
            # vLLM's worker on the CPU takes it away from the whole process.
            torch.set_num_threads = set_threads
        self.context = int(self._engine.model_config.max_model_len)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())
        self._tally = Tally()
        self._resets = 0
        self._engine.logger_manager.stat_loggers.append(self._tally)

    def add(self, request_id: str, prompt: Sequence[int], params: Any) -> None:
        """Queue a request; one of ``failures.refusals`` where vLLM refuses it."""
        with named("adding a request", passed=refusals()):
            text = {"prompt_token_ids": list(prompt), "cache_salt": str(self._resets)}
            self._engine.add_request(request_id, text, params)

    def poll(self, timeout_s: float) -> list[Delta]:
        """Run a pass, or take over what the core's process emitted."""
        if not self._engine.has_unfinished_requests():
            return []
        if not self._in_process and not self._wait(timeout_s):
            return []
        return self._step()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that are in flight."""
        with named("aborting requests"):
            self._engine.abort_request(list(request_ids))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""
        with named(f"calling {method}"):
            return list(self._engine.collective_rpc(method, args=args))

    def pause(self) -> list[Delta]:
        """Stop the core, where it runs by itself, and take over what it had emitted."""
        if self._in_process:
            return []
        with named("pausing"):
            self._engine.engine_core.call_utility("pause_scheduler", "keep", False)
        found: list[Delta] = []
        while not self._engine.engine_core.outputs_queue.empty():
            found += self._step()
        return found

    def resume(self) -> None:
        """Let the core go on."""
        if not self._in_process:
            with named("resuming"):
                self._engine.engine_core.call_utility("resume_scheduler")

    def reset_prefix_cache(self, running: bool) -> None:
        """Forget shared prompts, and with ``running`` the KV of what is in flight."""
        # What requests in flight hold on to vLLM does not forget: later ones must not find it.
        self._resets += 1
        with named("resetting the prefix cache"):
            self._engine.reset_prefix_cache(reset_running_requests=running)

    def sleep(self, level: int) -> None:
        """Give memory back."""
        with named("going to sleep"):
            self._engine.sleep(level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again."""
        with named("waking up"):
            self._engine.wake_up(None if tags is None else list(tags))

    def counts(self) -> PassCounts:
        """A copy of what the scheduler counted."""
        return copy(self._tally.counts)

    def close(self) -> None:
        """End the core and its workers, and what they left in this process."""
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = None
        self._free()

    def _free(self) -> None:
        """Undo what a vLLM, or the attempt to start one, left in this process."""
        gc.collect()
        if self._in_process:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            gc.unfreeze()  # vLLM froze all that there was
            cleanup_dist_env_and_memory()
        self._environment.restore()

    def _step(self) -> list[Delta]:
        self._tally.started()
        with named("a pass"):
            return deltas(self._engine.step())

    def _wait(self, timeout_s: float) -> bool:
        """Whether the core's process has handed something out in time."""
        waiting: queue.Queue[Any] = self._engine.engine_core.outputs_queue
        until = time.monotonic() + timeout_s
        while waiting.empty():
            if time.monotonic() > until:
                return False
            time.sleep(1e-4)
        return True


class Environment:
    """Variables that are set until ``restore``, which brings back those that were there before."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._before = {name: os.environ.get(name) for name in values}
        _forget_environment()
        os.environ.update(values)

    def restore(self) -> None:
        """Set them as they were."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _forget_environment()


def _forget_environment() -> None:
    """vLLM remembers the environment that it started with; let it look again."""
    from vllm import envs

    forget = getattr(envs, "disable_envs_cache", None)
    if forget is not None:
        forget()
