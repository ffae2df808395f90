"""The section about trackers: where else the metrics of a run are written."""

import ipaddress
from typing import Literal

import msgspec

from paceline.config.base import Section, require
from paceline.typed_yaml import nearest

#: What ``track.to`` may name.
TRACKERS: tuple[str, ...] = ("tensorboard", "wandb", "trackio", "mlflow", "prometheus")


class WandbConfig(Section):
    """Weights & Biases. ``mode`` null follows the variable ``WANDB_MODE``, and without one is ``offline``."""

    mode: Literal["offline", "online"] | None = None


class MlflowConfig(Section):
    """MLflow. ``uri`` null follows ``MLFLOW_TRACKING_URI``, and without one is ``mlflow.db`` in the run's folder."""

    uri: str | None = None

    def __post_init__(self) -> None:
        require(self.uri is None or bool(self.uri.strip()), "uri", self.uri, "a tracking URI or null")


class PrometheusConfig(Section):
    """The page that Prometheus reads, at ``host`` and ``port`` (0: any that is free)."""

    host: str = "127.0.0.1"
    port: int = 9464

    def __post_init__(self) -> None:
        require(bool(self.host.strip()), "host", self.host, "an address or a name")
        require(0 <= self.port < 1 << 16, "port", self.port, "from 0 to 65535")


class TrackConfig(Section):
    """Trackers that are told each step, besides ``metrics.jsonl``. See [Trackers](trackers.md).

    ``name`` null is the name of the run's folder.
    """

    to: tuple[str, ...] = ()
    project: str = "paceline"
    name: str | None = None
    wandb: WandbConfig = msgspec.field(default_factory=WandbConfig)
    mlflow: MlflowConfig = msgspec.field(default_factory=MlflowConfig)
    prometheus: PrometheusConfig = msgspec.field(default_factory=PrometheusConfig)

    def __post_init__(self) -> None:
        for name in self.to:
            if name not in TRACKERS:
                raise ValueError(f"to: {name!r} is no tracker{nearest(name, TRACKERS)}")
        require(len(set(self.to)) == len(self.to), "to", list(self.to), "names without repetition")
        require(bool(self.project.strip()), "project", self.project, "a name")
        require(self.name is None or bool(self.name.strip()), "name", self.name, "a name or null")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
