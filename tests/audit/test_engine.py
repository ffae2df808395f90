"""The engine over toy policies: the records it makes, its limits, and drafters behind the seam."""

import numpy as np
import pytest
import torch

from paceline.audit.drafting import ToyDrafter
from paceline.audit.engine import ToyEngine
from paceline.audit.toys import blurred, fixture, markov, response_law, toy_drafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engines.intake import RequestError
from paceline.schema import Grammar, PacelineError, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, random_trees


def requests(count, **params):
    params = SamplingParams(**{"max_tokens": 12, **params})
    return [RolloutRequest(request_id=f"r{i}", prompt=as_tokens([1, i % 3]), params=params) for i in range(count)]


def drafter(**how):
    return ToyDrafter(toy_drafter(markov()), **how)


@pytest.mark.parametrize(
    "proposer",
    [
        drafter(), drafter(width=3), drafter(point=True), drafter(ragged=True), PromptLookupDrafter(),
        ScriptedDrafter(random_trees(3, 8)),
    ],
    ids=["soft", "tree", "point", "ragged", "lookup", "hostile"],
)  # fmt: skip
def test_no_drafter_and_no_batch_changes_a_token(proposer):  # field A12
    plain = ToyEngine(markov()).generate(requests(40))
    engine = ToyEngine(markov(), drafter=proposer, slots=7)
    for want, got in zip(plain, engine.generate(requests(40)), strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.finish_reason == want.finish_reason
        assert np.allclose(got.logprobs, want.logprobs, atol=1e-12)
        assert np.allclose(got.margins, want.margins, atol=1e-12)
    assert engine.stats().tokens_accepted > 0


def test_a_rollout_has_every_field():
    engine = ToyEngine(markov(), drafter=drafter(depth=3), decode=lambda tokens: "".join(map(str, tokens)))
    (request,) = requests(1, n=30, temperature=0.7, logprobs="raw")
    rollouts = engine.generate([request])
    stats = engine.stats()
    assert [rollout.request_id for rollout in rollouts] == [f"r0/{i}" for i in range(30)]
    assert [rollout.sample_index for rollout in rollouts] == list(range(30))
    assert len({tuple(rollout.tokens) for rollout in rollouts}) > 20
    for rollout in rollouts:
        count = len(rollout.tokens)
        for beside in (rollout.logprobs, rollout.raw_logprobs, rollout.margins, rollout.versions, rollout.sources):
            assert len(beside) == count
        assert rollout.logprob_mode == "raw"
        law = markov().logits_along(request.prompt, rollout.tokens).log_softmax(-1).numpy()
        assert np.allclose(rollout.logprobs, law[np.arange(count), rollout.tokens], atol=1e-9)
        assert rollout.accepted == (rollout.sources > 0).sum() == rollout.accept_lengths.sum()
        assert rollout.accepted <= count <= rollout.accepted + rollout.forwards
        assert rollout.finish_reason == ("stop" if rollout.tokens[-1] == 7 else "length")
        assert rollout.text == "".join(map(str, rollout.tokens))
    assert stats.tokens_emitted == sum(len(rollout.tokens) for rollout in rollouts)
    assert stats.tokens_accepted == sum(rollout.accepted for rollout in rollouts) > 0
    assert stats.tokens_drafted == sum(rollout.drafted for rollout in rollouts)
    assert stats.row_forwards == sum(rollout.forwards for rollout in rollouts)
    assert stats.drafts_asked > 0
    assert stats.tokens_prefilled == 30


def test_responses_follow_the_exact_law():
    params = SamplingParams(max_tokens=6, n=6000, temperature=0.8)
    prompt = as_tokens([3])
    engine = ToyEngine(markov(), slots=6000)
    rollouts = engine.generate([RolloutRequest(request_id="r", prompt=prompt, params=params)])
    law = response_law(markov(), params, prompt)
    lengths = np.bincount([len(rollout.tokens) for rollout in rollouts], minlength=7)
    pairs = np.zeros((8, 8))
    for rollout in rollouts:
        if len(rollout.tokens) > 2:
            pairs[rollout.tokens[1], rollout.tokens[2]] += 1
    for counts, expected in ((lengths[1:], law.lengths_T[1:]), (pairs[:7].ravel(), law.pairs(1)[:7].ravel())):
        chi_squared = ((counts - 6000 * expected) ** 2 / (6000 * expected)).sum()
        assert chi_squared < len(counts) + 5 * np.sqrt(2 * len(counts))


def test_slots_are_filled_in_the_order_of_arrival():
    engine = ToyEngine(fixture(), slots=2)
    engine.submit(requests(3, max_tokens=2)[:3])
    engine.step()
    assert [row.request_id for row in engine.running] == ["r0", "r1"]
    assert [row.request_id for row in engine.waiting] == ["r2"]
    assert [rollout.request_id for rollout in engine.step()] == ["r0", "r1"]


def test_the_context_ends_both_runs_on_the_same_token():  # field C11
    lengths = [
        [len(r.tokens) for r in ToyEngine(fixture(), context=9, drafter=d).generate(requests(8, max_tokens=64))]
        for d in (None, ToyDrafter(toy_drafter(fixture())))
    ]
    assert lengths == [[7] * 8] * 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ("a",)}, "decode"),
        ({"logit_bias": {8: 1.0}}, "vocabulary of 8"),
        ({"stop_token_ids": (9,)}, "vocabulary of 8"),
        ({"grammar": Grammar(kind="regex", text="a")}, "grammar"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_nothing_is_queued(params, message):  # field D6
    engine = ToyEngine(markov())
    with pytest.raises(RequestError, match=message):
        engine.submit([*requests(1), *requests(2, **params)[1:]])
    assert not engine.busy


def test_new_weights_move_the_policy_in_the_middle_of_a_request():
    engine = ToyEngine(fixture(), drafter=ToyDrafter(toy_drafter(fixture()), depth=1))
    engine.submit(requests(50, max_tokens=20))
    engine.step()
    with pytest.raises(PacelineError, match="table"):
        engine.load_weights(3, {"other": torch.zeros(1)})
    engine.load_weights(3, {"table": torch.tensor([[[0.0, -50.0, -50.0]]])})
    rollouts = []
    while engine.busy:
        rollouts += engine.step()
    for rollout in rollouts:
        assert set(rollout.versions.tolist()) == {0, 3}
        assert (rollout.tokens[rollout.versions == 3] == 0).all()
    assert engine.stats().weight_version == 3
    assert "draft_stale" not in engine.stats().events


def test_malformed_and_stale_drafts_are_dropped_and_counted():
    scripts = {"r0": ([99], None), "r1": ([1, 2], [0, 0]), "r2": ([1], [-1, -1]), "r3": ([1, 2], None)}
    proposer = ScriptedDrafter(lambda request, response: scripts[request.request_id])
    engine = ToyEngine(markov(), drafter=proposer)
    engine.submit(requests(4))
    engine.step()
    assert engine.stats().events == {"draft_malformed": 3}
    proposer.version = 7
    engine.step()
    assert engine.stats().events["draft_stale"] == len(proposer.calls[-1][0])


def test_a_closed_engine_refuses():
    engine = ToyEngine(fixture())
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_a_drafters_draws_follow_its_law_without_replacement():
    law = toy_drafter(fixture())
    proposer = ToyDrafter(law, depth=1, width=2)
    named = requests(20_000)
    proposer.start(named)
    drafts = proposer.propose([request.request_id for request in named], 8)
    first, second = np.array([draft.tokens for draft in drafts]).T
    assert (first != second).all()
    assert np.abs(np.bincount(first) / 20_000 - (0.2, 0.2, 0.6)).max() < 0.01
    assert np.abs(np.bincount(second[first == 2]) / (first == 2).sum() - (0.5, 0.5)).max() < 0.02
    assert torch.equal(drafts[0].laws, law.table[0])
    assert drafts[0].law_of.tolist() == [0, 0]


def test_a_draft_depends_on_request_and_length_only():
    batch, alone = (ToyDrafter(blurred(markov()), depth=5) for _ in range(2))
    named = requests(9)
    batch.start(named)
    alone.start(named[4:5])
    assert (
        batch.propose([r.request_id for r in named], 8)[4].tokens.tolist()
        == alone.propose(["r4"], 8)[0].tokens.tolist()
    )
