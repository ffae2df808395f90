"""The process in which an isolated drafter works."""

import os
import socket
import sys

import msgspec
import numpy as np

from paceline.drafters import history_of, make_drafter
from paceline.drafters import isolated_wire as wire
from paceline.drafters.base import Absorbs, Drafter, Prefetcher
from paceline.history.snapshot import SnapshotError, decode_snapshot, encode_snapshot
from paceline.schema import Outcome, PacelineError, RolloutRequest
from paceline.signals import ignore_stop_signals

#: How often an idle process looks whether the one that started it is still there.
_LOOK_SECONDS = 2.0


def main() -> None:
    """Serve the socket that the command line names, until its other end or the process behind it is gone."""
    # Slurm and containers signal every process of a job; the run finishes its step with this one's help.
    ignore_stop_signals()
    end, parent = socket.socket(fileno=int(sys.argv[-2])), int(sys.argv[-1])
    channel = wire.Channel(end)
    questions: msgspec.msgpack.Decoder[wire.Question] = msgspec.msgpack.Decoder(wire.Question)
    served = _Served()
    while os.getppid() == parent:  # a fork of the parent may hold the socket open
        try:
            end.settimeout(_LOOK_SECONDS)
            question = channel.receive(questions)
            end.settimeout(None)
            answer = served.answer(question)
            if answer is not None:
                channel.send(answer)
        except TimeoutError:
            continue
        except (EOFError, OSError):
            return


class _Served:
    """A drafter that is asked from elsewhere. Once it has raised, it answers nothing."""

    def __init__(self) -> None:
        self._drafter: Drafter | None = None
        self._is_lost = False

    def answer(self, question: wire.Question) -> wire.Answer | None:
        """Do what is asked; None where no answer is waited for, and after ``Failed``."""
        if self._is_lost:
            return None
        try:
            if isinstance(question, wire.Hello):
                config = msgspec.structs.replace(question.config, isolate=False)
                self._drafter = make_drafter(config, question.salt, chains=question.chains)
                return None
            if self._drafter is None:
                raise PacelineError("the first message is not Hello")
            return _serve(self._drafter, question)
        except Exception as error:  # noqa: BLE001  whatever a drafter raises is told to the engine
            self._is_lost = True
            return wire.Failed(str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}")


def _serve(drafter: Drafter, question: wire.Question) -> wire.Answer | None:
    match question:
        case wire.Start(prompts, groups, keys):
            drafter.start(
                [
                    RolloutRequest(request_id=name, prompt=prompt, group=group, prompt_key=key)
                    for name, prompt, group, key in zip(prompts.names, prompts.parts(), groups, keys, strict=True)
                ]
            )
        case wire.Commit(texts, accepted, drafted):
            counts = (np.frombuffer(part, np.int32).tolist() for part in (accepted, drafted))
            drafter.commit(
                [
                    Outcome(request_id=name, tokens=tokens, accepted=kept, drafted=asked)
                    for name, tokens, kept, asked in zip(texts.names, texts.parts(), *counts, strict=True)
                ]
            )
        case wire.Finish(names, reasons):
            drafter.finish([wire.bare_rollout(name, reason) for name, reason in zip(names, reasons, strict=True)])
        case wire.Absorb():
            if isinstance(drafter, Absorbs):
                drafter.absorb(question.rollouts())
        case wire.Propose(names, budget):
            return wire.Drafts.of(drafter.propose(names, budget), names)
        case wire.Verify():
            if isinstance(drafter, Prefetcher):
                drafter.verifying(question.drafts())
        case wire.Moved(version):
            drafter.on_weights(version)
            return wire.Done()
        case _:
            return _remember(drafter, question)
    return None


def _remember(drafter: Drafter, question: wire.Question) -> wire.Answer | None:
    history = history_of(drafter)
    if history is None:
        raise PacelineError(f"{type(drafter).__name__} has no history")
    match question:
        case wire.Take(data):
            try:
                history.restore(decode_snapshot(data))
            except SnapshotError as error:
                return wire.Refused(str(error))
            return wire.Done()
        case wire.Recall():
            return wire.Learned(history.votes())
        case wire.Learned(votes):
            history.set_votes(votes)
            return None
        case _:
            return wire.Saved(encode_snapshot(history.snapshot()))
