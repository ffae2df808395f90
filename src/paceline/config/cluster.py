"""Where a run's processes live: all in one, or rollout workers and learners on Ray."""

import math
from typing import Literal

import msgspec

from paceline.config.base import Section, require


class ClusterConfig(Section):
    """``local`` keeps everything in one process; ``ray`` has rollout workers, and learners where there are several.

    ``address`` null starts a cluster on this machine that ends with the run; ``auto`` or HOST:PORT joins one. CPUs,
    GPUs and ``resources`` (Ray's custom ones) are of each rollout worker, ``learner_cpus`` and ``learner_gpus`` of each
    learner. ``transport`` says how weights reach the workers; ``auto`` takes shared memory on one host and Ray's object
    store elsewhere. A worker is given ``ahead`` requests beyond its slots. One that shows no progress for
    ``hang_seconds`` is replaced; the run ends after ``restarts`` replacements without a finished rollout in between.
    Finished rollouts reach the histories of other workers every ``share_seconds`` (0: never), and up to ``history_mib``
    of them are kept for workers that are replaced.
    """

    kind: Literal["local", "ray"] = "local"
    address: str | None = None
    rollout_workers: int = 2
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    learner_workers: int = 1
    learner_cpus: float = 1.0
    learner_gpus: float = 0.0
    resources: dict[str, float] = msgspec.field(default_factory=dict)
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    transport: Literal["auto", "shared_memory", "object", "broadcast"] = "auto"
    ahead: int = 4
    hang_seconds: float = 120.0
    restarts: int = 8
    share_seconds: float = 1.0
    history_mib: int = 256

    def __post_init__(self) -> None:
        require(self.address is None or bool(self.address.strip()), "address", self.address, "auto, HOST:PORT or null")
        for key in ("rollout_workers", "learner_workers"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("worker_cpus", "worker_gpus", "learner_cpus", "learner_gpus", "share_seconds"):
            value = getattr(self, key)
            require(0 <= value < math.inf, key, value, "finite and >= 0")
        own = self.resources
        require(all(0 < v < math.inf for v in own.values()), "resources", own, "amounts above 0, by name")
        for key in ("ahead", "restarts", "history_mib"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        require(0 < self.hang_seconds < math.inf, "hang_seconds", self.hang_seconds, "finite and > 0")
