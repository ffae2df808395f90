"""Learners on Ray: one actor a rank of torch.distributed, and at the driver what stands for them all.

A dead or hung rank ends them all, since every other waits for it; the run resumes from its last checkpoint.
"""

import math
import os
import secrets
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from paceline.config import Config
from paceline.rl.batch import Batch
from paceline.rl.cluster.codec import decode, encode
from paceline.rl.cluster.rank import DRAFTER, LOOPBACK, OPTIMISER, POLICY, STATE_SECONDS, RankActor, SentBatch, under
from paceline.rl.cluster.session import RayCluster, one_line
from paceline.rl.cluster.transport import Parcel, Receiver, make_sender
from paceline.rl.fleet import Weights
from paceline.rl.policy import Policy
from paceline.rl.sharded import fingerprint
from paceline.rl.students import Lesson, Taught
from paceline.schema import PacelineError

#: What the cluster may take to find room for the ranks, and they to load the policy and meet.
_PLACE_SECONDS, _START_SECONDS = 180.0, 300.0
#: After one rank failed: for the others, which may say more about why.
_LAST_WORDS_SECONDS = 3.0
_POLL_SECONDS = 5.0


class LearnersError(PacelineError):
    """The ranks of the learner cannot start or go on; the message names the one that is why."""


class RemoteLearner:
    """What a run uses of a ``Learner``, done by the ranks of ``config`` on Ray.

    ``policy`` is the driver's, as it is at the start: after every update it holds the weights that the ranks have, so
    publishing, saving and checkpoints are the driver's own. Raises LearnersError, one line, where the ranks cannot
    start, one of them dies, or none makes progress for ``cluster.hang_seconds``; all of them are ended then.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self.policy = policy
        self._world = config.learner_ranks
        self._hang_seconds = config.cluster.hang_seconds
        self._updates = 0
        self._actors: list[Any] = []
        self._processes: list[int] = []
        #: The process of each rank, on its node.
        self.pids: list[int] = []
        self._cluster = RayCluster(config)
        self._ray = self._cluster.ray
        self._sender = make_sender("object")
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def update(self, batch: Batch, lesson: Lesson | None = None, wanted: Collection[int] = ()) -> dict[str, float]:
        """``Learner.update``; the ranks teach the ``lesson`` too, of the rollouts ``wanted`` and its own."""
        data = self._ray.put(encode(SentBatch.of(batch)))
        sent = None if lesson is None else (list(wanted), lesson.more)
        answers = self._all("update", data, sent, stalls_after=self._hang_seconds)
        came = self._merged(answer.weights for answer in answers)
        if answers[0].updates > self._updates:
            self.policy.load_state(under(POLICY, came))
        self._updates = answers[0].updates
        if lesson is not None:
            lesson.weights = under(DRAFTER, came)
            lesson.taught = next(decode(Taught, answer.taught) for answer in answers if answer.taught is not None)
        return decode(dict[str, float], answers[0].metrics)

    @property
    def updates(self) -> int:
        """Optimiser steps taken so far, over all batches."""
        return self._updates

    def state(self) -> dict[str, Tensor]:
        """As ``Learner.state``, in the same format; read-only."""
        return under(OPTIMISER, self._merged(self._all("state", stalls_after=STATE_SECONDS)))

    def drafter_state(self) -> dict[str, Tensor]:
        """The state of the drafter's optimiser; read-only."""
        return under(DRAFTER, self._merged(self._all("drafter_state", stalls_after=STATE_SECONDS)))

    def load_drafter(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """Give every rank the drafter's weights, and its optimiser's state where there is one.

        PacelineError where they do not fit the ranks' own.
        """
        own = {f"{DRAFTER}{name}": tensor for name, tensor in weights.items()}
        theirs = {f"{OPTIMISER}{name}": tensor for name, tensor in (state or {}).items()}
        refusals = self._all("load_drafter", self._sender.send(Weights(0, own | theirs)), stalls_after=STATE_SECONDS)
        self._sender.release(0)
        for refusal in refusals:
            if refusal is not None:
                raise PacelineError(refusal)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """As ``Learner.load_state``; the ranks get the driver's policy with it, so that is loaded before."""
        own = {f"{POLICY}{name}": tensor for name, tensor in self.policy.state().items()}
        theirs = {f"{OPTIMISER}{name}": tensor for name, tensor in tensors.items()}
        self._all("load_state", self._sender.send(Weights(0, own | theirs)), stalls_after=STATE_SECONDS)
        self._sender.release(0)
        self._updates = int(tensors["updates"])

    def close(self) -> None:
        """End the ranks, and the cluster where this has started it: so after the fleet."""
        self._end()
        self._cluster.close()

    def _start(self, config: Config) -> None:
        ray, cluster = self._ray, config.cluster
        method: Any = ray.method(concurrency_group="watch")
        watched = {name: method(getattr(RankActor, name)) for name in ("here", "passes")}
        made = ray.remote(
            num_cpus=cluster.learner_cpus,
            num_gpus=cluster.learner_gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"watch": 2},
        )(type("LearnerActor", (RankActor,), watched))
        self._actors = [made.remote(encode(config), rank) for rank in range(self._world)]
        refs = [actor.here.remote() for actor in self._actors]
        there, absent = ray.wait(refs, num_returns=self._world, timeout=_PLACE_SECONDS)
        if absent:
            free = ray.available_resources()
            raise LearnersError(
                f"cluster.learner_workers, parallel: {len(there)} of {self._world} learners came in "
                f"{_PLACE_SECONDS:g} s; each needs {cluster.learner_cpus:g} CPU and {cluster.learner_gpus:g} GPU, the "
                f"cluster has {free.get('CPU', 0):g} and {free.get('GPU', 0):g} free"
            )
        places = self._all("here", stalls_after=_PLACE_SECONDS)
        self.pids = [process for _, _, process in places]
        self._processes = [
            os.pidfd_open(process)
            for node, _, process in places
            if node == self._cluster.node and hasattr(os, "pidfd_open")
        ]
        host = LOOPBACK if len({node for node, _, _ in places}) == 1 else places[0][1]
        port = ray.get(self._actors[0].listen.remote(host), timeout=_PLACE_SECONDS)
        secret, expected = secrets.token_hex(16), fingerprint(self.policy)
        self._all("join", host, port, secret, expected, stalls_after=_START_SECONDS)

    def _all(self, name: str, *arguments: Any, stalls_after: float) -> list[Any]:
        """What every rank answers to a call. PacelineError where all refuse it in one line, else LearnersError."""
        from ray.exceptions import RayError

        if not self._actors:
            raise LearnersError("the ranks of the learner have ended; resume the run from its last checkpoint")
        refs = [getattr(actor, name).remote(*arguments) for actor in self._actors]
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        pending, moved, before, until = refs, time.monotonic(), None, math.inf
        while pending and (left := until - time.monotonic()) > 0:
            done, pending = self._ray.wait(pending, timeout=min(_POLL_SECONDS, stalls_after / 4, left))
            for ref in done:
                moved = time.monotonic()
                try:
                    answers[refs.index(ref)] = self._ray.get(ref)
                except RayError as error:
                    errors[refs.index(ref)] = error
                    until = min(until, moved + _LAST_WORDS_SECONDS)
            if done or errors:
                continue
            passes = self._passes()
            if passes != before:
                moved, before = time.monotonic(), passes
            elif time.monotonic() - moved > stalls_after:
                rank = min(range(self._world), key=lambda rank: (passes[rank] is not None, passes[rank] or 0))
                raise self._ended(rank, f"makes no progress ({name}, {stalls_after:g} s)")
        if errors:
            raise self._failed(errors)
        return [answers[rank] for rank in range(self._world)]

    def _merged(self, parcels: Iterable[Parcel | None]) -> dict[str, Tensor]:
        """The tensors of all ranks that gave some; what two have is the same."""
        receiver, tensors = Receiver(STATE_SECONDS), dict[str, Tensor]()
        for parcel in parcels:
            if parcel is not None:
                tensors |= receiver.receive(parcel).policy
        return tensors

    def _passes(self) -> list[int | None]:
        """How far each rank is; None for one that does not say."""
        refs = [actor.passes.remote() for actor in self._actors]
        said, _ = self._ray.wait(refs, num_returns=self._world, timeout=1.0)
        found: list[int | None] = [None] * self._world
        for ref in said:
            with suppress(Exception):
                found[refs.index(ref)] = self._ray.get(ref)
        return found

    def _failed(self, errors: Mapping[int, Exception]) -> PacelineError:
        from ray.exceptions import RayActorError

        causes = {rank: getattr(error, "cause", None) for rank, error in errors.items()}
        refusals = {rank: cause for rank, cause in causes.items() if isinstance(cause, PacelineError)}
        if len(refusals) == self._world:
            # All refuse alike before they exchange anything, and could go on.
            return refusals[0]
        # The others fail because one does.
        for rank, error in errors.items():
            if isinstance(error, RayActorError):
                return self._ended(rank, f"died ({one_line(error)})")
        rank = min(refusals or errors)
        return self._ended(rank, f"failed ({one_line(causes[rank] or errors[rank])})")

    def _ended(self, rank: int, why: str) -> LearnersError:
        self._end()
        return LearnersError(
            f"learner rank {rank} of {self._world} {why}; all were ended: resume the run from its last checkpoint"
        )

    def _end(self) -> None:
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)
        for process in self._processes:
            # One that is stopped does not hear Ray.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        self._actors, self._processes = [], []
