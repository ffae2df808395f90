"""A drafter in a process of its own drafts the same, ends when it should, and is named where it should not."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from driving import PROMPT, begin, drafted, end, say, visit
from paceline.config import DrafterConfig, DraftModelConfig, HistoryConfig, PromptLookupConfig
from paceline.drafters import ForcedDrafter, GuardedDrafter, history_of, isolated, make_drafter
from paceline.drafters.isolated import DrafterLostError, IsolatedDrafter, IsolatedHistoryDrafter
from paceline.history.snapshot import SnapshotError, encode_snapshot
from paceline.sampling.grammar import Vocabulary
from paceline.schema import Outcome, as_tokens
from tiny_policies import byte_tokenizer

EVERYTHING = ("tokens", "parents", "sources", "probs", "length", "version", "prefetched", "request_id")


@pytest.fixture
def make():
    """Isolated drafters, whose processes end with the test."""
    made = []

    def build(**config):
        chains = config.pop("chains", False)
        made.append(make_drafter(DrafterConfig(isolate=True, **config), salt=7, chains=chains))
        return made[-1]

    yield build
    for drafter in made:
        drafter.end_process()


def is_running(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds, seconds=20.0):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in EVERYTHING:
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None), name
            assert np.array_equal(a, b), name
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None), name


@pytest.mark.parametrize(
    ("kind", "chains"),
    [("history", False), ("history", True), ("prompt_lookup", False)],
    ids=["trees", "chains", "lookup"],
)
def test_drafts_are_those_of_the_drafter_in_the_engines_process(make, kind, chains):
    config = {
        "kind": kind,
        "history": HistoryConfig(window=3, floor=1e-4, threads=0),
        "prompt_lookup": PromptLookupConfig(max_match=2, newest=False),
    }
    ours, theirs = make_drafter(DrafterConfig(**config), salt=7, chains=chains), make(**config, chains=chains)
    random = np.random.default_rng(3)
    drafts = 0
    for epoch in range(4):
        names = [f"{epoch}/{index}" for index in range(9)]
        said = {name: [] for name in names}
        for drafter in (ours, theirs):
            drafter.on_weights(epoch)
            begin(drafter, *names)
        for _ in range(6):
            asked = [name for name in names if random.random() < 0.8]
            found = [drafter.propose(asked, 12) for drafter in (ours, theirs)]
            same(*found)
            drafts += len(found[0])
            texts = {name: random.integers(1, 4, random.integers(1, 4)).tolist() for name in asked}
            for drafter in (ours, theirs):
                drafter.commit(
                    [
                        Outcome(request_id=name, tokens=as_tokens(text), accepted=0, drafted=2)
                        for name, text in texts.items()
                    ]
                )
            for name, text in texts.items():
                said[name] += text
        for number, name in enumerate(names):
            for drafter in (ours, theirs):
                end(drafter, name, said[name], "abort" if number == 0 else "stop")
    assert drafts > 50
    if kind == "history":
        assert encode_snapshot(ours.snapshot()) == encode_snapshot(theirs.snapshot())


def test_nothing_asked_is_nothing_drafted(make):
    drafter = make()
    assert drafter.propose([], 4) == []
    begin(drafter, "r")
    assert drafter.propose(["r"], 4) == []
    drafter.commit([])
    drafter.finish([])
    drafter.verifying([])
    assert drafter.propose(["r"], 0) == []


def test_it_prefetches_while_the_policy_verifies(make):
    drafter = make(history=HistoryConfig(prefetch=8))
    visit(drafter, [1, 2, 3, 4, 5, 6, 7, 8])
    for attempt in range(100):  # what is not ready when it is asked for is drafted as ever
        begin(drafter, f"{attempt}")
        drafter.verifying(drafter.propose([f"{attempt}"], 4))
        time.sleep(0.01)
        say(drafter, f"{attempt}", [1, 2, 3, 4, 5])
        (draft,) = drafter.propose([f"{attempt}"], 4)
        assert draft.tokens[:3].tolist() == [6, 7, 8]
        if draft.prefetched:
            return
    pytest.fail("no draft was ready when it was asked for")


def test_a_snapshot_goes_out_and_in(make):
    first, second = make(), make()
    visit(first, [1, 2, 3])
    held = first.snapshot()
    second.restore(held)
    begin(second, "r")
    assert drafted(second, "r") == [1, 2, 3]
    with pytest.raises(SnapshotError, match="restore into a fresh drafter"):
        second.restore(held)
    assert drafted(second, "r") == [1, 2, 3]  # the refusal cost nothing
    plain = make_drafter(DrafterConfig(), salt=1)
    plain.restore(held)
    begin(plain, "r")
    assert drafted(plain, "r") == [1, 2, 3]


def test_what_it_learned_goes_out_and_in(make):
    drafter = make()
    before = drafter.votes()
    begin(drafter, "a", "b")
    say(drafter, "a", [1, 2, 3])
    assert drafted(drafter, "b") == [1, 2, 3]
    say(drafter, "b", [1, 2, 3])
    learned = drafter.votes()
    assert learned != before
    drafter.set_votes(before)
    assert drafter.votes() == before
    drafter.set_votes([1.0])
    with pytest.raises(DrafterLostError, match="ValueError"):
        drafter.votes()


def test_another_in_its_place_goes_on_from_the_last_snapshot_at_its_age(make):
    drafter = make()
    drafter.on_weights(5)
    visit(drafter, [1, 2, 3])
    drafter.snapshot()
    visit(drafter, [1, 7, 8, 9], group="h")
    os.kill(drafter.pid, signal.SIGKILL)
    other = drafter.fresh()
    other.on_weights(8)
    begin(other, "r")
    assert drafted(other, "r") == [1, 2, 3]
    versions = other.snapshot().versions
    other.end_process()
    assert set(versions.tolist()) == {0, 5}


@pytest.mark.parametrize("call", ["propose", "on_weights", "snapshot"])
def test_a_killed_process_is_one_clear_error_and_stays_lost(make, call):
    drafter = make()
    begin(drafter, "r")
    drafter.on_weights(1)
    pid = drafter.pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_running(pid))
    calls = {
        "propose": lambda: drafter.propose(["r"], 4),
        "on_weights": lambda: drafter.on_weights(2),
        "snapshot": drafter.snapshot,
    }
    for _ in range(2):
        with pytest.raises(DrafterLostError, match=rf"^its process {pid} was ended by signal 9$"):
            calls[call]()
    assert drafter.pid is None


def test_a_process_that_hangs_is_killed_at_the_limit(make):
    drafter = make()
    begin(drafter, "r")
    drafter.on_weights(1)
    pid = drafter.pid
    os.kill(pid, signal.SIGSTOP)
    drafter.seconds = 0.5
    with pytest.raises(DrafterLostError, match=rf"process {pid} did not answer within 0\.5 s and was killed"):
        drafter.propose(["r"], 4)
    assert not is_running(pid)


def test_what_its_drafter_raises_is_told_here(make):
    drafter = make()
    begin(drafter, "r")
    say(drafter, "unknown", [1])  # waits for no answer
    say(drafter, "r", [1])
    with pytest.raises(DrafterLostError, match="KeyError: 'unknown'"):
        drafter.propose(["r"], 4)


def test_a_process_that_cannot_start_is_an_error_too(make, monkeypatch):
    monkeypatch.setattr(isolated, "_SCRIPT", "import sys; sys.exit(3)")
    with pytest.raises(DrafterLostError, match="ended with exit status 3"):
        make().on_weights(0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DrafterLostError, match="could not be started"):
        make().on_weights(0)


def test_under_a_guard_a_refit_brings_it_back_with_what_it_knew(make):
    events = []
    drafter = GuardedDrafter(make(), lambda event, line: events.append((event, line)))
    drafter.on_weights(0)
    visit(drafter, [1, 2, 3])
    history_of(drafter).snapshot()
    begin(drafter, "r")
    say(drafter, "r", [1])
    pid = drafter.inner.pid
    os.kill(pid, signal.SIGKILL)
    assert drafter.propose(["r"], 4) == []
    assert history_of(drafter) is None
    say(drafter, "r", [2])
    drafter.on_weights(1)
    assert [event for event, _ in events] == ["drafter_lost", "drafter_reloaded"]
    assert f"process {pid} was ended by signal 9; decoding goes on without drafts" in events[0][1]
    (draft,) = drafter.propose(["r"], 4)
    assert (draft.tokens.tolist(), draft.length, draft.version) == ([3], len(PROMPT) + 2, 1)
    drafter.end_process()
    assert drafter.inner.pid is None


def test_it_ends_with_its_drafter(make):
    drafter = make()
    drafter.on_weights(0)
    pid = drafter.pid
    assert is_running(pid)
    drafter.end_process()
    assert not is_running(pid)
    forgotten = make_drafter(DrafterConfig(isolate=True))
    forgotten.on_weights(0)
    pid = forgotten.pid
    del forgotten
    assert not is_running(pid)


PARENT = """
import os, sys, time
from paceline.config import DrafterConfig
from paceline.drafters import make_drafter
drafter = make_drafter(DrafterConfig(isolate=True))
drafter.on_weights(0)
if sys.argv[1] == "forks":
    if os.fork() == 0:  # holds the socket open, as a worker of the run would
        time.sleep(60)
        os._exit(0)
print(drafter.pid, flush=True)
if sys.argv[1] != "returns":
    time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["returns", "is killed", "forks"])
def test_it_ends_with_the_process_that_started_it(ending):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, ending], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        pid = int(parent.stdout.readline())
        if ending != "returns":
            assert is_running(pid)
            os.kill(parent.pid, signal.SIGKILL)
        try:
            assert wait_until(lambda: not is_running(pid))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def test_a_fork_of_the_engines_process_does_not_end_it(make):
    drafter = make()
    drafter.on_weights(0)
    if (fork := os.fork()) == 0:
        drafter.end_process()
        os._exit(0)
    os.waitpid(fork, 0)
    assert is_running(drafter.pid)
    drafter.on_weights(1)


def test_the_configuration_isolates_what_it_can():
    history, lookup = (make_drafter(DrafterConfig(kind=kind, isolate=True)) for kind in ("history", "prompt_lookup"))
    assert type(history) is IsolatedHistoryDrafter
    assert type(lookup) is IsolatedDrafter
    assert history_of(history) is history
    assert history_of(lookup) is None
    forced = make_drafter(DrafterConfig(isolate=True), vocabulary=Vocabulary(byte_tokenizer()))
    assert type(forced) is ForcedDrafter
    assert type(forced.inner) is IsolatedHistoryDrafter
    assert type(forced.fresh().inner) is IsolatedHistoryDrafter
    assert make_drafter(DrafterConfig(kind="none", isolate=True)) is None
    with pytest.raises(ValueError, match="isolate: True must be false where kind is draft_model"):
        DrafterConfig(kind="draft_model", draft_model=DraftModelConfig(path="x"), isolate=True)
