"""Weights by a collective: all workers that ask for a version at the same time receive one gloo broadcast of it.

The group has nothing to do with torch.distributed's default one, which learners may use. A worker asks through a
TCPStore and is told its seat in a group of those that asked with it, so one that is lost, late or alone holds up nobody
but those whose group it was in, and these no longer than the timeout. Whoever can reach the sender's address can read
the weights: it is a loopback address unless told otherwise.
"""

import logging
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from paceline.rl.cluster.transport.parcel import Manifest, Parcel, Plan, TransportError, digest_of, fill

_log = logging.getLogger(__name__)

#: Workers that ask within this time of one another share a broadcast.
_GATHER_SECONDS = 0.02
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 0.2
#: How long a worker may take from drawing the number of its question to asking it.
_SLOW_SECONDS = 2.0
_MOST_GROUPS = 4
_COUNT = "asked"


class _Ask(msgspec.Struct, array_like=True):
    version: int
    member: str
    groups: list[str]


class _Seat(msgspec.Struct, array_like=True):
    group: str
    rank: int
    size: int


class _Groups(OrderedDict[str, Any]):
    """The groups of one process that were used last; both sides forget in the same order."""

    def join(self, store: Store, name: str, rank: int, size: int, host: str, timeout_s: float) -> Any:
        """The group of that name. RuntimeError where the others do not come."""
        if name not in self:
            options: Any = cast(Any, ProcessGroupGloo)._Options()  # which its stubs do not know
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=timeout_s)
            self[name] = ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
            while len(self) > _MOST_GROUPS:
                self.popitem(last=False)
        self.move_to_end(name)
        return self[name]


class Broadcaster:
    """The learner's side, rank 0 of every group, in a thread of its own.

    ``host`` is the address that it listens at; TransportError where it is none of this machine. ``events`` counts
    ``broadcast_fell_back``: a broadcast that did not end.
    """

    def __init__(self, events: dict[str, int], host: str = "127.0.0.1", timeout_s: float = 30.0):
        self._events = events
        self._host = host
        self._timeout_s = timeout_s
        self._parts: dict[int, list[Tensor]] = {}
        self._groups = _Groups()
        self._members: dict[str, frozenset[str]] = {}
        self._made = 0
        self._is_closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
            raise TransportError(f"cluster.transport=broadcast: {host} cannot be listened at: {reason}") from None
        with listening:
            port = listening.getsockname()[1]
            server = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(),
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        secret = secrets.token_hex(16)
        self._where = f"{host}:{port}/{secret}"
        self._store = PrefixStore(secret, server)
        self._thread = threading.Thread(target=self._serve, name="paceline-broadcast", daemon=True)
        self._thread.start()

    def put(self, plan: Plan) -> Parcel:
        """The parcel of a plan. A copy of its tensors is kept on the host until the version is released."""
        parts = [torch.empty(size, dtype=torch.uint8) for size in plan.sizes]
        for part_N, sources in zip(parts, plan.sources, strict=True):
            fill(part_N, sources)
        self._parts[plan.weights.version] = parts
        return Parcel(plan.manifest("broadcast", [digest_of(part_N) for part_N in parts], where=self._where))

    def kept(self, version: int) -> list[Tensor]:
        """The parts of a version. KeyError where it was released."""
        return self._parts[version]

    def release(self, version: int) -> None:
        """Forget a version; whoever asks for it is told so."""
        self._parts.pop(version, None)

    def close(self) -> None:
        """End the thread, after the broadcast that runs now."""
        self._is_closing = True
        self._thread.join(2 * self._timeout_s)
        self._parts.clear()

    def _serve(self) -> None:
        number, since = 0, time.monotonic()
        while not self._is_closing:
            if self._asked(number):
                first = number
                while self._asked(number):
                    number += 1
                    time.sleep(_GATHER_SECONDS)
                self._answer(range(first, number))
                since = time.monotonic()
                continue
            time.sleep(_POLL_SECONDS)
            if self._store.add(_COUNT, 0) <= number:
                since = time.monotonic()
            elif time.monotonic() > since + _SLOW_SECONDS:  # whoever drew this number is gone
                number += 1

    def _asked(self, number: int) -> bool:
        # Waiting in the store would keep everything else waiting, and be logged whenever it ends without an answer.
        return self._store.check([f"ask/{number}"])

    def _answer(self, numbers: Sequence[int]) -> None:
        by_version: dict[int, dict[int, _Ask]] = {}
        for number in numbers:
            with suppress(msgspec.DecodeError):
                ask = msgspec.json.decode(self._store.get(f"ask/{number}"), type=_Ask)
                by_version.setdefault(ask.version, {})[number] = ask
            self._store.delete_key(f"ask/{number}")
        for version, asks in sorted(by_version.items()):
            parts = self._parts.get(version)
            if parts is None:
                for number in asks:
                    self._store.set(f"answer/{number}", "")
                continue
            name = self._name(list(asks.values()))
            seats = sorted(asks, key=lambda number: asks[number].member)
            for rank, number in enumerate(seats, 1):
                seat = _Seat(name, rank, len(seats) + 1)
                self._store.set(f"answer/{number}", msgspec.json.encode(seat).decode())
            try:
                group = self._groups.join(self._store, name, 0, len(seats) + 1, self._host, self._timeout_s)
                for work in [group.broadcast(part_N, 0) for part_N in parts]:
                    work.wait()
            except RuntimeError as error:
                self._groups.pop(name, None)
                self._store.set(f"failed/{name}", "")
                self._events["broadcast_fell_back"] = self._events.get("broadcast_fell_back", 0) + 1
                reason = " ".join(str(error).split())[:200]
                _log.warning("broadcast_fell_back: version %d to %d workers: %s", version, len(seats), reason)

    def _name(self, asks: Sequence[_Ask]) -> str:
        """A group of exactly those who ask: one that all of them still have, else a new one."""
        members = frozenset(ask.member for ask in asks)
        for name in self._groups:
            if self._members[name] == members and all(name in ask.groups for ask in asks):
                return name
        self._made += 1
        name = f"group/{self._made}"
        self._members = {known: self._members[known] for known in self._groups} | {name: members}
        return name


class Listener:
    """The worker's side: asks for a version and receives it."""

    def __init__(self, where: str, timeout_s: float):
        address, _, secret = where.partition("/")
        host, _, port = address.rpartition(":")
        self._timeout_s = timeout_s
        store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        self._store = PrefixStore(secret, store)
        self._host = _own_address(host, int(port))
        self._member = secrets.token_hex(8)
        self._groups = _Groups()

    def get(self, manifest: Manifest) -> list[Tensor]:
        """The parts of a parcel; RuntimeError where they do not come, TransportError where they were released."""
        number = self._store.add(_COUNT, 1) - 1
        ask = _Ask(manifest.version, self._member, list(self._groups))
        self._store.set(f"ask/{number}", msgspec.json.encode(ask).decode())
        answer = self._store.get(f"answer/{number}")
        self._store.delete_key(f"answer/{number}")
        if not answer:
            raise TransportError(
                f"weights of version {manifest.version}: they were released; take those of a newer one"
            )
        seat = msgspec.json.decode(answer, type=_Seat)
        parts = [torch.empty(size, dtype=torch.uint8) for size in manifest.sizes]
        try:
            group = self._groups.join(self._store, seat.group, seat.rank, seat.size, self._host, self._timeout_s)
            for work in [group.broadcast(part_N, 0) for part_N in parts]:
                self._wait(work, seat.group)
        except RuntimeError:
            self._groups.pop(seat.group, None)
            raise
        return parts

    def _wait(self, work: Any, name: str) -> None:
        """Until a part is here, or the sender says that it never will be: gloo does not tell all members."""
        look = time.monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            time.sleep(0.0005)
            if time.monotonic() > look:
                if self._store.check([f"failed/{name}"]):
                    raise TransportError("another worker of the broadcast was lost; have the weights sent again")
                look = time.monotonic() + _LOOK_SECONDS
        work.wait()


def is_place(where: str) -> bool:
    """Whether a manifest's ``where`` is of the form that a ``Broadcaster`` gives it."""
    return re.fullmatch(r"[^/\s]{1,255}:[0-9]{1,5}/[0-9a-f]{32}", where) is not None


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
