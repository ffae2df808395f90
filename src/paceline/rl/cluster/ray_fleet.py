"""A run's fleet on Ray: a cluster, a place for each worker, and an actor in it, replaced where it dies."""

import os
import re
import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from paceline.config import Config
from paceline.engines.identity import Identity
from paceline.rl.cluster.actor import start_worker
from paceline.rl.cluster.codec import decode, encode
from paceline.rl.cluster.crew import Lost, Post
from paceline.rl.cluster.session import RayCluster, one_line
from paceline.rl.cluster.supervise import Supervisor
from paceline.rl.cluster.transport import Parcel, choose, make_sender
from paceline.rl.engine import drafts
from paceline.rl.fleet import Report
from paceline.schema import PacelineError, Rollout, RolloutRequest

#: What the cluster may take to find room for the workers.
_PLACE_SECONDS = 60.0
_POLL_SECONDS = 1.0
#: What a worker that was asked to end may take for it.
_GRACE_SECONDS = 3.0


class RayFleet(Supervisor):
    """The workers of ``config`` on Ray (``Supervisor``), and what else a run wants of its fleet.

    It returns once there is room for all workers; they start while the run goes on. PacelineError, one line, where Ray
    cannot be started or joined, or what is asked for is not there.
    """

    def __init__(self, config: Config, has_grammars: bool) -> None:
        crew = RayCrew(config, has_grammars)
        kind = choose(config.cluster.transport, one_host=crew.is_one_host)
        super().__init__(
            crew,
            make_sender(kind, host=crew.address),
            config.cluster,
            config.rl,
            slots=config.engine.slots,
            remembers=drafts(config),
        )

    def resting(self) -> AbstractContextManager[None]:
        """The workers' memory is their own: there is nothing to make room for."""
        return nullcontext()

    def check(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> Identity:  # noqa: ARG002
        """Workers decode ahead, so nothing is decoded twice; a run in one process checks the same settings."""
        return Identity("not checked", float("nan"))

    def projected_plain_seconds(self, lengths: Sequence[int]) -> float:  # noqa: ARG002
        """Unknown here."""
        return float("nan")

    def state(self) -> dict[str, Any]:
        """Engines measure passes anew after a resume."""
        return {}

    def load_state(self, state: Any) -> None:
        """See ``state``."""


class RayCrew:
    """Implements ``crew.Crew``: actors, each in its bundle of a placement group."""

    def __init__(self, config: Config, has_grammars: bool) -> None:
        self._config, self._has_grammars = config, has_grammars
        self._cluster = RayCluster(config)
        self._ray = self._cluster.ray
        try:
            self._group = self._placed()
        except BaseException:
            self._cluster.close()
            raise
        self._poll_seconds = min(_POLL_SECONDS, config.cluster.hang_seconds / 4)

    def hire(self, seat: str, post: Post) -> "RayHand":
        """An actor; it is there once Ray has started its process."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = int(seat.rsplit("-", 1)[1])
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"scheduling_strategy": strategy}
        actor = start_worker(self._config, seat, has_grammars=self._has_grammars, options=options)
        is_here = self._nodes()[index] == self._cluster.node
        return RayHand(self._cluster, actor, post, self._poll_seconds, is_here=is_here)

    def why_absent(self, seat: str) -> str:  # noqa: ARG002
        """What it waits for, and what the cluster has."""
        return f"{self._wanted()}; its node may be gone, or Ray cannot start processes there"

    def check(self) -> None:
        """PacelineError where the cluster's head is gone."""
        self._cluster.check()

    def close(self) -> None:
        """Give the places back, and end the cluster where it was started here."""
        if not self._cluster.is_gone:
            with suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self._cluster.close()

    @property
    def is_one_host(self) -> bool:
        """Whether all workers are on this process' node."""
        return set(self._nodes().values()) == {self._cluster.node}

    @property
    def address(self) -> str:
        """Where the workers reach this process."""
        return str(self._ray.util.get_node_ip_address())

    def _nodes(self) -> dict[int, str]:
        """The node of each bundle, where that is known."""
        from ray.util import placement_group_table

        return dict(placement_group_table(self._group)["bundles_to_node_id"])

    def _placed(self) -> Any:
        """A placement group with room for every worker."""
        from ray.util import placement_group

        cluster = self._config.cluster
        one = {"CPU": cluster.worker_cpus, "GPU": cluster.worker_gpus, **cluster.resources}
        bundle = {name: amount for name, amount in one.items() if amount} or {"CPU": 0.001}
        strategy = cluster.placement.upper()
        group = placement_group([bundle] * cluster.rollout_workers, strategy=strategy)
        if not group.wait(_PLACE_SECONDS):
            line = f"cluster.rollout_workers={cluster.rollout_workers}: {self._wanted()}"
            self._ray.util.remove_placement_group(group)
            raise PacelineError(f"{line}; there was no room for them in {_PLACE_SECONDS:g} s ({strategy})")
        return group

    def _wanted(self) -> str:
        cluster = self._config.cluster
        one = {"CPU": cluster.worker_cpus, "GPU": cluster.worker_gpus, **cluster.resources}
        free = self._ray.available_resources()
        asked = ", ".join(f"{amount:g} {name}" for name, amount in one.items() if amount)
        rest = ", ".join(f"{free.get(name, 0):g} {name}" for name, amount in one.items() if amount)
        return f"each worker needs {asked or 'nothing'}, the cluster has {rest or 'nothing'} free"


class RayHand:
    """Implements ``crew.Hand`` over an actor's handle; ``is_here`` where its process is one of this machine."""

    def __init__(self, cluster: RayCluster, actor: Any, post: Post, poll_seconds: float, *, is_here: bool) -> None:
        self._cluster, self._actor, self._post, self._poll_seconds = cluster, actor, post, poll_seconds
        self._process: int | None = None
        self._lock = threading.Lock()
        self._closing: Any = None
        self._is_dead = False
        if is_here and hasattr(os, "pidfd_open"):
            actor.ping.remote().future().add_done_callback(self._came)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See ``Hand``."""
        self._call(self._actor.submit, encode(list(requests)))

    def load(self, parcel: Parcel, *, interrupt: bool = False) -> None:
        """See ``Hand``."""
        self._call(self._actor.load, parcel, interrupt)

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """See ``Hand``."""
        self._call(self._actor.absorb, encode(list(rollouts)))

    def ask(self) -> None:
        """See ``Hand``."""
        self._actor.collect.remote(self._poll_seconds).future().add_done_callback(self._told)

    def close(self) -> None:
        """See ``Hand``."""
        if not self._cluster.is_gone:
            self._closing = self._actor.close.remote()

    def kill(self) -> None:
        """See ``Hand``. A process that was stopped does not hear Ray, so one of this machine is killed as well."""
        self._is_dead = True
        if not self._cluster.is_gone:
            with suppress(Exception):
                if self._closing is not None:
                    self._cluster.ray.wait([self._closing], timeout=_GRACE_SECONDS)
                self._cluster.ray.kill(self._actor)
        self._end_process()

    def _end_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)

    def _call(self, method: Any, *arguments: Any) -> None:
        method.remote(*arguments).future().add_done_callback(self._done)

    # What follows is called by a thread of Ray's, which must not wait for Ray.

    def _came(self, future: Any) -> None:
        with suppress(Exception):  # it is gone already
            self._process = os.pidfd_open(future.result())
        if self._is_dead:  # this is a thread of Ray's own, in which its calls never return
            self._end_process()

    def _done(self, future: Any) -> None:
        error = future.exception()
        if error is not None:
            self._post(Lost(_why(error)))

    def _told(self, future: Any) -> None:
        try:
            self._post(decode(Report, future.result()))
        except Exception as error:  # noqa: BLE001  Ray raises many kinds for a worker that is gone
            self._post(Lost(_why(error)))


def _why(error: BaseException) -> str:
    """Of Ray's account of a death, the part that says why."""
    line = " ".join(str(error).split())
    found = re.search(r"The actor is (?:dead|unavailable) because (.+?)(?: Some common|$)", line)
    return found[1][:300] if found else one_line(error)
