"""The Ray actor around a rollout worker: what it takes and gives are bytes, and it ends with the run."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from paceline.config import Config
from paceline.rl.cluster.codec import decode, encode
from paceline.rl.cluster.transport import Parcel, Receiver
from paceline.rl.cluster.worker import RolloutWorker
from paceline.schema import Rollout, RolloutRequest
from paceline.signals import ignore_stop_signals


class WorkerActor:
    """A ``RolloutWorker`` of a run's effective ``config``, in a process of its own.

    ``config`` is its ``codec.encode``; ``has_grammars`` says whether any prompt of the run brings a grammar. Policy and
    engine are built from the files that ``config`` names; which weights decode is the driver's to say, the first ones
    too. What fails is in the reports.
    """

    def __init__(self, config: bytes, role: str, has_grammars: bool) -> None:
        ignore_stop_signals()
        own = decode(Config, config)
        self._export = tempfile.TemporaryDirectory(prefix="paceline-worker-", ignore_cleanup_errors=True)
        self._worker = RolloutWorker(
            lambda: _engine(own, has_grammars, Path(self._export.name) / "policy"),
            role=role,
            receive=Receiver().receive,
            threads=max(1, int(own.cluster.worker_cpus)),
        )

    # In this order, one at a time

    def submit(self, requests: bytes) -> None:
        """``fleet.Worker.submit`` of a list of ``RolloutRequest``."""
        self._worker.submit(decode(list[RolloutRequest], requests))

    def load(self, parcel: Parcel, interrupt: bool = False) -> None:
        """``fleet.Worker.load`` of what the transport's sender made."""
        self._worker.load(parcel, interrupt=interrupt)

    def absorb(self, rollouts: bytes) -> None:
        """``fleet.Worker.absorb`` of a list of ``Rollout``."""
        self._worker.absorb(decode(list[Rollout], rollouts))

    def close(self) -> None:
        """End the decoding and release the engine; the process is ended by whoever made it."""
        self._worker.close()
        self._export.cleanup()

    # Beside them, at any time

    def collect(self, seconds: float) -> bytes:
        """``fleet.Worker.collect``: a ``Report``."""
        return encode(self._worker.collect(seconds))

    def ping(self) -> int:
        """The process id, as soon as the actor is there."""
        return os.getpid()


def start_worker(
    config: Config,
    role: str,
    *,
    has_grammars: bool,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A ``WorkerActor`` on the cluster that this process is connected to, as Ray's handle; it returns at once.

    CPUs, GPUs and resources are those of ``config.cluster``; ``options`` are further ones of Ray's actors, such as a
    scheduling strategy. The actor is never restarted by Ray, nor are its calls.
    """
    import ray

    method: Any = ray.method(concurrency_group="reports")
    remote: Any = ray.remote  # its stubs know no groups
    reports = {name: method(getattr(WorkerActor, name)) for name in ("collect", "ping")}
    actor = remote(
        num_cpus=config.cluster.worker_cpus,
        num_gpus=config.cluster.worker_gpus,
        resources=dict(config.cluster.resources),
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups={"reports": 2},
    )(type("RolloutActor", (WorkerActor,), reports))
    return actor.options(**(options or {})).remote(encode(config), role, has_grammars)


def _engine(config: Config, has_grammars: bool, export: Path) -> Any:
    from paceline.rl.drafting import sentinel
    from paceline.rl.engine import make_engine
    from paceline.rl.policy import Policy

    policy = Policy.load(config.policy, config.seed)
    watched = replace(config, engine=replace(config.engine, sentinel=sentinel(config)))
    engine = make_engine(watched, policy, export, has_grammars)
    policy.model.to("meta")  # the engine has a copy of its own; text is all that is asked of it
    return engine
