"""Drafters by name, with options; a name or an option that does not exist is one line with those that do."""

import pytest

from paceline.drafters import HistoryDrafter, PrefetchingDrafter
from paceline.drafters.baselines import BASELINES
from paceline.schema import PacelineError
from paceline.simulate.drafters import DRAFTERS, drafter_by_name, split_names


def test_every_baseline_and_the_history_drafter_have_a_name():
    assert {"history", *BASELINES} == set(DRAFTERS)


def test_options_reach_the_constructor():  # field J6
    drafter = drafter_by_name("history:window=3,siblings=false,floor=0.25")
    assert isinstance(drafter, HistoryDrafter)
    assert (drafter.settings.window, drafter.settings.siblings, drafter.settings.floor) == (3, False, 0.25)
    lookup = drafter_by_name("prompt_lookup:min_match=2,factor=1.5")
    assert (lookup.min_match, lookup.factor) == (2, 1.5)


def test_the_history_drafter_prefetches_where_it_is_asked_to():
    drafter = drafter_by_name("history:prefetch=5")
    assert isinstance(drafter, PrefetchingDrafter)
    assert drafter.outcomes == 5
    assert not isinstance(drafter_by_name("history"), PrefetchingDrafter)
    assert drafter_by_name("history:prefetch=5,chains=true").settings.chains


def test_an_option_beats_what_a_tuned_name_sets():
    tuned = drafter_by_name("suffix_tree_tuned")
    assert drafter_by_name(f"suffix_tree_tuned:depth={tuned.depth + 1}").depth == tuned.depth + 1


def test_every_call_gives_a_drafter_of_its_own():
    assert drafter_by_name("history") is not drafter_by_name("history")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("history", ["history"]),
        ("history, ngramrl", ["history", "ngramrl"]),
        ("history:window=3,siblings=false,ngramrl", ["history:window=3,siblings=false", "ngramrl"]),
        ("a:x=1,b:y=2,z=3,c", ["a:x=1", "b:y=2,z=3", "c"]),
    ],
)
def test_a_list_is_split_at_names_not_at_options(text, names):
    assert split_names(text) == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("histori", "unknown drafter 'histori', did you mean 'history'\\?; known: history, "),
        ("history:windw=3", "unknown option 'windw', did you mean 'window'\\?; it takes window, "),
        ("history:window", "write the option 'window' as key=value"),
        ("history:window={", "not a value"),
        ("history:window=much", "Expected int, got str"),
        ("history:window=0", "window: 0 must be >= 1"),
        ("ngramrl:min_match=0", "min_match=0"),
    ],
)
def test_a_name_that_cannot_be_used_is_one_line(name, message):
    with pytest.raises(PacelineError, match=message) as raised:
        drafter_by_name(name)
    assert str(raised.value).startswith("--drafters")
    assert "\n" not in str(raised.value)


def test_no_name_at_all_is_said():
    with pytest.raises(PacelineError, match="names no drafter; known: history"):
        split_names(" , ")
