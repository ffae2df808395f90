"""The model runner that builds the plug-in: how it is found, and what is read from it and set in it."""

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.drafters.follower import Batch
from paceline.schema import PacelineError


class SeamError(PacelineError):
    """vLLM is not what the plug-in was written against."""


class Runner:
    """vLLM's model runner, held weakly.

    ``context`` is the longest sequence, ``vocabulary`` the number of token ids, ``budget`` the most tokens drafted.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)
        config = runner.vllm_config
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.budget = int(config.speculative_config.num_speculative_tokens)

    @property
    def runner(self) -> Any:
        """The runner itself. SeamError where it is gone."""
        runner = self._runner()
        if runner is None:
            raise SeamError("vLLM's model runner is gone, and its drafter was asked; build the engine anew")
        return runner

    @property
    def context(self) -> int:
        """The longest sequence in tokens."""
        return int(self.runner.max_model_len)

    @property
    def requests(self) -> dict[str, Any]:
        """The state of every request in the engine, preempted ones among them, by id."""
        requests: dict[str, Any] = self.runner.requests
        return requests

    def batch(
        self, emitted: Sequence[Sequence[int]], lengths: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> Batch:
        """The batch after the pass that emitted these tokens."""
        runner = self.runner
        held = runner.input_batch
        names = held.req_ids
        requests = runner.requests
        return Batch(
            request_ids=names,
            identities=[requests[name] for name in names],
            tokens=tokens,
            lengths=lengths,
            emitted=emitted,
            # Rows that come anew are padded to the others' length with placeholders, which are no drafts.
            verified=[
                len(scheduled) if scheduled and scheduled[0] >= 0 else 0
                for scheduled in held.spec_token_ids[: len(names)]
            ],
        )

    def on_shutdown(self, act: Callable[[], None]) -> None:
        """Call ``act`` once, when vLLM shuts the runner down."""
        runner = self.runner
        shutdown = runner.shutdown

        def closing(*arguments: Any, **options: Any) -> Any:
            vars(runner).pop("shutdown", None)
            act()
            return shutdown(*arguments, **options)

        runner.shutdown = closing


def builder() -> Runner:
    """The runner on whose behalf the caller is constructed: vLLM passes its configuration alone, so the stack is asked.

    SeamError where no model runner is found.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, GPUModelRunner):
            return Runner(owner)
        frame = frame.f_back
    raise SeamError(
        "the plug-in was built outside of vLLM's model runner; name it in speculative_config and let vLLM build it"
    )


def drafts_here(parallel: Any) -> bool:
    """Whether vLLM takes the drafts of this worker.

    With tensor parallelism every worker has a drafter, and the scheduler takes the drafts of the first alone: they
    reach the others with the next schedule. Under an external launcher every worker has a scheduler of its own.
    """
    if parallel.tensor_parallel_size == 1 or schedules_alone(parallel):
        return True
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()) == 0


def schedules_alone(parallel: Any) -> bool:
    """Whether each of several workers has a scheduler of its own, so that their drafts have to be equal."""
    return parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher"
