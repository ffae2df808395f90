"""The Ray cluster of a run: one that is joined, or one on this machine that ends with the run."""

import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.config import ClusterConfig, Config
from paceline.schema import PacelineError
from paceline.signals import handlers_kept

_LOG = logging.getLogger(__name__)

_KNOCK_SECONDS = 10.0
_MISSES = 3
#: Ray binds to loopback where there can be no other nodes: a variable for its processes, and what this one made of it.
_NO_OTHER_NODES = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER")


class RayCluster:
    """Connects this process to Ray as the ``run`` says; ``close`` ends what was started here.

    The connection ends with the last one that is closed; one that this process had before is used, and left as it is. A
    cluster that is started listens on loopback only, and has as many CPUs as were asked for, also where the machine has
    fewer (a warning says so).
    PacelineError, one line, where there is no Ray, no cluster at the address, or not what is asked for.
    """

    _users = 0

    def __init__(self, run: Config) -> None:
        config = run.cluster
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if config.address is None:
            # Ray's own choice, 15, is for machines that workers share with what matters more.
            os.environ.setdefault("RAY_worker_niceness", "0")
        self.ray = import_ray()
        self._is_own = not self.ray.is_initialized() or RayCluster._users > 0
        if not self.ray.is_initialized():
            self._connect(config, run.learner_ranks)
        RayCluster._users += self._is_own
        self._head = str(self.ray.get_runtime_context().gcs_address)
        self._misses = 0
        #: Whether its head was lost: no call of Ray's returns then.
        self.is_gone = False

    def _connect(self, config: ClusterConfig, learners: int) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if config.address is not None:
                _knock(config.address)
                with handlers_kept():
                    self.ray.init(address=config.address, **quiet)
                return
            with handlers_kept(), _loopback_only():
                self.ray.init(address="local", include_dashboard=False, **quiet, **_amounts(config, learners))
        except PacelineError:
            raise
        except Exception as error:  # noqa: BLE001  whatever Ray raises; none of its kinds is promised
            where = "cannot be started on this machine" if config.address is None else f"is not at {config.address}"
            raise PacelineError(f"cluster.address={config.address}: Ray {where}: {one_line(error)}") from None

    @property
    def node(self) -> str:
        """The id of the node that this process runs on."""
        return str(self.ray.get_runtime_context().get_node_id())

    def check(self) -> None:
        """PacelineError where the head of the cluster does not answer; Ray would end this process a minute later."""
        try:
            _knock(self._head)
        except OSError as error:
            self._misses += 1
            if self._misses >= _MISSES:
                self.is_gone = True
                raise PacelineError(
                    f"the head of the Ray cluster at {self._head} is gone ({error}); resume the run"
                ) from None
        else:
            self._misses = 0

    def close(self) -> None:
        """Leave the cluster where nobody else here uses it, and end it where it was started here."""
        was_own, self._is_own = self._is_own, False
        RayCluster._users -= was_own
        if was_own and not RayCluster._users and not self.is_gone:
            self.ray.shutdown()


def import_ray() -> Any:
    """The package. PacelineError says how to get it."""
    try:
        import ray
        import ray._private.ray_constants
    except ImportError:
        raise PacelineError("cluster.kind=ray: Ray is not installed; pip install 'paceline[ray]'") from None
    return ray


def one_line(error: BaseException) -> str:
    """An error of Ray, whose texts are long, as one line of at most 300 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _knock(address: str) -> None:
    """Ray asks a host that is not there for minutes; OSError says so at once."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


def _amounts(config: ClusterConfig, learners: int) -> dict[str, Any]:
    """What a cluster on this machine has to offer."""
    if config.resources:
        raise PacelineError(
            f"cluster.resources={config.resources} are of a cluster that was started with them; set cluster.address"
        )
    learners, workers = learners if learners > 1 else 0, config.rollout_workers if config.kind == "ray" else 0
    gpus = workers * config.worker_gpus + learners * config.learner_gpus
    if gpus:
        import torch

        here = torch.cuda.device_count()
        if gpus > here:
            raise PacelineError(f"cluster.worker_gpus: {gpus:g} GPUs are asked for, there are {here}; ask for less")
    cpus = math.ceil(workers * config.worker_cpus + learners * config.learner_cpus)
    cores = os.cpu_count() or 1
    if cpus > cores:
        _LOG.warning("cluster: %d CPUs are asked for, this machine has %d; workers share them", cpus, cores)
    return {"num_cpus": max(cpus, cores), "num_gpus": math.ceil(gpus)}


@contextmanager
def _loopback_only() -> Iterator[None]:
    variable, constant = _NO_OTHER_NODES
    loaded = sys.modules.get("ray._private.ray_constants")
    before, was = os.environ.get(variable), getattr(loaded, constant, None)
    os.environ[variable] = "0"
    if was is not None:
        setattr(loaded, constant, False)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before
        if was is not None:
            setattr(loaded, constant, was)
