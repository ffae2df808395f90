"""Which drafter a configuration asks for, and prompt lookup behind the seam."""

import pytest

from driving import begin, drafted, end, say, visit
from paceline.config import DrafterConfig, DraftModelConfig, HistoryConfig, PromptLookupConfig
from paceline.drafters import HistoryDrafter, PolicyTraits, PrefetchingDrafter, PromptLookupDrafter, make_drafter
from paceline.drafters.base import Prefetcher
from paceline.schema import PacelineError


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


@pytest.mark.parametrize("prefetch", [0, 4])
def test_history_drafts_chains_where_the_engine_takes_only_those(prefetch):
    config = DrafterConfig(history=HistoryConfig(prefetch=prefetch))
    trees, chains = (make_drafter(config, salt=1, chains=wanted) for wanted in (False, True))
    for drafter in (trees, chains):
        visit(drafter, [1, 2, 3, 4], [1, 5, 3, 4])
        begin(drafter, "r")
    (tree,), (chain,) = (drafter.propose(["r"], 6) for drafter in (trees, chains))
    assert tree.parents.tolist().count(0) == 2
    assert (chain.parents, chain.length) == (None, tree.length)
    assert chain.tokens[0] == 1
    if prefetch:
        chains.verifying([chain])


def test_what_drafts_inside_vllm_is_not_made_elsewhere():
    with pytest.raises(PacelineError, match=r"drafter\.kind=suffix .* set engine\.kind=vllm"):
        make_drafter(DrafterConfig(kind="suffix"))


def test_a_model_that_drafts_trees_is_refused_where_only_chains_are_verified():
    config = DrafterConfig(kind="draft_model", draft_model=DraftModelConfig(path="nowhere", width=2))
    policy = PolicyTraits(vocabulary_size=8, run_seed=0)
    with pytest.raises(PacelineError, match=r"width: .* set it to 1"):
        make_drafter(config, policy=policy, chains=True)


def test_every_setting_reaches_prompt_lookup():  # field J6
    config = PromptLookupConfig(min_match=2, max_match=5, factor=1.5, newest=False)
    lookup = make_drafter(DrafterConfig(kind="prompt_lookup", prompt_lookup=config))
    assert {key: getattr(lookup, key) for key in config.__struct_fields__} == {
        key: getattr(config, key) for key in config.__struct_fields__
    }
