"""Rejection, trees without replacement and block acceptance: the law is exact, by enumeration and by draws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enumerated import emitted_law, policy_law, processed
from paceline.sampling.accept import DraftLawError, VerifyRow, accept, chain_parents
from paceline.sampling.keyed import BLOCK, block_logsumexp, coupled_candidates, draw_candidates, keyed_sample
from paceline.sampling.noise import draft_position
from paceline.sampling.processors import Spec
from paceline.schema import SamplingParams, as_tokens
from toys import P, Q, constant, markov, total_variation

CHAIN, FORK, TREE = [-1, 0, 1], [-1, -1], [-1, -1, 0, 0, 1]


def worst(policy, drafter, parents, points=None, block=False, last=()):
    law = emitted_law(policy, drafter, parents, points or {}, block, last)
    wanted = policy_law(policy, len(next(iter(law))))
    assert abs(sum(law.values()) - 1) < 1e-12
    return max(abs(law.get(path, 0.0) - wanted.get(path, 0.0)) for path in law.keys() | wanted.keys())


def toy(probabilities, params=None):
    return processed(constant(probabilities), params or SamplingParams())


params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2]),
    top_p=st.sampled_from([1.0, 1.0, 0.6, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {1: 2.0}, {0: -100.0}]),
    bad_words=st.sampled_from([(), ((1, 2),), ((2,),)]),
)


@st.composite
def trees(draw, most=4):
    count = draw(st.integers(1, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    points = {n: draw(st.integers(0, 2)) for n in range(count) if draw(st.integers(0, 3)) == 0}
    # No more drawn siblings than the law has tokens.
    for parent in set(parents):
        drawn = [n for n in range(count) if parents[n] == parent and n not in points]
        points |= dict.fromkeys(drawn[2:], 0)
    return parents, points


@settings(max_examples=60, deadline=None)
@given(trees(), params_of, params_of, st.integers(0, 10_000), st.booleans(), st.sets(st.integers(0, 2), max_size=2))
def test_the_law_of_a_tree_is_the_policys_whatever_the_drafter_and_the_processors(
    tree, params, theirs, seed, sharp, last
):
    parents, points = tree
    policy = processed(markov(3, seed), params)
    drafter = processed(markov(3, seed + 1, sharpness=6.0 if sharp else 1.0), theirs)
    assert worst(policy, drafter, parents, points, last=last) < 1e-12


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), params_of, params_of, st.integers(0, 10_000), st.booleans(), st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 2), max_size=2),
)  # fmt: skip
def test_the_law_of_a_block_is_the_policys_whatever_the_drafter_and_the_processors(
    length, params, theirs, seed, sharp, masses, last
):
    policy = processed(markov(3, seed), params)
    drafter = processed(markov(3, seed + 1, sharpness=6.0 if sharp else 1.0), theirs)
    points = {n: (seed + n) % 3 for n in masses if n < length}
    assert worst(policy, drafter, chain_parents(length).tolist(), points, block=True, last=last) < 1e-12


@pytest.mark.parametrize("block", [False, True])
def test_a_drafter_equal_to_the_policy_is_always_accepted(block):
    policy = processed(markov(3, 5), SamplingParams())
    assert worst(policy, policy, CHAIN, block=block) < 1e-12
    _, verdicts = drawn(P, P, 2000, CHAIN, "block" if block else "rejection")
    assert all(len(v.path) == 3 for v in verdicts)


def test_the_enumeration_sees_a_wrong_residual():
    """Acceptance by one drafter's law of tokens that another drew is not the policy's law."""
    law = emitted_law(toy(P), toy(Q), [-1], {}, False)
    assert max(abs(law[(v, w)] - P[v] * P[w]) for v in range(3) for w in range(3)) < 1e-12
    mixed = {}
    for x, weight in enumerate(Q):
        keep = min(1.0, P[x] / P[x])  # judged by P, drawn from Q
        mixed[x] = mixed.get(x, 0.0) + weight * keep
    assert max(abs(mixed[v] - P[v]) for v in range(3)) > 0.1


def drawn(p, q, count, parents, acceptance, params=None, theirs=None, run_seed=3):
    """``count`` requests, each drafting a tree drawn from q; first tokens and verdicts."""
    laws_V = processed(constant(q), theirs or params or SamplingParams())(())
    seeds = torch.arange(count)
    width = max(np.bincount(np.asarray(parents) + 1))
    tokens = np.zeros((count, len(parents)), dtype=np.int32)
    nodes = np.asarray(parents)
    for parent in np.unique(nodes):
        keys = draft_position(torch.zeros(count, dtype=torch.int64), int(parent))
        found = draw_candidates(laws_V.expand(count, -1), run_seed, seeds, keys, int(width))
        children = np.flatnonzero(nodes == parent)
        tokens[:, children] = found[:, : len(children)].numpy()
    law_of = as_tokens(np.zeros(len(parents)))
    spec = Spec(params or SamplingParams())
    rows = [
        VerifyRow(str(i), spec, i, as_tokens([0]), as_tokens([]), tokens[i], as_tokens(parents), laws_V[None], law_of)
        for i in range(count)
    ]
    logits = torch.tensor(p, dtype=torch.float64).log().expand(count * (1 + len(parents)), -1)
    verdicts = accept(logits, rows, run_seed, acceptance)
    return np.array([v.tokens[0] for v in verdicts]), verdicts


def g_test(counts, law):
    """p-value of counts (K,) under a law, by the chi-squared limit."""
    law, counts = np.asarray(law), np.asarray(counts, dtype=np.float64)
    assert counts[law == 0].sum() == 0
    seen = counts > 0
    statistic = 2 * float((counts[seen] * np.log(counts[seen] / (counts.sum() * law[seen]))).sum())
    freedom = int((law > 0).sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("parents", [CHAIN, FORK, TREE], ids=["chain", "fork", "tree"])
def test_draws_follow_the_policys_law_of_pairs(acceptance, parents):  # field A3, A8
    first, verdicts = drawn(P, Q, 20_000, parents, acceptance)
    assert total_variation(first, P) < 0.012
    # Where at least one node was kept, the pass itself emitted a pair; where none was, the law of the first holds.
    pairs = np.array([v.tokens[0] * 3 + v.tokens[1] for v in verdicts if len(v.tokens) > 1])
    second = np.array([v.tokens[1] for v in verdicts if len(v.tokens) > 1])
    assert len(pairs) > 5000
    assert g_test(np.bincount(first, minlength=3), P) > 1e-4
    assert g_test(np.bincount(second, minlength=3), P) > 1e-4


def test_rejection_accepts_with_one_minus_the_total_variation():
    _, verdicts = drawn(P, Q, 20_000, [-1], "rejection")
    share = np.mean([len(v.path) for v in verdicts])
    assert share == pytest.approx(sum(min(p, q) for p, q in zip(P, Q, strict=True)), abs=0.01)


def test_blocks_accept_at_least_as_much_as_tokens_one_by_one():
    _, one = drawn(P, Q, 20_000, CHAIN, "rejection")
    _, block = drawn(P, Q, 20_000, CHAIN, "block")
    assert np.mean([len(v.path) for v in block]) > np.mean([len(v.path) for v in one]) + 0.05


def test_temperature_and_top_k_hold_for_both_laws():  # field A2, A7
    """Raw Q = (.5, .3, .2), top_k 2; a policy whose top two are tokens 1 and 0."""
    params = SamplingParams(top_k=2)
    first, _ = drawn((1 / 3.5, 2 / 3.5, 0.5 / 3.5), (0.5, 0.3, 0.2), 30_000, [-1], "rejection", params)
    assert total_variation(first, (1 / 3, 2 / 3, 0)) < 0.01
    first, _ = drawn(P, Q, 30_000, [-1], "rejection", SamplingParams(temperature=0.5))
    assert total_variation(first, (0.6579, 0.2368, 0.1053)) < 0.01


def test_log_probabilities_are_the_policys_not_the_residuals():  # field B1
    _, verdicts = drawn(P, Q, 500, CHAIN, "rejection")
    for verdict in verdicts:
        assert verdict.processed_logprobs == pytest.approx(np.log(np.array(P)[verdict.tokens]), abs=1e-9)


def test_nothing_of_the_callers_is_written_to():  # field A6
    logits, laws = torch.tensor([P, P, P], dtype=torch.float64).log(), torch.tensor([Q], dtype=torch.float64).log()
    before = logits.clone(), laws.clone()
    row = VerifyRow("r", Spec(SamplingParams()), 0, as_tokens([0]), as_tokens([]), as_tokens([2, 0]),
                    as_tokens([-1, -1]), laws, as_tokens([0, 0]))  # fmt: skip
    for acceptance in ("rejection", "block", "coupled"):
        accept(logits, [row], 0, acceptance)
    assert torch.equal(logits, before[0])
    assert torch.equal(laws, before[1])


def test_a_token_that_its_own_law_excludes_is_an_error_with_its_place():
    laws = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    row = VerifyRow("r7", Spec(SamplingParams()), 0, as_tokens([0]), as_tokens([1, 1]), as_tokens([2]), as_tokens([-1]),
                    laws, as_tokens([0]))  # fmt: skip
    logits = torch.tensor([P, P], dtype=torch.float64).log()
    for acceptance in ("rejection", "block"):
        with pytest.raises(DraftLawError, match=r"request r7, response position 2: token 2 was drafted"):
            accept(logits, [row], 0, acceptance)
    assert len(accept(logits, [row], 0)) == 1


def test_a_law_over_another_vocabulary_is_refused_with_both_sizes():  # field I2
    row = VerifyRow("r", Spec(SamplingParams()), 0, as_tokens([0]), as_tokens([]), as_tokens([1]), as_tokens([-1]),
                    torch.zeros(1, 4), as_tokens([0]))  # fmt: skip
    with pytest.raises(DraftLawError, match=r"shape \(1, 4\), the policy's vocabulary is 3"):
        accept(torch.zeros(2, 3), [row], 0, "rejection")


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_point_masses_beside_drawn_drafts_keep_their_keyed_tokens(acceptance):
    """A batch that mixes both: rows without laws emit what they would emit alone under coupled acceptance."""
    logits = torch.tensor(P, dtype=torch.float64).log()
    law = torch.tensor([Q], dtype=torch.float64).log()
    rows = []
    for i in range(60):
        soft = {"laws": law, "law_of": as_tokens([0, -1])} if i % 2 else {}
        rows.append(VerifyRow(str(i), Spec(SamplingParams()), i, as_tokens([0]), as_tokens([]), as_tokens([i % 3, 1]),
                              as_tokens([-1, 0]), **soft))  # fmt: skip
    mixed = accept(logits.expand(180, -1), rows, 1, acceptance)
    for i in range(0, 60, 2):
        (alone,) = accept(logits.expand(3, -1), [rows[i]], 1)
        assert mixed[i].tokens.tolist() == alone.tokens.tolist()
        assert mixed[i].margins.tolist() == alone.margins.tolist()


def test_greedy_rows_take_the_argmax_whatever_was_drawn():
    rows = [VerifyRow(str(t), Spec(SamplingParams(temperature=0)), 0, as_tokens([0]), as_tokens([]), as_tokens([t]),
                      as_tokens([-1]), torch.zeros(1, 3), as_tokens([0])) for t in range(3)]  # fmt: skip
    verdicts = accept(torch.tensor(P).log().expand(6, -1), rows, 0, "rejection")
    assert [v.tokens.tolist() for v in verdicts] == [[0, 0], [0], [0]]


def test_a_later_pass_reads_none_of_an_earlier_drafts_noise():  # field A4
    keys = {draft_position(n, node) for n in range(40) for node in range(-1, 255)}
    assert len(keys) == 40 * 256


def test_draws_without_replacement_follow_the_law_and_never_repeat():
    laws = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64).log().expand(30_000, -1)
    found = draw_candidates(laws, 1, torch.arange(30_000), torch.zeros(30_000, dtype=torch.int64), 4).numpy()
    assert (found[:, 3] == -1).all()
    assert (np.sort(found[:, :3], 1) == [0, 1, 2]).all()
    second = np.bincount(found[:, 1], minlength=3) / len(found)
    wanted = [0.3 * 0.5 / 0.7 + 0.2 * 0.5 / 0.8, 0.5 * 0.3 / 0.5 + 0.2 * 0.3 / 0.8, 0.5 * 0.2 / 0.5 + 0.3 * 0.2 / 0.7]
    assert second == pytest.approx(wanted, abs=0.012)


def test_the_first_coupled_candidate_is_the_policys_sample_and_the_others_are_next_in_line():
    torch.manual_seed(0)
    logits = 3 * torch.randn(400, 700, dtype=torch.float64)
    seeds, positions = torch.arange(400), torch.arange(400) % 7
    found = coupled_candidates(logits, 5, seeds, positions, 3)
    sample, _ = keyed_sample(logits, block_logsumexp(logits), 5, seeds, positions)
    assert torch.equal(found[:, 0], sample)
    assert (found.sort(1).values.diff(dim=1) > 0).all()
    # A law that is a little off finds the sample more often among three candidates than with one.
    near = logits + 0.5 * torch.randn(400, 700, dtype=torch.float64)
    close = coupled_candidates(near, 5, seeds, positions, 3)
    hits = (close == sample[:, None]).any(1).double().mean(), (close[:, 0] == sample).double().mean()
    assert hits[0] > hits[1] + 0.05


def test_the_two_levels_of_the_keyed_sample_multiply_to_the_softmax():
    logits = 4 * torch.randn(5, 3 * BLOCK + 17, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    blocks = block_logsumexp(logits)
    product = torch.cat(
        [
            (blocks.log_softmax(-1)[:, b : b + 1] + logits[:, b * BLOCK : (b + 1) * BLOCK].log_softmax(-1)).exp()
            for b in range(blocks.shape[1])
        ],
        dim=1,
    )
    assert (product - logits.softmax(-1)).abs().max() < 1e-12
