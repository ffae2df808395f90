"""The learner's side: one parcel for every published version, kept until no worker needs it."""

import logging
import threading
from collections.abc import Callable
from typing import IO, Literal, Protocol

from paceline.rl.cluster.transport import objects, shared_memory
from paceline.rl.cluster.transport.parcel import Kind, Parcel, decode, plan, unpack
from paceline.rl.cluster.transport.receiver import Receiver
from paceline.rl.fleet import Weights

_log = logging.getLogger(__name__)


class Sender(Protocol):
    """Makes parcels of weights. Any thread may call; ``events`` counts fallbacks by name.

    ``send`` copies, so the learner may go on to change the tensors once it has returned. ``again`` is for a worker
    whose ``Receiver.receive`` raised TransportError: the same weights, by Ray's object store.
    """

    events: dict[str, int]

    def send(self, weights: Weights) -> Parcel:
        """The parcel of a new version, for any number of workers, at once or later, until it is released."""

    def again(self, version: int) -> Parcel:
        """The parcel of a version by Ray's object store. KeyError where it was released."""

    def release(self, version: int) -> None:
        """No worker will be told of this version any more; workers that have it keep it."""

    def close(self) -> None:
        """Release all versions."""


def choose(kind: Literal["auto", "shared_memory", "object", "broadcast"], *, one_host: bool) -> Kind:
    """What ``cluster.transport`` means where all workers are on the driver's host, or some are not."""
    if kind != "auto":
        return kind
    return "shared_memory" if one_host and shared_memory.possible() else "object"


def make_sender(kind: Kind, *, host: str = "127.0.0.1", timeout_s: float = 30.0) -> Sender:
    """The sender of a transport (``choose``).

    A broadcast listens at ``host``, which the workers must reach, and is given up after ``timeout_s``; receivers should
    wait at least twice as long.
    """
    if kind == "broadcast":
        return BroadcastSender(host, timeout_s)
    return SharedMemorySender() if kind == "shared_memory" else ObjectSender()


class ObjectSender:
    """Weights through Ray's object store."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}
        self._parcels: dict[int, Parcel] = {}

    def send(self, weights: Weights) -> Parcel:
        """See ``Sender``."""
        self._parcels[weights.version] = parcel = objects.put(plan(weights))
        return parcel

    def again(self, version: int) -> Parcel:
        """See ``Sender``."""
        return self._parcels[version]

    def release(self, version: int) -> None:
        """See ``Sender``."""
        self._parcels.pop(version, None)

    def close(self) -> None:
        """See ``Sender``."""
        self._parcels.clear()


class SharedMemorySender:
    """Weights through shared memory; through Ray's object store where memory is short (``shared_memory_full``)."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}
        self._objects = ObjectSender()
        self._files: dict[int, tuple[Parcel, IO[bytes]]] = {}
        self._lock = threading.Lock()

    def send(self, weights: Weights) -> Parcel:
        """See ``Sender``."""
        self.release(weights.version)
        try:
            parcel, file = shared_memory.put(plan(weights, part_bytes=1 << 48))
        except OSError as error:
            reason = error.strerror or str(error)
            _fell_back(self.events, "shared_memory_full", f"weights of version {weights.version}: {reason}")
            return self._objects.send(weights)
        with self._lock:
            self._files[weights.version] = parcel, file
        return parcel

    def again(self, version: int) -> Parcel:
        """See ``Sender``."""
        return _resent(self._objects, version, lambda: Receiver().receive(self._files[version][0]), self.events)

    def release(self, version: int) -> None:
        """See ``Sender``."""
        self._objects.release(version)
        with self._lock:
            _parcel, file = self._files.pop(version, (None, None))
        if file is not None:
            file.close()

    def close(self) -> None:
        """See ``Sender``."""
        for version in list(self._files):
            self.release(version)
        self._objects.close()


class BroadcastSender:
    """Weights by collective broadcasts; one that does not end is ``broadcast_fell_back``."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 30.0) -> None:
        from paceline.rl.cluster.transport.broadcast import Broadcaster

        self.events: dict[str, int] = {}
        self._objects = ObjectSender()
        self._parcels: dict[int, Parcel] = {}
        self._broadcaster = Broadcaster(self.events, host, timeout_s)

    def send(self, weights: Weights) -> Parcel:
        """See ``Sender``."""
        self.release(weights.version)
        self._parcels[weights.version] = parcel = self._broadcaster.put(plan(weights))
        return parcel

    def again(self, version: int) -> Parcel:
        """See ``Sender``."""
        message = self._parcels[version].message
        return _resent(
            self._objects, version, lambda: unpack(decode(message), self._broadcaster.kept(version)), self.events
        )

    def release(self, version: int) -> None:
        """See ``Sender``."""
        self._objects.release(version)
        self._broadcaster.release(version)
        self._parcels.pop(version, None)

    def close(self) -> None:
        """See ``Sender``."""
        self._broadcaster.close()
        self._objects.close()
        self._parcels.clear()


def _resent(objects: ObjectSender, version: int, weights: Callable[[], Weights], events: dict[str, int]) -> Parcel:
    """The parcel of a version that did not arrive, made of what the sender kept at the first call."""
    try:
        return objects.again(version)
    except KeyError:
        parcel = objects.send(weights())
    _fell_back(events, "weights_sent_again", f"weights of version {version} did not arrive")
    return parcel


def _fell_back(events: dict[str, int], event: str, what: str) -> None:
    events[event] = events.get(event, 0) + 1
    _log.warning("%s: %s; they go through Ray's object store", event, what)
