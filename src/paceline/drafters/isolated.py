"""A drafter in a process of its own: whatever becomes of it, the engine's process is not touched."""

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from paceline.config import DrafterConfig
from paceline.drafters import isolated_wire as wire
from paceline.history.snapshot import Snapshot, SnapshotError, decode_snapshot, encode_snapshot
from paceline.schema import Draft, Outcome, PacelineError, Rollout, RolloutRequest

#: What a drafter may take for one answer, or for reading what it is told.
SECONDS = 60.0
#: How long a process may take to end by itself.
_GRACE_SECONDS = 2.0
# What is imported must be what this process runs; its own path of modules goes on the end, for a package that is not
# installed.
_SCRIPT = "import sys; sys.path.append(sys.argv[1]); from paceline.drafters.isolated_worker import main; main()"
_ROOT = str(Path(__file__).parents[2])


class DrafterLostError(PacelineError):
    """The drafter's process has ended, does not answer, or its drafter has raised."""


class IsolatedDrafter:
    """Implements ``drafters.base.Drafter`` with the drafter of ``config`` in another process, which starts with the
    first call.

    ``salt`` and ``chains`` are those of ``make_drafter``; ``seconds`` without an answer end the process. Every call
    raises DrafterLostError once it is lost; ``propose`` and ``on_weights`` wait for answers, so they notice. The
    process ends with ``end``, with this object, and with this process, however that ends.
    """

    def __init__(
        self, config: DrafterConfig, salt: int | None = None, chains: bool = False, seconds: float = SECONDS
    ) -> None:
        self.config = config
        self.salt = salt
        self.chains = chains
        self.seconds = seconds
        self._process: _Process | None = None
        self._loss: str | None = None

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known; of their parameters nothing is told."""
        prompts = wire.Texts.of([each.request_id for each in requests], [each.prompt for each in requests])
        self._say(wire.Start(prompts, [each.group for each in requests], [each.prompt_key for each in requests]))

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """The drafts of the drafter in the other process, at most ``budget`` nodes each."""
        answer = self._ask(wire.Propose(list(request_ids), budget))
        if not isinstance(answer, wire.Drafts):
            raise self._lose(f"{type(answer).__name__} is no answer to Propose")
        return answer.drafts(request_ids)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Emitted tokens extend the contexts."""
        texts = wire.Texts.of([each.request_id for each in outcomes], [each.tokens for each in outcomes])
        accepted = np.array([each.accepted for each in outcomes], np.int32).tobytes()
        drafted = np.array([each.drafted for each in outcomes], np.int32).tobytes()
        self._say(wire.Commit(texts, accepted, drafted))

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete."""
        self._say(wire.Finish([each.request_id for each in rollouts], [each.finish_reason for each in rollouts]))

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``."""
        self._ask(wire.Moved(version))

    def verifying(self, drafts: Sequence[Draft]) -> None:
        """The pass over these drafts begins now."""
        if drafts and self.config.kind == "history" and self.config.history.prefetch:
            self._say(wire.Verify.of(drafts))

    def fresh(self) -> Self:
        """Another in a new process, which remembers nothing."""
        self.end_process()
        return type(self)(self.config, self.salt, self.chains, self.seconds)

    def end_process(self) -> None:
        """End the process; a later call starts another, which knows nothing."""
        if self._process is not None:
            self._process.end()
            self._process = None

    @property
    def pid(self) -> int | None:
        """The process in which the drafter works; None while there is none."""
        return None if self._process is None else self._process.pid

    def _began(self, process: "_Process") -> None:
        """The process runs; what it must know first."""
        process.send(wire.Hello(self.config, self.salt, self.chains))

    def _running(self) -> "_Process":
        if self._loss is not None:
            raise DrafterLostError(self._loss)
        if self._process is None:
            self._process = _Process()
            self._process.limit(self.seconds)
            self._began(self._process)
        self._process.limit(self.seconds)
        return self._process

    def _say(self, message: wire.Question) -> None:
        try:
            self._running().send(message)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            raise self._lose(self._why(error)) from None

    def _ask(self, message: wire.Question) -> wire.Answer:
        self._say(message)
        assert self._process is not None
        try:
            answer = self._process.receive()
        except (EOFError, OSError, msgspec.DecodeError) as error:
            raise self._lose(self._why(error)) from None
        if isinstance(answer, wire.Failed):
            raise self._lose(answer.message)
        return answer

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"its process {self.pid} did not answer within {self.seconds:g} s and was killed"
        if self._process is None:
            return f"its process could not be started: {error}"
        return f"its process {self.pid} {self._process.ending()}"

    def _lose(self, why: str) -> DrafterLostError:
        self._loss = why
        self.end_process()
        return DrafterLostError(why)


class IsolatedHistoryDrafter(IsolatedDrafter):
    """An isolated drafter with a history. Another in its place goes on from the last snapshot that went either way."""

    def __init__(
        self, config: DrafterConfig, salt: int | None = None, chains: bool = False, seconds: float = SECONDS
    ) -> None:
        super().__init__(config, salt, chains, seconds)
        self._last: bytes | None = None
        self._first: bytes | None = None

    def snapshot(self) -> Snapshot:
        """Everything finished and learned, for ``history.snapshot.encode_snapshot``; no request in flight."""
        answer = self._ask(wire.Save())
        if not isinstance(answer, wire.Saved):
            raise self._lose(f"{type(answer).__name__} is no answer to Save")
        self._last = answer.data
        return decode_snapshot(answer.data)

    def restore(self, snapshot: Snapshot) -> None:
        """Take over a snapshot; SnapshotError, and nothing is changed, as in ``HistoryDrafter.restore``."""
        data = encode_snapshot(snapshot)
        answer = self._ask(wire.Take(data))
        if isinstance(answer, wire.Refused):
            raise SnapshotError(answer.message)
        self._last = data

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that were decoded elsewhere become history."""
        self._say(wire.Absorb.of(rollouts))

    def votes(self) -> list[float]:
        """What was learned, as ``history.base.History.votes``."""
        answer = self._ask(wire.Recall())
        if not isinstance(answer, wire.Learned):
            raise self._lose(f"{type(answer).__name__} is no answer to Recall")
        return answer.votes

    def set_votes(self, state: list[float]) -> None:
        """Take over what ``votes`` gave."""
        self._say(wire.Learned(state))

    def fresh(self) -> Self:
        """Another in a new process, which remembers what the last snapshot holds."""
        other = super().fresh()
        other._last = other._first = self._last
        return other

    def _began(self, process: "_Process") -> None:
        super()._began(process)
        first, self._first = self._first, None
        if first is not None:
            # What was said n versions before the snapshot is that old still.
            for message in (wire.Moved(decode_snapshot(first).version), wire.Take(first)):
                process.send(message)
                answer = process.receive()
                if not isinstance(answer, wire.Done):
                    raise self._lose(f"its last snapshot cannot be taken over: {answer}")


class _Process:
    """The process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C ends the run in good order, and the drafter with it.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _SCRIPT, _ROOT, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        self.limit = ours.settimeout
        self._channel = wire.Channel(ours)
        self._answers: msgspec.msgpack.Decoder[wire.Answer] = msgspec.msgpack.Decoder(wire.Answer)
        self.end = weakref.finalize(self, _end, self._popen, ours, os.getpid())

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: wire.Question) -> None:
        self._channel.send(message)

    def receive(self) -> wire.Answer:
        return self._channel.receive(self._answers)

    def ending(self) -> str:
        """How the process ended, once the socket is closed."""
        try:
            code = self._popen.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"


def _end(process: subprocess.Popen[bytes], end: socket.socket, owner: int) -> None:
    end.close()
    if os.getpid() != owner:  # a fork, to whom the process does not belong
        return
    process.kill()
    process.wait()
