"""A drafter that fails costs drafts, is named once, and can be replaced in the middle of requests."""

import pytest

from driving import PROMPT, begin, drafted, end, say, visit
from paceline.config import DrafterConfig, HistoryConfig
from paceline.drafters import (
    ForcedDrafter,
    GuardedDrafter,
    HistoryDrafter,
    PrefetchingDrafter,
    PromptLookupDrafter,
    history_of,
    make_drafter,
)
from paceline.history import Settings
from paceline.history.snapshot import SnapshotError
from paceline.schema import DraftLawError, PacelineError

CALLS = ("start", "propose", "commit", "finish", "on_weights")


class Fragile(HistoryDrafter):
    """Raises ``error`` in the calls of ``broken``, and counts all of them."""

    def __init__(self, error=None, broken=(), copies=1):
        super().__init__(Settings(threads=0), salt=1)
        self.error = error
        self.broken = broken
        self.copies = copies
        self.called = 0

    def fresh(self):
        if not self.copies:
            raise PacelineError("there is no other")
        return HistoryDrafter(self.settings, self.salt)


def breaking(name):
    def call(self, *arguments):
        self.called += 1
        if name in self.broken:
            raise self.error
        return getattr(HistoryDrafter, name)(self, *arguments)

    return call


for name in CALLS:
    setattr(Fragile, name, breaking(name))


def guarded(inner):
    events = []
    return GuardedDrafter(inner, lambda event, line: events.append((event, line))), events


def drive(drafter):
    """Every call of the seam, twice over."""
    for epoch in range(2):
        begin(drafter, f"{epoch}")
        drafter.propose([f"{epoch}"], 4)
        say(drafter, f"{epoch}", [1, 2, 3])
        end(drafter, f"{epoch}", [1, 2, 3])
        drafter.on_weights(epoch + 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [KeyError("r7"), MemoryError(), PacelineError("its model\nis gone")], ids=repr)
def test_whatever_a_call_raises_is_one_event_and_the_drafter_is_left_alone(call, error):
    inner = Fragile(error, [call], copies=0)
    drafter, events = guarded(inner)
    drive(drafter)
    lost, *after = [line for event, line in events if event == "drafter_lost"]
    assert "\n" not in lost
    assert {"KeyError": "r7", "MemoryError": "", "PacelineError": "its model is gone"}[type(error).__name__] in lost
    assert after == ["Fragile: there is no other; decoding goes on without drafts"]  # the next refit tried once
    called = inner.called
    drive(drafter)
    assert (inner.called, len(events)) == (called, 2)
    begin(drafter, "r")
    assert drafter.propose(["r"], 4) == []


@pytest.mark.parametrize("error", [DraftLawError("token 3 was excluded"), SnapshotError("cut off")], ids=repr)
def test_what_is_about_losslessness_or_a_file_is_raised(error):
    drafter, events = guarded(Fragile(error, ["propose"]))
    begin(drafter, "r")
    with pytest.raises(type(error), match=str(error)):
        drafter.propose(["r"], 4)
    assert events == []
    assert not drafter.lost


def test_the_next_refit_revives_it_and_it_knows_what_is_in_flight():
    inner = Fragile(OSError("no"), ["commit"])
    drafter, events = guarded(inner)
    begin(drafter, "old")
    end(drafter, "old", [])
    begin(drafter, "a", "b")
    say(drafter, "a", [1, 2, 3])  # lost here
    say(drafter, "a", [4, 5])
    drafter.on_weights(9)
    assert [event for event, _ in events] == ["drafter_lost", "drafter_reloaded"]
    assert "2 requests are in flight" in events[1][1]
    (draft,) = drafter.propose(["b"], 8)
    assert draft.tokens.tolist() == [1, 2, 3, 4, 5]  # its sibling's
    assert (draft.length, draft.version) == (len(PROMPT), 9)
    say(drafter, "b", [1])
    (draft,) = drafter.propose(["b"], 8)
    assert draft.length == len(PROMPT) + 1
    end(drafter, "a", [1, 2, 3, 4, 5])
    end(drafter, "b", [1])


def test_a_drafter_that_is_lost_again_is_revived_again_once_a_refit():
    drafter, events = guarded(Fragile(OSError("no"), ["propose"]))
    drafter.inner.fresh = lambda: Fragile(OSError("no"), ["propose"])
    begin(drafter, "r")
    for version in (1, 2):
        assert drafter.propose(["r"], 4) == []
        drafter.on_weights(version)
    assert [event for event, _ in events] == ["drafter_lost", "drafter_reloaded"] * 2


def test_one_that_cannot_be_renewed_stays_lost_until_another_takes_over():
    inner = ForcedDrafter(Fragile(OSError("no"), ["start"]), None)
    del inner.fresh
    drafter, events = guarded(inner)
    begin(drafter, "r", prompt=(5, 6, 7, 5, 6))
    drafter.on_weights(1)
    assert not drafter.revive()
    assert drafter.reload(PromptLookupDrafter())
    assert [event for event, _ in events] == ["drafter_lost", "drafter_reloaded"]
    assert drafted(drafter, "r", 1) == [7]


def test_it_prefetches_where_the_drafter_within_does():
    drafter, events = guarded(PrefetchingDrafter(Settings(patient=True, threads=0)))
    visit(drafter, [1, 2, 3, 4, 5, 6, 7, 8])
    begin(drafter, "r")
    drafter.verifying(drafter.propose(["r"], 4))
    say(drafter, "r", [1, 2, 3, 4, 5])
    (draft,) = drafter.propose(["r"], 4)
    assert (draft.prefetched, events) == (True, [])
    assert drafter.reload(HistoryDrafter())
    drafter.verifying(drafter.propose(["r"], 4))
    assert [event for event, _ in events] == ["drafter_reloaded"]


def test_its_history_is_found_while_it_is_not_lost():
    inner = Fragile(OSError("no"), ["finish"], copies=0)
    drafter, _ = guarded(inner)
    assert history_of(drafter) is inner
    visit(drafter, [1, 2, 3])
    assert drafter.lost
    assert history_of(drafter) is None


@pytest.mark.parametrize("kind", ["history", "prompt_lookup"])
def test_a_fresh_drafter_has_the_settings_of_the_old_one_and_nothing_in_flight(kind):
    old = make_drafter(DrafterConfig(kind=kind, history=HistoryConfig(window=3, floor=0.5, prefetch=2)), salt=5)
    visit(old, [1, 2, 3])
    begin(old, "r")
    new = old.fresh()
    assert type(new) is type(old)
    begin(new, "r")  # not in flight there
    assert drafted(new, "r") == []
    kept = {
        "history": ("settings", "salt", "outcomes"),
        "prompt_lookup": ("min_match", "max_match", "factor", "newest"),
    }
    for name in kept[kind]:
        assert getattr(new, name) == getattr(old, name), name
