"""What a history drafts, learns and forgets, for both implementations."""

import math
import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from histories import Tree, flat, int64s, make
from paceline.history import Settings, make_history, native
from paceline.history.plain import PlainHistory
from paceline.schema import SOURCES

PROMPT = [91, 92, 93, 94]
OTHER_PROMPT = [81, 82, 83, 93, 94]  # ends like PROMPT
HERE, THERE = 1, 2  # their shards


@pytest.fixture(params=["native", "plain"])
def kind(request):
    return request.param


@pytest.fixture
def history(kind):
    return make(kind)


def named(tree):
    return [SOURCES[source] for source in tree.sources]


def test_an_earlier_answer_is_drafted_from_its_first_token_on(history):
    history.remember(0, HERE, PROMPT, [1, 2, 3, 4])
    history.start([1], [HERE], [PROMPT])
    assert history.draft(1).tokens == [1, 2, 3, 4]
    assert named(history.draft(1)) == ["history"] * 4


def test_a_chain_takes_the_most_probable_child_each_time_and_ends_at_the_floor(kind):
    history = make(kind, chains=True, floor=0.05)
    for request, text in enumerate([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]]):
        history.remember(request, HERE, PROMPT, text)
    history.start([9], [HERE], [PROMPT])
    tree, chain = make(kind, floor=0.05), history.draft(9)
    tree.load(*history.records())
    tree.set_votes(history.votes())
    tree.start([9], [HERE], [PROMPT])
    assert (chain.tokens, chain.parents) == ([1, 2, 3], [-1, 0, 1])
    branching = tree.draft(9)
    assert chain.tokens == branching.chain()
    assert len(branching.tokens) > len(chain.tokens)
    assert history.draft(9, 2).tokens == [1, 2]


def test_what_a_chain_leaves_out_is_prepared_for(kind):
    history = make(kind, chains=True)
    for request, text in enumerate([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]]):
        history.remember(request, HERE, PROMPT, text)
    history.start([9], [HERE], [PROMPT])
    chain = history.draft(9)
    assert 5 not in chain.tokens
    history.prefetch([9], [(chain.tokens, chain.parents)])
    history.commit([9], [[1, 5]])
    prepared = history.draft(9)
    assert prepared.ready
    assert prepared.tokens[0] == 6


def test_drafting_goes_on_right_after_a_divergence(history):
    history.remember(0, HERE, PROMPT, [1, 2, 3, 4, 5, 6])
    history.start([1], [HERE], [PROMPT])
    history.commit([1], [[1, 2, 50, 4]])
    assert history.draft(1).tokens == [5, 6]


def test_siblings_in_flight_are_drafted_from_at_once(history):
    history.start([0, 1], [HERE, HERE], [PROMPT, PROMPT])
    history.commit([0], [[1, 2, 3]])
    assert history.draft(1).tokens == [1, 2, 3]
    assert named(history.draft(1)) == ["sibling"] * 3


def test_siblings_are_not_drafted_from_where_that_is_off(kind):
    history = make(kind, siblings=False, elsewhere_tokens=1000)
    history.start([0, 1, 2], [HERE, HERE, THERE], [PROMPT, PROMPT, OTHER_PROMPT])
    history.commit([0], [[1, 2, 3]])
    assert [tree.tokens for tree in history.propose([1, 2])] == [[], []]
    history.finish([0])
    assert history.draft(1).tokens == [1, 2, 3]


def test_a_draft_that_reaches_a_siblings_frontier_goes_on_elsewhere(history):
    history.remember(0, HERE, PROMPT, [1, 2, 3, 4, 5])
    history.start([1, 2], [HERE, HERE], [PROMPT, PROMPT])
    history.commit([1], [[1, 2, 3]])
    assert history.draft(2).tokens == [1, 2, 3, 4, 5]


def test_a_request_is_drafted_from_its_own_text(history):
    history.start([0], [HERE], [[5, 6, 7, 8, 1]])
    history.commit([0], [[5, 6]])
    assert history.draft(0, 3).chain() == [7, 8, 1]
    assert named(history.draft(0, 3)) == ["prompt"] * 3


def test_answers_to_other_prompts_serve_where_they_are_wanted_and_never_otherwise(kind):
    for elsewhere_tokens, drafted in ((1000, [1, 2, 3]), (0, [])):
        history = make(kind, elsewhere_tokens=elsewhere_tokens)
        history.remember(0, THERE, OTHER_PROMPT, [1, 2, 3])
        history.start([1], [HERE], [PROMPT])
        assert history.draft(1).tokens == drafted
        assert named(history.draft(1)) == ["elsewhere"] * len(drafted)


def test_answers_to_other_prompts_are_forgotten_beyond_their_tokens(kind):
    history = make(kind, elsewhere_tokens=12)  # two answers of 4 tokens, each with 2 of its prompt
    for number, answer in enumerate(([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3])):
        history.remember(number, 100 + number, OTHER_PROMPT, answer)
    history.start([9], [HERE], [PROMPT])
    assert set(history.draft(9, 100).tokens) == {2, 3}


def test_an_aborted_response_is_never_drafted_from(kind):
    history = make(kind, elsewhere_tokens=1000)
    history.start([0], [HERE], [PROMPT])
    history.commit([0], [[1, 2, 3]])
    history.finish([0], keep=[0])
    history.start([1, 2], [HERE, THERE], [PROMPT, OTHER_PROMPT])
    assert [tree.tokens for tree in history.propose([1, 2])] == [[], []]
    assert 1 not in history.records()[5]


def test_the_window_evicts_the_oldest_response_of_a_prompt_whole(kind):
    history = make(kind, window=2)
    history.remember(0, THERE, OTHER_PROMPT, [9, 9, 9])
    for number in range(1, 5):
        history.remember(number, HERE, PROMPT, [number, 10 + number, 20 + number])
    history.start([9], [HERE], [PROMPT])
    assert sorted(history.draft(9, 100).tokens) == [3, 4, 13, 14, 23, 24]
    history.start([10], [THERE], [OTHER_PROMPT])
    assert history.draft(10).tokens[0] == 9  # another prompt's window is its own
    here, there = len(PROMPT) + 3 * len(PROMPT) + 2 * 3, 3 * len(OTHER_PROMPT) + 3
    assert (history.tokens, history.prompts) == (here + there, 2)


def test_budget_and_floor_cap_a_draft(kind):
    for floor in (1e-6, 0.3):
        history = make(kind, floor=floor)
        for number in range(5):
            history.remember(number, HERE, PROMPT, [number, *range(100, 140)])
        history.start([9], [HERE], [PROMPT])
        for budget in (0, 1, 5, 60):
            tree = history.draft(9, budget)
            assert len(tree.tokens) <= budget
            assert all(prob >= floor for prob in tree.probs)
        assert (set(range(5)) <= set(tree.tokens)) == (floor < 0.2)


def random_history(kind, seed, **options):
    random = Random(seed)
    history = make(kind, elsewhere_tokens=1000, floor=1e-4, **options)
    said = [random.choices(range(4), k=30) for _ in range(4)]
    for number in range(12):
        text = list(random.choice(said))
        text[random.randrange(30)] = random.randrange(4)
        history.remember(number, random.choice([HERE, THERE]), PROMPT, text)
    history.start([20, 21], [HERE, THERE], [PROMPT, OTHER_PROMPT])
    return history, random, said


@pytest.mark.parametrize("seed", range(5))
def test_parents_come_before_children_and_probabilities_never_grow_down_a_path(kind, seed):
    history, random, said = random_history(kind, seed)
    for _ in range(10):
        for tree in history.propose([20, 21], 30):
            for node, parent in enumerate(tree.parents):
                assert -1 <= parent < node
                assert 0 < tree.probs[node] <= (tree.probs[parent] if parent >= 0 else 1)
            for parent in {-1, *tree.parents}:
                children = [node for node, above in enumerate(tree.parents) if above == parent]
                assert len({tree.tokens[node] for node in children}) == len(children)
                assert sum(tree.probs[node] for node in children) <= (tree.probs[parent] if parent >= 0 else 1) * 1.3
        history.commit([20, 21], [random.choice(said)[:5], random.choice(said)[:5]])


@pytest.mark.parametrize("truth", [0.7, 0.2])
def test_what_comes_true_in_a_share_of_cases_is_reported_with_that_probability(kind, truth):
    history = make(kind)
    random = Random(0)
    for number in range(1000):
        history.remember(2000 + number, number, PROMPT, [5, 6])  # an untouched prompt each time
        history.start([number], [number], [PROMPT])
        tree = history.draft(number)
        first, second = random.random() < truth, random.random() < truth
        history.commit([number], [[5, 6 if second else 7] if first else [7]])
    assert tree.tokens == [5, 6]
    assert tree.probs == pytest.approx([truth, truth**2], abs=0.08)


@pytest.mark.parametrize("right", ["sibling", "history"])
def test_weights_move_towards_the_tier_that_is_right(kind, right):
    """Where an earlier answer and a sibling disagree, the one that keeps being right is believed more and more."""
    history = make(kind)
    says = {"history": 1, "sibling": 2}
    believed = []
    for number in range(200):
        sibling, asking = 1000 + number, 2000 + number
        shard = number  # an untouched prompt each time
        history.remember(number, shard, PROMPT, [says["history"]] * 2)
        history.start([sibling, asking], [shard, shard], [PROMPT, PROMPT])
        history.commit([sibling], [[says["sibling"]] * 2])
        tree = history.draft(asking)
        believed.append(tree.probs[tree.tokens.index(says[right])])
        history.commit([asking], [[says[right]]])
    assert believed[-1] > max(0.8, believed[0] + 0.2)


@pytest.mark.parametrize("right", [0, 1, 2])
def test_weights_move_towards_the_age_that_is_right(kind, right):
    history = make(kind)
    believed = []
    for number in range(200):
        for age in (8, 4, 0):
            history.set_version(100 * number - age)
            history.remember(1000 + 3 * number + age // 4, number, PROMPT, [age // 4] * 2)
        history.start([number], [number], [PROMPT])
        tree = history.draft(number)
        believed.append(tree.probs[tree.tokens.index(right)])
        history.commit([number], [[right]])
    assert believed[-1] > max(0.7, believed[0] + 0.2)


def test_ten_times_the_byte_cap_takes_no_more_than_the_cap(kind):  # field J1
    cap = 1 << 21
    history = make(kind, cap_bytes=cap, elsewhere_tokens=1 << 30, window=1 << 30)
    random = Random(1)
    offered = number = 0
    token_bytes = None
    while offered < 10 * cap:
        requests = list(range(number, number + 8))
        number += 8
        texts = [[random.randrange(50_000) for _ in range(100)] for _ in requests]
        history.start(requests, [request % 5 for request in requests], [PROMPT] * 8)
        history.commit(requests, texts)
        history.finish(requests)
        assert history.nbytes <= cap
        if token_bytes is None and history.nbytes > cap / 2:
            token_bytes = history.nbytes / (number * 100)
        offered = number * 100 * (token_bytes or 0.0)
    assert history.refused == 0  # the oldest made room
    assert history.nbytes > 0.5 * cap
    assert history.tokens * token_bytes > 0.5 * cap
    history.start([number], [(number - 1) % 5], [PROMPT])
    assert texts[-1][0] in history.draft(number, 1000).tokens


def test_requests_that_the_byte_cap_refuses_draft_nothing_and_the_rest_goes_on(kind):
    history = make(kind, cap_bytes=400_000, elsewhere_tokens=1000)
    huge = [number % 1000 for number in range(20_000)]
    history.start([0], [HERE], [huge])
    assert (history.refused, history.prompts) == (1, 0)
    history.commit([0], [huge[:10]])
    assert history.draft(0).tokens == []
    history.prefetch([0], [([], [])])
    history.remember(1, THERE, PROMPT, [1, 2, 3])
    history.start([2], [THERE], [PROMPT])
    assert [tree.tokens for tree in history.propose([0, 2])] == [[], [1, 2, 3]]
    history.finish([0, 2])
    assert (history.refused, history.prompts) == (1, 1)


def test_a_cap_below_everything_refuses_everything(kind):
    history = make(kind, cap_bytes=1)
    for number in range(3):
        history.remember(number, HERE, PROMPT, [1, 2, 3])
    assert (history.refused, history.prompts, history.tokens) == (3, 0, 0)


def test_prefetched_drafts_are_those_that_would_be_drafted(kind):
    """Known ways for a pass to end find their drafts ready; after any other, drafts are made when asked for."""

    def begun(threads):
        history = make(kind, threads=threads)
        for number, text in enumerate(([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [2, 2, 3, 9])):
            history.remember(number, HERE, PROMPT, text)
        history.start([9], [HERE], [PROMPT])
        return history, history.draft(9, 6)

    _, tree = begun(threads=0)
    verified = (tree.tokens[:4], tree.parents[:4])
    ends = [tree.path(node) for node in (4, 5) if tree.parents[node] < 4]
    assert ends
    for outcome in (*ends, [77], [1, 77]):
        plainly, ahead = begun(threads=0)[0], begun(threads=2)[0]
        ahead.prefetch([9], [verified], outcomes=16, budget=6)
        votes = plainly.votes()
        for history in (plainly, ahead):
            history.commit([9], [outcome])
            history.set_votes(votes)  # what is prepared does not know what the commit taught
        prepared = ahead.draft(9, 6)
        assert prepared[:4] == plainly.draft(9, 6)[:4]
        assert prepared.ready == (outcome in ends)
        assert not ahead.draft(9, 6).ready  # handed out once


def test_what_would_be_drafted_after_more_is_what_is_drafted_once_that_was_said(kind):
    def begun():
        history = make(kind)
        for number, text in enumerate(([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 4, 5, 7], [2, 2, 3, 9])):
            history.remember(number, HERE, PROMPT, text)
        history.start([9, 8], [HERE, HERE], [PROMPT, PROMPT])
        history.commit([9, 8], [[1], [2, 2]])
        return history

    for more in ([], [2], [2, 3, 4], [76, 3], [77]):
        history, plainly = begun(), begun()
        ahead, other, again = history.propose_after([9, 8, 9], [more, [3], more], 6)
        assert (ahead, other.tokens[0]) == (again, 9)
        votes = plainly.votes()
        plainly.commit([9], [more])
        plainly.set_votes(votes)  # what is only supposed teaches nothing
        assert ahead == plainly.draft(9, 6)
        assert bool(ahead.tokens) == (more != [77])


def test_supposing_what_was_said_changes_neither_drafts_nor_what_is_learned(kind):
    asked, plain = make(kind), make(kind)
    for history in (asked, plain):
        history.remember(0, HERE, PROMPT, [1, 2, 3, 4, 5])
        history.start([9], [HERE], [PROMPT])
    for said in ([1], [2, 3], [9]):
        assert asked.draft(9) == plain.draft(9)
        assert asked.propose_after([9], [said])
        for history in (asked, plain):
            history.commit([9], [said])
    assert (asked.votes(), asked.tokens) == (plain.votes(), plain.tokens)


def test_no_outcomes_means_no_prefetched_drafts(history):
    history.remember(0, HERE, PROMPT, [1, 2, 3])
    history.start([1], [HERE], [PROMPT])
    tree = history.draft(1)
    history.prefetch([1], [(tree.tokens, tree.parents)], outcomes=0)
    history.commit([1], [[1]])
    assert not history.draft(1).ready


def test_new_weights_void_what_was_prepared(history):
    history.remember(0, HERE, PROMPT, [1, 2, 3, 4])
    history.start([1], [HERE], [PROMPT])
    history.prefetch([1], [(history.draft(1, 2).tokens, [-1, 0])])
    history.set_version(1)
    history.commit([1], [[1]])
    assert not history.draft(1).ready


def test_an_empty_draft_costs_nothing_and_still_teaches(history):  # field J7
    history.remember(0, HERE, PROMPT, [1, 2, 3])
    history.start([1], [HERE], [PROMPT])
    before = history.votes()
    assert history.draft(1, 0) == Tree([], [], [], [], False)
    history.prefetch([1], [([], [])])
    history.commit([1], [[1]])
    assert history.votes() != before
    assert history.draft(1).tokens == [2, 3]


def test_empty_batches_and_empty_texts_are_nothing_special(history):
    history.start([], [], [])
    history.start([0], [HERE], [[]])
    assert history.propose([]) == []
    assert history.draft(0).tokens == []
    history.commit([0], [[]])
    history.commit([], [])
    history.finish([0])
    history.finish([])
    assert (history.tokens, history.prompts) == (0, 1)


BAD_CALLS = {
    "propose for one unknown": lambda history: history.propose([0, 77]),
    "propose for one twice": lambda history: history.propose([0, 0]),
    "commit for one unknown": lambda history: history.commit([0, 77], [[1], [2]]),
    "commit for one twice": lambda history: history.commit([0, 0], [[1], [2]]),
    "finish one unknown": lambda history: history.finish([0, 77]),
    "finish one twice": lambda history: history.finish([0, 0]),
    "finish with a word missing": lambda history: history.finish([0], keep=[]),
    "prefetch for one unknown": lambda history: history.prefetch([77], [([1], [-1])]),
    "prefetch without parents": lambda history: history.history.prefetch_batch(
        int64s([0]), *flat([[1, 2]])[:1], flat([[-1]])[0], flat([[1, 2]])[1], 4, 4
    ),
    "suppose of an unknown one": lambda history: history.propose_after([0, 7], [[1], [1]]),
    "suppose without offsets that fit": lambda history: history.history.propose_after_batch(
        int64s([0, 1]), *flat([[1], [2], [3]]), 4
    ),
    "start one in flight": lambda history: history.start([5, 0], [HERE, HERE], [PROMPT, PROMPT]),
    "start one twice": lambda history: history.start([5, 5], [HERE, HERE], [PROMPT, PROMPT]),
    "start without a shard": lambda history: history.start([5, 6], [HERE], [PROMPT, PROMPT]),
    "offsets that fall": lambda history: offsets(history, [0, 2, 1, 3]),
    "offsets beyond the tokens": lambda history: offsets(history, [0, 1, 2, 4]),
    "offsets before the tokens": lambda history: offsets(history, [-1, 1, 2, 3]),
    "offsets that begin late": lambda history: offsets(history, [1, 1, 2, 3]),
    "an offset too few": lambda history: offsets(history, [0, 1, 3]),
    "no offsets": lambda history: offsets(history, []),
    "votes of another length": lambda history: history.set_votes(history.votes()[:-1]),
    "votes that are not a number": lambda history: history.set_votes([math.nan, *history.votes()[1:]]),
    "endless votes": lambda history: history.set_votes([*history.votes()[:-1], math.inf]),
    "a record that starts beyond its end": lambda history: load(history, starts=[0, 4]),
    "a record that starts before its beginning": lambda history: load(history, starts=[0, -1]),
    "a response before its prompt": lambda history: load(history, prompts=[0, 1]),
    "records of unequal lengths": lambda history: load(history, starts=[0]),
    "records whose offsets do not fit": lambda history: load(history, offsets=[0, 4, 8]),
}


def offsets(history, values):
    history.history.commit_batch(int64s([0, 1, 2]), np.array([1, 2, 3], dtype=np.int32), int64s(values))


def load(history, prompts=(1, 0), starts=(0, 0), offsets=(0, 4, 7)):
    bytes_, int32s = (
        (lambda values: np.array(values, dtype=np.uint8)),
        (lambda values: np.array(values, dtype=np.int32)),
    )
    history.load(
        int64s([HERE, HERE]),
        bytes_(prompts),
        int32s([0, 0]),
        int32s(starts),
        int64s(offsets),
        int32s([*PROMPT, 1, 2, 3]),
    )


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_bad_call_is_refused_in_one_line_and_changes_nothing(history, call):
    history.remember(9, HERE, PROMPT, [1, 2, 3])
    history.start([0, 1, 2], [HERE, HERE, THERE], [PROMPT, PROMPT, PROMPT])
    before = (history.propose([0, 1, 2]), history.votes(), history.tokens)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        call(history)
    assert (history.propose([0, 1, 2]), history.votes(), history.tokens) == before
    history.commit([0, 1, 2], [[1], [1], [1]])
    history.finish([0, 1, 2])
    history.start([5], [HERE], [PROMPT])


@pytest.mark.parametrize(
    "options",
    [{"window": 0}, {"elsewhere_tokens": -1}, {"cap_bytes": -1}, {"matches": 0}, {"floor": 0.0}, {"floor": 1.0},
     {"floor": math.nan}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(kind, options):
    with pytest.raises(ValueError, match="must be"):
        make(kind, **options)


def test_votes_come_back_equal(kind):
    history, random, said = random_history(kind, 0)
    for _ in range(10):
        history.propose([20, 21])
        history.commit([20, 21], [random.choice(said)[:5], random.choice(said)[:5]])
    other = make(kind)
    other.set_votes(history.votes())
    assert other.votes() == history.votes()
    assert other.votes() != make(kind).votes()


@pytest.mark.parametrize("into", ["native", "plain"])
def test_a_history_loaded_from_records_drafts_what_the_original_drafts(kind, into):
    random = Random(3)
    original, restored = make(kind, elsewhere_tokens=1000), make(into, elsewhere_tokens=1000)
    for number in range(20):
        original.set_version(number)
        shard = random.choice([HERE, THERE])
        prompt = PROMPT if shard == HERE else OTHER_PROMPT
        original.start([number], [shard], [prompt])
        original.draft(number)
        original.commit([number], [random.choices(range(3), k=random.randint(0, 30))])
        original.finish([number], keep=[number % 5 > 0])
    restored.load(*original.records())
    restored.set_votes(original.votes())
    restored.set_version(20)
    original.set_version(20)
    for one, other in zip(original.records(), restored.records(), strict=True):
        assert np.array_equal(one, other)
    for history in (original, restored):
        history.start([100, 101], [HERE, THERE], [PROMPT, OTHER_PROMPT])
    for _ in range(8):
        assert original.propose([100, 101]) == restored.propose([100, 101])
        text = random.choices(range(3), k=3)
        for history in (original, restored):
            history.commit([100, 101], [text, text])


def test_the_native_history_serves_where_it_is_built_and_wanted():
    assert native.load() is not None, native.why_not()
    assert isinstance(make_history(Settings()), native.load().History)
    assert isinstance(make_history(Settings(), native=False), PlainHistory)


def test_without_a_compiler_the_plain_history_serves_the_drafter():
    script = """
from paceline.drafters import HistoryDrafter
from paceline.schema import Outcome, RolloutRequest, as_tokens
drafter = HistoryDrafter()
drafter.start([RolloutRequest(request_id=name, prompt=as_tokens([7, 8, 9])) for name in "ab"])
drafter.commit([Outcome(request_id="a", tokens=as_tokens([1, 2, 3]), accepted=0, drafted=0)])
print(type(drafter.history).__name__, drafter.propose(["b"], 2)[0].tokens.tolist())
"""
    environment = os.environ | {"PACELINE_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "PlainHistory [1, 2]\n"


def test_the_work_of_a_draft_does_not_grow_with_the_context():  # field J9
    def lines_run(length):
        rng = Random(3)
        phrases = [[rng.randrange(200) for _ in range(40)] for _ in range(30)]
        text = [token for _ in range(length // 40) for token in rng.choice(phrases)]
        history = make("plain")
        history.start([0], [HERE], [text])
        history.commit([0], [text[-60:]])
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            draft = history.draft(0)
        finally:
            sys.settrace(before)
        assert len(draft.tokens) == 16
        return count

    assert lines_run(128_000) < 1.2 * lines_run(16_000)
