"""Which drafter a configuration asks for, and prompt lookup behind the seam."""

import pytest

from driving import begin, drafted, end, say
from paceline.config import DrafterConfig, HistoryConfig, PromptLookupConfig
from paceline.drafters import HistoryDrafter, PrefetchingDrafter, PromptLookupDrafter, make_drafter
from paceline.drafters.base import Prefetcher


def test_prompt_lookup_copies_after_the_newest_repeat_of_its_own_text():
    drafter = PromptLookupDrafter()
    begin(drafter, "r", prompt=(5, 6, 7, 5, 6, 8))
    say(drafter, "r", [5, 6])
    assert drafted(drafter, "r", 2) == [8, 5]
    say(drafter, "r", [42])
    assert drafted(drafter, "r") == []


def test_prompt_lookup_knows_nothing_of_others_and_forgets_the_finished():
    drafter = PromptLookupDrafter()
    begin(drafter, "a", "b")
    say(drafter, "a", [1, 2, 3, 1])
    assert drafted(drafter, "b") == []
    end(drafter, "a", [1, 2, 3, 1])
    with pytest.raises(KeyError):
        drafter.propose(["a"], 4)


def test_the_configuration_chooses_the_drafter():
    assert make_drafter(DrafterConfig(kind="none")) is None
    assert make_drafter(DrafterConfig(budget=0)) is None
    assert type(make_drafter(DrafterConfig())) is HistoryDrafter
    assert not isinstance(make_drafter(DrafterConfig()), Prefetcher)
    ahead = make_drafter(DrafterConfig(history=HistoryConfig(prefetch=5)))
    assert type(ahead) is PrefetchingDrafter
    assert isinstance(ahead, Prefetcher)
    assert ahead.outcomes == 5


def test_every_setting_reaches_prompt_lookup():  # field J6
    config = PromptLookupConfig(min_match=2, max_match=5, factor=1.5, newest=False)
    lookup = make_drafter(DrafterConfig(kind="prompt_lookup", prompt_lookup=config))
    assert {key: getattr(lookup, key) for key in config.__struct_fields__} == {
        key: getattr(config, key) for key in config.__struct_fields__
    }
