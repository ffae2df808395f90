"""A recurrent head as drafter: its laws are those of the equations, no token changes, and no stale trunk is used."""

import copy
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_head import eagle3_pass, mtp_pass
from paceline.config import DrafterConfig, HeadConfig
from paceline.drafters import head as head_module
from paceline.drafters import make_drafter
from paceline.drafters.base import Learned, Observer, Paced, Reads, Renewable, Seen
from paceline.drafters.head import HeadDrafter
from paceline.drafters.heads import make_head
from paceline.drafters.heads.base import Head
from paceline.forward.pretrained import ModelError
from paceline.forward.runner import WeightsError
from paceline.sampling.keyed import block_logsumexp, keyed_sample
from paceline.sampling.noise import signed64
from paceline.sampling.processors import Spec, process
from paceline.schema import SOURCES, Outcome, PacelineError, RolloutRequest, SamplingParams, as_tokens
from soft_drafting import (
    EVERYTHING,
    MODES,
    SEED,
    engine_of,
    least_p_value,
    near,
    pair_law,
    requests,
    run,
    said,
    seen,
    states_of,
    tiny_laws,
    traits,
)
from tiny_models import VOCABULARY, tiny

KINDS = ("eagle3", "mtp")
PASSES = {"eagle3": eagle3_pass, "mtp": mtp_pass}


def head_of(policy, kind="eagle3", seed=0, **settings):
    """A random head with weights large enough that its laws are far from uniform."""
    head = make_head(kind, HeadConfig(**{"init": "random", "dtype": "float64", **settings}), policy, seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    return head


def drafter_of(policy, kind="eagle3", acceptance="coupled", width=1, head=None, seed=0, vocabulary=0, **changes):
    head = head or head_of(policy, kind, seed, vocabulary=vocabulary)
    return HeadDrafter(head, traits(acceptance, **changes), width=width)


def text_of(request, response=()):
    return np.append(request.prompt, as_tokens(response))


def alone(policy, request, response, **options):
    """What a drafter proposes that was given all states of a text at once, budget 8."""
    drafter = drafter_of(policy, **options)
    layers = drafter.attach(policy)
    drafter.start([request])
    if len(response):
        drafter.commit([Outcome(request_id=request.request_id, tokens=as_tokens(response), accepted=0, drafted=0)])
    drafter.observe([seen(policy, layers, request.request_id, text_of(request, response))])
    (draft,) = drafter.propose([request.request_id], 8)
    return draft


class Causal:
    """Every row sees the rows up to itself."""

    def add(self, *sides):
        self.sides = sides

    def seen(self, n):
        return tuple(side[: n + 1] for side in self.sides)


def dense_law(head, policy, request, text, drafted):
    """The head's processed law after ``text`` and the tokens drafted behind it, by the equations, without a cache."""
    weights = head.state_dict()
    table = policy.get_input_embeddings().weight
    carried = head.fuse(states_of(policy, head.taps, text))
    inputs = table[torch.tensor([*text[1:].tolist(), *drafted])]
    one_pass = PASSES[head.kind]
    # Pass by pass, each over all rows so far: what a row carries on is the last thing that the next one needs.
    for _ in range(len(drafted) + 1):
        rows = len(carried)
        read, out = one_pass(weights, head.config, inputs[:rows], carried, torch.arange(rows), Causal())
        carried = torch.cat([carried, out[-1:]])
    ids = head.policy_ids()
    logits = read[-1] @ head.output_weight().T
    if ids is not None:
        logits = torch.full((VOCABULARY,), -torch.inf, dtype=logits.dtype).index_copy(0, ids, logits)
    response = as_tokens([*text[len(request.prompt) :].tolist(), *drafted])
    return process(logits[None], [Spec(request.params)], lambda _: (request.prompt, response))


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "vocabulary"), [("eagle3", 0), ("eagle3", 23), ("mtp", 0)])
def test_a_node_is_the_policys_own_sample_of_the_law_that_the_equations_give(kind, vocabulary):
    policy = tiny()
    head = head_of(policy, kind, vocabulary=vocabulary)
    request = requests(1, repetition_penalty=1.3, temperature=0.9)[0]
    text = text_of(request, [7, 7, 30])
    for acceptance in ("coupled", "rejection"):
        drafter = HeadDrafter(head, traits(acceptance))
        drafter.attach(policy)
        drafter.start([request])
        drafter.commit([Outcome(request_id="r0", tokens=as_tokens([7, 7, 30]), accepted=0, drafted=0)])
        drafter.observe([seen(policy, head.taps, "r0", text)])
        (draft,) = drafter.propose(["r0"], 4)
        assert len(draft.tokens) == 4
        assert (draft.sources == SOURCES.index("model")).all()
        for depth, token in enumerate(draft.tokens.tolist()):
            law = dense_law(head, policy, request, text, draft.tokens[:depth].tolist())
            if acceptance == "rejection":
                assert torch.allclose(draft.laws[depth], law[0], atol=1e-9)
                continue
            where = torch.tensor([signed64(request.seed)]), torch.tensor([3 + depth])
            assert token == int(keyed_sample(law, block_logsumexp(law), SEED, *where)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_coupled_drafts_change_no_token_with_processors_and_budgets(kind, width):  # field E1
    for params in ("penalised", "masked"):
        reqs = requests(**EVERYTHING[params])
        plain, _ = run(tiny(), reqs, eos_ids=(11,))
        for options in ({}, {"budget": 9, "mode": "adaptive", "slots": 3}):
            policy = tiny()
            drafter = drafter_of(policy, kind, width=width, eos_ids=(11,))
            drafted, stats = run(policy, reqs, drafter, eos_ids=(11,), **options)
            assert said(drafted) == said(plain)
            assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
            assert stats.tokens_drafted > 0
            assert not stats.events


class Copy(Head):
    """Says what a policy says whose every token follows from the one before it alone."""

    kind = "eagle3"

    def __init__(self, policy):
        super().__init__()
        self.taps, self.d2t = (0,), None
        self.config = copy.deepcopy(policy.config)
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def fuse(self, states_NS):
        return states_NS

    def forward(self, embeds_1NH, carried_1NH, position_1N, **attention):
        return self.policy.model.norm(embeds_1NH), carried_1NH

    def output_weight(self):
        return self.policy.lm_head.weight

    def checkpoint(self):
        return {"weight": self.weight}

    def load_checkpoint(self, tensors):
        self.weight.data.copy_(tensors["weight"])


def bigrams():
    """A policy whose layers add nothing to the embedding."""
    policy = tiny()
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return policy


@pytest.mark.parametrize("acceptance", MODES)
def test_a_head_that_is_a_perfect_copy_of_the_policy_is_accepted_fully(acceptance):
    for params in ({}, {"temperature": 0.0}, {"top_k": 5, "repetition_penalty": 1.3, "temperature": 0.8}):
        reqs = requests(**params)
        policy = bigrams()
        head = Copy(policy)
        _, stats = run(policy, reqs, HeadDrafter(head, traits(acceptance)), acceptance=acceptance)
        assert stats.tokens_accepted == stats.tokens_drafted > 0
        # Where the first pass reads the prompt, the states that drafts need are there from the next one on.
        assert -(-20 // 6) <= stats.row_forwards / len(reqs) <= 1 + -(-19 // 6)


@pytest.mark.parametrize("acceptance", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_verdict_drafts_equal_those_of_a_drafter_that_sees_the_text_at_once(kind, acceptance):  # field E2
    (request,) = requests(1, max_tokens=40)
    policy = tiny()
    old = drafter_of(policy, kind, acceptance, width=2)
    layers = old.attach(policy)
    old.start([request])
    rng = np.random.default_rng(0)
    emitted, cached = [], 0
    assert old.propose(["r0"], 8) == []  # nothing was seen yet
    for _ in range(8):
        text = text_of(request, emitted)
        old.observe([seen(policy, layers, "r0", text, cached)])
        cached = len(text) - 1
        (draft,) = old.propose(["r0"], 8)
        wanted = alone(policy, request, emitted, kind=kind, acceptance=acceptance, width=2)
        assert draft.tokens.tolist() == wanted.tokens.tolist()
        assert draft.length == wanted.length == len(text)
        if acceptance != "coupled":
            assert torch.allclose(draft.laws, wanted.laws, atol=1e-9)
        (again,) = old.propose(["r0"], 8)
        assert again.tokens.tolist() == draft.tokens.tolist()
        # Some of the backbone is kept, then comes a token of the policy's.
        kept = draft.tokens[::2][: rng.integers(0, 4)].tolist()
        new = as_tokens([*kept, int(rng.integers(0, VOCABULARY))])
        old.commit([Outcome(request_id="r0", tokens=new, accepted=len(kept), drafted=8)])
        emitted += new.tolist()
    assert len(emitted) > 8


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_law_of_first_tokens_and_pairs_is_the_policys(acceptance):  # field A2, A3
    vocabulary, prompt = 6, as_tokens([1, 2, 3])
    params = SamplingParams(max_tokens=4, temperature=0.8)
    reqs = [RolloutRequest(request_id=str(i), prompt=prompt, params=params) for i in range(1000)]
    policy = tiny_laws(seed=0, vocabulary=vocabulary)
    law = pair_law(copy.deepcopy(policy), prompt, params, vocabulary)
    head = head_of(policy, vocabulary=4)
    drafter = HeadDrafter(head, traits(acceptance, vocabulary_size=vocabulary))
    rollouts, stats = run(
        policy, reqs, drafter, budget=2, acceptance=acceptance, slots=500, max_batched_tokens=4000
    )  # fmt: skip
    assert 0.05 < stats.tokens_accepted / stats.tokens_drafted < 0.95
    # The second token is the first that may have been drafted.
    assert least_p_value(rollouts, law) > 1e-4


def test_a_draft_vocabulary_leaves_other_tokens_to_the_policy_and_changes_none():
    reqs = requests()
    plain, _ = run(tiny(), reqs)
    policy = tiny()
    head = head_of(policy, vocabulary=12)
    drafts, drafter = [], HeadDrafter(head, traits(), width=2)
    propose = drafter.propose
    drafter.propose = lambda *given: drafts.extend(new := propose(*given)) or new
    drafted, stats = run(policy, reqs, drafter)
    assert said(drafted) == said(plain)
    known = set(head.policy_ids().tolist())
    assert set(np.concatenate([draft.tokens for draft in drafts]).tolist()) <= known
    assert set(np.concatenate(said(plain)).tolist()) - known
    assert stats.tokens_accepted > 0


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    schedule=st.lists(st.sampled_from(["submit", "abort", "policy", "head", "reload"]), min_size=4, max_size=9),
    kind=st.sampled_from(KINDS),
    width=st.integers(1, 2),
    refit_kv=st.sampled_from(["keep", "recompute"]),
    kv_tokens=st.sampled_from([0, 90]),
)
def test_whatever_comes_between_the_tokens_are_those_of_a_plain_run(schedule, kind, width, refit_kv, kv_tokens):
    """Late arrivals, aborts, refits of policy and head in flight, preemption, prompts that siblings share."""
    reqs = requests(9, max_tokens=12, group=3)
    plain = {rollout.request_id: rollout.tokens.tolist() for rollout in run(tiny(), reqs)[0]}
    policy = tiny()
    drafter = drafter_of(policy, kind, width=width)
    heads = [head_of(policy, kind, seed=n).checkpoint() for n in (5, 6)]
    # The policy's own weights again: with others tokens would depend on when they came.
    weights = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    engine = engine_of(policy, drafter, refit_kv=refit_kv, slots=4, kv_tokens=kv_tokens, max_batched_tokens=24)
    engine.submit(reqs[:3])
    done, later = [], reqs[3:]
    for number, event in enumerate(schedule):
        for _ in range(2):
            done += engine.step()
        if event == "submit":
            engine.submit(later[:2])
            later = later[2:]
        elif event == "abort":
            with suppress(KeyError):
                engine.abort(f"r{number}")
        elif event == "policy":
            engine.load_weights(number, weights)
        elif event == "head":
            engine.load_drafter_weights(number, heads[number % 2])
        else:
            assert engine.sentinel._watched.reload_drafter()
    engine.submit(later)
    while engine.busy:
        done += engine.step()
    stats = engine.stats()
    engine.close()
    assert len(done) == 9
    for rollout in done:
        wanted, tokens = plain[rollout.request_id], rollout.tokens.tolist()
        assert tokens == (wanted[: len(tokens)] if rollout.finish_reason == "abort" else wanted)
    assert not {"drafter_lost", "drafter_overwritten", "draft_stale", "draft_malformed"} & set(stats.events)
    assert stats.tokens_drafted > 0
    assert not drafter._live
    assert not len(drafter._slots)


def test_weights_that_are_loaded_void_the_trunk_until_its_states_are_given_again():
    (request,) = requests(1)
    policy = tiny()
    drafter = drafter_of(policy)
    layers = drafter.attach(policy)
    drafter.start([request])
    given = seen(policy, layers, "r0", request.prompt)
    drafter.observe([given])
    (before,) = drafter.propose(["r0"], 8)
    new = head_of(policy, seed=4)
    drafter.load_weights(7, new.checkpoint())
    assert drafter.weights_version == 7
    assert drafter.propose(["r0"], 8) == []
    with pytest.raises(PacelineError, match="request r0: states from position 2 on, where those of the first 0"):
        drafter.observe([Seen("r0", 2, given.states[2:])])
    drafter.observe([given])
    (after,) = drafter.propose(["r0"], 8)
    (wanted,) = [alone(policy, request, [], head=new)]
    assert after.tokens.tolist() == wanted.tokens.tolist() != before.tokens.tolist()
    with pytest.raises(WeightsError):
        drafter.load_weights(8, {name: tensor[:1] for name, tensor in new.checkpoint().items()})
    assert drafter.weights_version == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_is_not_asked_for_a_while_is_drafted_for_as_if_it_had_been(kind):
    policy = tiny()
    drafter = drafter_of(policy, kind)
    layers = drafter.attach(policy)
    one, other = requests(2, group=1)
    said_T = as_tokens([3, 1, 4, 1, 5])
    drafter.start([one, other])
    drafter.commit([Outcome(request_id=r.request_id, tokens=said_T[:2], accepted=0, drafted=0) for r in (one, other)])
    drafter.observe([seen(policy, layers, r.request_id, text_of(r, said_T[:2])) for r in (one, other)])
    for asked in (one, other):  # there is one slot, until both need theirs
        assert len(drafter.propose([asked.request_id], 8)) == 1
    drafter.commit([Outcome(request_id=one.request_id, tokens=said_T[2:], accepted=0, drafted=0)])
    start = len(one.prompt) + 1
    drafter.observe([seen(policy, layers, one.request_id, text_of(one, said_T), start)])
    (draft,) = drafter.propose([one.request_id], 8)
    assert draft.tokens.tolist() == alone(policy, one, said_T, kind=kind).tokens.tolist()


def test_states_that_were_computed_anew_void_what_was_read_behind_them():
    (request,) = requests(1)
    policy, other = tiny(), near(tiny(), 0.2)
    drafter = drafter_of(policy)
    layers = drafter.attach(policy)
    drafter.start([request])
    drafter.observe([seen(policy, layers, "r0", request.prompt)])
    drafter.propose(["r0"], 8)
    drafter.on_weights(1)
    drafter.head.bind(other)
    drafter.observe([seen(other, layers, "r0", request.prompt)])
    (draft,) = drafter.propose(["r0"], 8)
    assert draft.version == 1
    assert draft.tokens.tolist() == alone(other, request, [], head=head_of(policy)).tokens.tolist()


def test_in_flight_the_engine_gives_states_again_after_the_head_has_moved_and_drafts_go_on():
    reqs = requests(6, max_tokens=40)
    plain, _ = run(tiny(), reqs)
    for change in ("load", "reload"):
        policy = tiny()
        drafter = drafter_of(policy)
        engine = engine_of(policy, drafter)
        engine.submit(reqs)
        done = [rollout for _ in range(3) for rollout in engine.step()]
        drafted = engine.stats().tokens_drafted
        if change == "load":
            engine.load_drafter_weights(0, head_of(policy, seed=4).checkpoint())
        else:
            engine.sentinel._watched.reload_drafter()
        for _ in range(2):
            done += engine.step()
        assert engine.stats().tokens_drafted > drafted
        while engine.busy:
            done += engine.step()
        assert {r.request_id: r.tokens.tolist() for r in done} == {r.request_id: r.tokens.tolist() for r in plain}
        assert not engine.stats().events


def test_a_reload_and_a_fresh_drafter_have_the_weights_that_were_loaded_last():
    policy = tiny()
    drafter = drafter_of(policy)
    drafter.attach(policy)
    new = {name: tensor.clone() for name, tensor in head_of(policy, seed=4).checkpoint().items()}
    drafter.load_weights(3, new)
    for repair in (drafter.reload, drafter.fresh):
        with torch.no_grad():
            drafter.head.fc.weight.fill_(torch.nan)
        other = repair()
        other = drafter if other is True else other
        assert other.weights_version == 3
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in new.items())


def test_where_the_heads_context_ends_drafts_stop_and_the_policy_goes_on(caplog):  # field I1, K7
    reqs = requests(4, max_tokens=30)
    plain, _ = run(tiny(), reqs)
    policy = tiny()
    head = head_of(policy)
    head.config.max_position_embeddings = 20
    drafter, deepest = HeadDrafter(head, traits(context=128)), []
    propose = drafter.propose

    def spy(names, budget):
        drafts = propose(names, budget)
        deepest.extend(draft.length - 2 + len(draft.tokens) for draft in drafts)
        return drafts

    drafter.propose = spy
    rollouts, _ = run(policy, reqs, drafter)
    assert said(rollouts) == said(plain)
    # Depth d behind L tokens is drafted from position L - 3 + d.
    assert max(deepest) == 20
    assert {int(r.accept_lengths[-1]) for r in rollouts} == {0}
    (warning,) = [record.getMessage() for record in caplog.records if "drafter_context" in record.getMessage()]
    assert "made for 20 positions (max_position_embeddings), the policy decodes up to 128" in warning


def test_siblings_that_begin_together_read_their_prompt_once(monkeypatch):
    rng = np.random.default_rng(1)
    prompts = [as_tokens(rng.integers(1, VOCABULARY, size)) for size in (40, 9)]
    params = SamplingParams(max_tokens=20)
    reqs = [RolloutRequest(request_id=f"{i}", prompt=prompts[i % 2], params=params) for i in range(12)]
    plain, _ = run(tiny(), reqs)
    rows, drafts = {}, {}
    for least in (1, 10_000):
        monkeypatch.setattr(head_module, "_WORTH_SHARING", least)
        policy = tiny()
        drafter = drafter_of(policy)
        rows[least], drafts[least], one_pass, propose = [], [], drafter._pass, drafter.propose

        def counting(*given, least=least, one_pass=one_pass):
            rows[least].append(sum(map(len, given[2])))
            return one_pass(*given)

        def keeping(*given, least=least, propose=propose):
            new = propose(*given)
            drafts[least] += [(draft.request_id, draft.tokens.tolist()) for draft in new]
            return new

        drafter._pass, drafter.propose = counting, keeping
        rollouts, _ = run(policy, reqs, drafter)
        assert said(rollouts) == said(plain)
    assert drafts[1] == drafts[10_000]
    # The last row of a prompt is read with the draft, by each of them.
    assert sum(rows[10_000]) - sum(rows[1]) == 5 * (38 + 7)


def test_long_prompts_are_read_in_passes_of_bounded_size():
    rng = np.random.default_rng(1)
    reqs = [
        RolloutRequest(request_id=str(i), prompt=as_tokens(rng.integers(1, VOCABULARY, 900)), params=SamplingParams())
        for i in range(4)
    ]
    policy = tiny(context=1200)
    drafter, sizes = drafter_of(policy), []
    layers = drafter.attach(policy)
    one_pass = drafter._pass
    drafter._pass = lambda *given: sizes.append(sum(map(len, given[2]))) or one_pass(*given)
    drafter.start(reqs)
    drafter.observe([seen(policy, layers, request.request_id, request.prompt) for request in reqs])
    drafts = {draft.request_id: draft.tokens.tolist() for draft in drafter.propose([r.request_id for r in reqs], 3)}
    assert sizes == [2048, 4 * 899 - 2048, 4, 4]
    for request in reqs:
        assert alone(policy, request, []).tokens[:3].tolist() == drafts[request.request_id]
    # What a prompt costs to read is told from what a draft costs.
    assert drafter.reading_seconds() > 0


def test_the_configuration_makes_a_head_for_the_engines_policy():
    for kind in KINDS:
        config = DrafterConfig(kind=kind, head=HeadConfig(dtype="float64", width=2))
        drafter = make_drafter(config, policy=traits())
        assert all(isinstance(drafter, offer) for offer in (Observer, Learned, Paced, Reads, Renewable))
        reqs = requests()
        rollouts, stats = run(tiny(), reqs, drafter)
        assert said(rollouts) == said(run(tiny(), reqs)[0])
        assert stats.tokens_accepted > 0
        assert drafter.width == 2
        with pytest.raises(PacelineError, match=f"{kind} needs a policy"):
            make_drafter(config)
        with pytest.raises(PacelineError, match=r"drafter\.head\.width: this engine verifies chains only"):
            make_drafter(config, policy=traits(), chains=True)


def test_a_head_of_another_vocabulary_is_refused_by_name():  # field I2
    policy = tiny()
    drafter = drafter_of(policy, vocabulary_size=41)
    with pytest.raises(ModelError, match="the head: it drafts tokens up to 39, the policy's vocabulary is 41"):
        drafter.attach(policy)


def test_a_path_that_leads_to_no_head_is_one_clear_line_before_anything_is_decoded(tmp_path):
    for kind in KINDS:
        config = DrafterConfig(kind=kind, head=HeadConfig(path=str(tmp_path / "nowhere")))
        with pytest.raises(PacelineError, match=r"drafter\.head\.path=.*nowhere") as error:
            engine_of(tiny(), make_drafter(config, policy=traits()))
        assert "\n" not in str(error.value)
