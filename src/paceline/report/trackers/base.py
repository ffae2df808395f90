"""What a tracker is, and what it is told: a run's parameters once, the numbers of each step."""

import importlib.metadata
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from paceline.config import Config, flat_settings
from paceline.schema import PacelineError, StepRecord

#: Packages whose versions are parameters of a run, where they are installed.
_PACKAGES = ("paceline", "torch", "transformers", "vllm", "ray")


class TrackerError(PacelineError):
    """A tracker that is asked for and cannot be opened; the message is one line."""


class Tracked(msgspec.Struct, kw_only=True, frozen=True):
    """The run that a tracker is opened for. ``id`` is what it gave when it was first opened, None if that is now.

    ``told`` is the last step that it was told, -1 where there is none.
    """

    config: Config
    out: Path
    name: str
    parameters: dict[str, Any]
    id: str | None = None
    told: int = -1


class Tracker(Protocol):
    """An open tracker. ``id`` is what it goes on by after a resume; it has every step up to ``told``."""

    id: str
    told: int

    def log(self, record: StepRecord) -> None:
        """Take a step; whatever is raised ends the tracker and not the run."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def numbers(record: StepRecord) -> Iterator[tuple[str, str, float]]:
    """The metrics of a step as (name, key, value), NaN included; the key is empty for a metric that is one number.

    The entries of a mapping or a list have their key or index; a text has the value 1 under itself. The step is none
    of them, and what is None or empty is left out.
    """
    for name in record.__struct_fields__[1:]:
        value = getattr(record, name)
        if isinstance(value, dict):
            entries = list(value.items())
        elif isinstance(value, list):
            entries = [("", text) if isinstance(text, str) else (str(i), text) for i, text in enumerate(value)]
        else:
            entries = [("", value)]
        for key, entry in entries:
            if isinstance(entry, str):
                if entry:
                    yield name, entry, 1.0
            elif entry is not None:
                yield name, key, float(entry)


def charted(record: StepRecord) -> dict[str, float]:
    """What a tracker with a history is told of a step: ``name`` or ``name/key``, without NaN, which is not known."""
    return {f"{name}/{key}" if key else name: value for name, key, value in numbers(record) if not math.isnan(value)}


def parameters(config: Config) -> dict[str, Any]:
    """Settings by their dotted keys, and ``versions.*``. Those of trackers are left out: a URI may hold a password."""
    known = {key: value for key, value in flat_settings(config).items() if not key.startswith("track.")}
    known["versions.python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            known[f"versions.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known
