"""A language model as drafter: no token changes under coupled acceptance, no law under rejection and block."""

import copy
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.config import DrafterConfig, DraftModelConfig, EngineConfig
from paceline.drafters import PromptLookupDrafter, make_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.hf import HFEngine
from paceline.engines.identity import check_identity
from paceline.forward.pretrained import ModelError
from paceline.report.diff import diff_runs
from paceline.rl.loop import train
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.keyed import block_logsumexp, keyed_sample
from paceline.sampling.noise import signed64
from paceline.sampling.processors import Spec, process
from paceline.schema import Grammar, Outcome, PacelineError, RolloutRequest, SamplingParams, as_tokens
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
    tiny_laws,
    traits,
)
from tiny_models import ARCHITECTURES, VOCABULARY, tiny
from tiny_policies import VOCABULARY as BYTES
from tiny_policies import byte_tokenizer
from tiny_policies import tiny_config as tiny_config_of
from tiny_run import make_policy, tiny_config


def drafter_of(model, acceptance="coupled", width=1, **changes):
    return DraftModelDrafter(model, traits(acceptance, **changes), width=width)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", EVERYTHING)
def test_coupled_drafts_change_no_token_with_any_processor(kind, width):  # field E1
    reqs = requests(**EVERYTHING[kind])
    plain, _ = run(tiny(), reqs, eos_ids=(11,))
    for draft_model in (near(tiny(), 0.15), tiny(seed=9)):
        drafter = drafter_of(draft_model, width=width, eos_ids=(11,))
        drafted, stats = run(tiny(), reqs, drafter, eos_ids=(11,))
        assert said(drafted) == said(plain)
        assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
        assert stats.tokens_drafted > stats.row_forwards
        assert "draft_malformed" not in stats.events


def test_an_adaptive_budget_picks_among_the_nodes_and_changes_no_token():
    reqs = requests(8)
    plain, _ = run(tiny(), reqs)
    drafted, stats = run(tiny(), reqs, drafter_of(near(tiny(), 0.15), width=3), budget=12, mode="adaptive")
    assert said(drafted) == said(plain)
    assert stats.nodes_offered > stats.tokens_drafted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("acceptance", MODES)
def test_a_perfect_drafter_is_accepted_fully(acceptance, architecture):
    for params in ({}, {"temperature": 0.0}, {"top_k": 5, "repetition_penalty": 1.3, "temperature": 0.8}):
        reqs = requests(**params)
        drafter = drafter_of(tiny(architecture), acceptance)
        _, stats = run(tiny(architecture), reqs, drafter, acceptance=acceptance)
        assert stats.tokens_accepted == stats.tokens_drafted > 0
        assert stats.row_forwards == len(reqs) * -(-20 // 6)


def test_under_coupled_acceptance_a_node_is_what_the_policy_would_say_if_it_were_the_drafter():  # field D1
    (request,) = requests(1, repetition_penalty=1.5, top_p=0.9, temperature=0.7)
    drafter, other = drafter_of(tiny(seed=9)), tiny(seed=9)
    drafter.start([request])
    (draft,) = drafter.propose(["r0"], 6)
    so_far = []
    for position, token in enumerate(draft.tokens.tolist()):
        whole = torch.tensor([[*request.prompt.tolist(), *so_far]])
        law = process(
            other(whole).logits[0, -1:], [Spec(request.params)], lambda _: (request.prompt, as_tokens(so_far))
        )
        where = torch.tensor([signed64(request.seed)]), torch.tensor([position])
        sample, _ = keyed_sample(law, block_logsumexp(law), SEED, *where)
        assert token == int(sample)
        so_far.append(token)


def test_more_children_are_accepted_more_often_and_stand_beside_the_backbone():
    reqs = requests(8)
    accepted = {}
    for width in (1, 3):
        _, stats = run(tiny(), reqs, drafter_of(near(tiny(), 0.3), width=width), budget=4 * width)
        accepted[width] = stats.tokens_accepted / stats.row_forwards
    assert accepted[3] > accepted[1]
    drafter = drafter_of(tiny(), width=3)
    drafter.start(reqs[:1])
    (draft,) = drafter.propose(["r0"], 8)
    assert draft.parents.tolist() == [-1, -1, -1, 0, 0, 0, 3, 3]
    for siblings in (draft.tokens[:3], draft.tokens[3:6], draft.tokens[6:]):
        assert len(set(siblings.tolist())) == len(siblings)
    above = np.array([1.0, *draft.probs])[draft.parents + 1]
    assert (draft.probs <= above + 1e-6).all()
    assert draft.laws is None


@pytest.mark.parametrize("acceptance", MODES)
def test_a_grammar_binds_the_drafts_too_and_not_to_know_it_costs_acceptance_only(acceptance):
    grammar = Grammar(kind="regex", text="(yes|no|yesno)[0-9]{1,3}( really)?")
    words, eos = Vocabulary(byte_tokenizer()), 256
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config_of("llama"), dtype=torch.float64)
    given = SamplingParams(grammar=grammar, max_tokens=30)
    reqs = [RolloutRequest(request_id=f"r{i}", prompt=as_tokens([1, 2, i]), params=given) for i in range(4)]
    shares, texts = [], []
    for known in (words, None):
        policy = traits(acceptance, vocabulary_size=BYTES, eos_ids=(eos,))
        drafter = DraftModelDrafter(copy.deepcopy(model), policy, grammars=known)
        rollouts, stats = run(
            copy.deepcopy(model), reqs, drafter, eos_ids=(eos,), grammars=words, acceptance=acceptance
        )
        shares.append(stats.tokens_accepted / stats.tokens_drafted)
        texts.append([byte_tokenizer().decode(rollout.tokens, skip_special_tokens=True) for rollout in rollouts])
    assert shares[0] == 1.0 > shares[1]
    assert all(re.fullmatch(grammar.text, text) for side in texts for text in side)
    assert acceptance != "coupled" or texts[0] == texts[1]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_law_of_first_tokens_and_pairs_is_the_policys(acceptance):  # field A2, A3
    count, vocabulary = 2000, 6
    policy = tiny_laws(seed=0, vocabulary=vocabulary)
    prompt = as_tokens([1, 2, 3])
    cases = [(1, {"temperature": 0.8}), (3, {"top_k": 4, "frequency_penalty": 0.7})]
    for width, params in cases if acceptance == "rejection" else cases[:1]:
        drafter = drafter_of(near(policy, 0.6), acceptance, width, vocabulary_size=vocabulary)
        given = SamplingParams(max_tokens=3, **params)
        reqs = [RolloutRequest(request_id=str(i), prompt=prompt, params=given) for i in range(count)]
        rollouts, stats = run(
            copy.deepcopy(policy), reqs, drafter, budget=2 * width, acceptance=acceptance, slots=500,
            max_batched_tokens=4000,
        )  # fmt: skip
        assert 0.05 < stats.tokens_accepted / stats.tokens_drafted < 0.95
        assert least_p_value(rollouts, pair_law(policy, prompt, given, vocabulary)) > 1e-4


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_draft_carries_exactly_the_laws_that_it_was_drawn_from(acceptance):  # field A2
    (request,) = requests(1, top_k=9, temperature=0.8, presence_penalty=0.4)
    drafter, other = drafter_of(tiny(seed=9), acceptance, width=2), tiny(seed=9)
    drafter.start([request])
    (draft,) = drafter.propose(["r0"], 6)
    assert draft.law_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert draft.probs is None
    path = as_tokens([])
    for level in range(3):
        whole = torch.tensor([[*request.prompt.tolist(), *path.tolist()]])
        wanted = process(other(whole).logits[0, -1:], [Spec(request.params)], lambda _, p=path: (request.prompt, p))[0]
        assert torch.allclose(draft.laws[level], wanted, atol=1e-9)
        assert torch.isfinite(wanted[draft.tokens[2 * level : 2 * level + 2].astype(int)]).all()
        path = np.append(path, draft.tokens[2 * level])


def test_a_law_with_fewer_tokens_than_the_width_gives_fewer_children():
    (request,) = requests(1, allowed_token_ids=(4, 8))
    for acceptance in MODES:
        drafter = drafter_of(tiny(), acceptance, width=4)
        drafter.start([request])
        (draft,) = drafter.propose(["r0"], 8)
        assert sorted(draft.tokens[:2].tolist()) == sorted(draft.tokens[2:].tolist()) == [4, 8]
        assert draft.parents.tolist() == [-1, -1, 0, 0]


def test_greedy_drafts_are_point_masses_in_every_mode():  # field A1
    greedy, warm = requests(2, temperature=0.0)[0], requests(2)[1]
    for acceptance in MODES:
        drafter = drafter_of(tiny(), acceptance)
        drafter.start([greedy, warm])
        point, drawn = drafter.propose(["r0", "r1"], 3)
        assert point.laws is None
        assert point.law_of is None
        assert (point.probs > 0).all()
        assert (drawn.laws is None) == (acceptance == "coupled")


def test_after_a_rejection_the_drafts_equal_those_of_a_fresh_drafter():  # field E2
    for acceptance in MODES:
        (request,) = requests(1, max_tokens=40)
        old = drafter_of(tiny(seed=9), acceptance, width=2)
        old.start([request])
        rng = np.random.default_rng(0)
        emitted = []
        for _ in range(8):
            (draft,) = old.propose(["r0"], 8)
            # Some of the backbone is kept, a leaf beside it in every other pass, then comes a token of the policy's.
            kept = draft.tokens[::2][: rng.integers(0, 4)].tolist() + draft.tokens[1:2].tolist() * int(
                rng.integers(0, 2)
            )
            fresh_tokens = as_tokens([*kept, int(rng.integers(0, VOCABULARY))])
            old.commit([Outcome(request_id="r0", tokens=fresh_tokens, accepted=len(kept), drafted=8)])
            emitted += fresh_tokens.tolist()
            if len(emitted) > 30:
                break
            fresh = drafter_of(tiny(seed=9), acceptance, width=2)
            fresh.start([request])
            fresh.commit([Outcome(request_id="r0", tokens=as_tokens(emitted), accepted=0, drafted=0)])
            (a,), (b,) = old.propose(["r0"], 8), fresh.propose(["r0"], 8)
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.length == b.length
            if acceptance != "coupled":
                assert torch.allclose(a.laws, b.laws, atol=1e-9)
        assert len(emitted) > 8


def test_where_the_drafters_context_ends_drafts_stop_and_the_policy_goes_on():  # field I1, I4
    reqs = requests(4, max_tokens=30)
    plain, _ = run(tiny(), reqs)
    for acceptance in MODES:
        drafter = drafter_of(tiny(context=28), acceptance)
        rollouts, stats = run(tiny(), reqs, drafter, acceptance=acceptance)
        assert [len(r.tokens) for r in rollouts] == [30] * 4
        assert stats.tokens_accepted == stats.tokens_drafted > 0
        # Prompts of 5 and 1 tokens: everything up to the 29th is drafted, what follows is not.
        assert {int(r.accept_lengths[-1]) for r in rollouts} == {0}
        if acceptance == "coupled":
            assert said(rollouts) == said(plain)
    drafter = drafter_of(tiny(context=10))
    drafter.start(reqs)
    drafter.commit([Outcome(request_id="r0", tokens=as_tokens(range(1, 9)), accepted=0, drafted=0)])
    assert {draft.request_id for draft in drafter.propose(["r0", "r1"], 4)} == {"r1"}


def test_a_draft_ends_with_a_stop_token_and_before_the_last_token_of_a_response():
    reqs = requests(6, max_tokens=7, stop_token_ids=tuple(range(0, VOCABULARY, 2)))
    drafter = drafter_of(tiny())
    drafter.start(reqs)
    for draft in drafter.propose([r.request_id for r in reqs], 16):
        assert len(draft.tokens) <= 6
        assert (draft.tokens[:-1] % 2 == 1).all()
        assert draft.tokens[-1] % 2 == 0 or len(draft.tokens) == 6
    (one,) = requests(1, max_tokens=1)
    drafter = drafter_of(tiny())
    drafter.start([one])
    assert drafter.propose(["r0"], 16) == []


@pytest.mark.parametrize("acceptance", MODES)
def test_preemption_aborts_late_arrivals_and_refits_leave_the_others_alone_and_free_the_slots(
    acceptance,
):  # field F1, F2, G2
    reqs = requests(12, max_tokens=16, group=3)
    plain = {rollout.request_id: rollout.tokens.tolist() for rollout in run(tiny(), reqs)[0]}
    drafter = drafter_of(tiny(seed=9), acceptance)
    weights = {name: tensor.clone() for name, tensor in drafter._runner.model.state_dict().items()}
    model = tiny()
    engine = engine_of(model, drafter, acceptance=acceptance, slots=5, kv_tokens=120)
    engine.submit(reqs[:7])
    done = []
    for step in range(200):
        if step == 3:
            engine.submit(reqs[7:])
        if step == 5:
            engine.abort("r1")
        if step == 6:
            engine.load_weights(1, {name: tensor.clone() for name, tensor in model.named_parameters()})
        done += engine.step()
        assert len(drafter._slots) <= 5
        assert [row.slot for row in drafter._slots] == list(range(len(drafter._slots)))
        if not engine.busy:
            break
    assert engine.stats().preemptions > 0
    assert len(done) == len(reqs)
    assert not drafter._live
    assert not drafter._slots
    assert "draft_stale" not in engine.stats().events
    for rollout in done:
        length = len(rollout.tokens)
        assert length == 16 or rollout.request_id == "r1"
        assert acceptance != "coupled" or rollout.tokens.tolist() == plain[rollout.request_id][:length]
    own = drafter._runner.model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def test_slots_change_hands_and_keep_what_is_cached_in_them():
    drafter = drafter_of(tiny())
    reqs = [request for length in (12, 5, 19, 8) for request in requests(6, max_tokens=length)]
    for number, request in enumerate(reqs):
        request.request_id = str(number)
    plain, _ = run(tiny(), reqs)
    rollouts, stats = run(tiny(), reqs, drafter, slots=4)
    assert said(rollouts) == said(plain)
    assert stats.tokens_accepted == stats.tokens_drafted > 0
    assert drafter._runner.kv.slots <= 4


def test_a_request_that_has_gone_without_drafts_gives_its_slot_up_and_finds_another():
    reqs = requests(6)
    drafter = drafter_of(tiny(seed=9))
    drafter.start(reqs)
    names = [request.request_id for request in reqs]
    alone = {name: drafter_of(tiny(seed=9)) for name in names}
    for name, request in zip(names, reqs, strict=True):
        alone[name].start([request])
    for pair in (names[:2], names[2:4], names[4:], names[1:3], names[:2], names[3:5]):
        for draft in drafter.propose(pair, 4):
            (wanted,) = alone[draft.request_id].propose([draft.request_id], 4)
            assert draft.tokens.tolist() == wanted.tokens.tolist()
        assert len(drafter._slots) == 2
        for name in pair:
            outcome = Outcome(request_id=name, tokens=as_tokens([7, 8]), accepted=0, drafted=4)
            drafter.commit([outcome])
            alone[name].commit([outcome])


def test_long_prompts_are_cached_in_passes_of_bounded_size():
    rng = np.random.default_rng(1)
    reqs = [
        RolloutRequest(request_id=str(i), prompt=as_tokens(rng.integers(1, VOCABULARY, 900)), params=SamplingParams())
        for i in range(4)
    ]
    drafter = drafter_of(tiny(context=1200))
    sizes, forward = [], drafter._runner.forward

    def spy(tokens, rows, keep):
        sizes.append(sum(map(len, tokens)))
        return forward(tokens, rows, keep)

    drafter._runner.forward = spy
    drafter.start(reqs)
    drafts = {draft.request_id: draft.tokens.tolist() for draft in drafter.propose([r.request_id for r in reqs], 3)}
    assert len(sizes) > 3
    assert max(sizes) <= 2048
    for request in reqs:
        alone = drafter_of(tiny(context=1200))
        alone.start([request])
        assert alone.propose([request.request_id], 3)[0].tokens.tolist() == drafts[request.request_id]


def test_a_vocabulary_that_is_not_the_policys_is_refused_with_both_sizes():  # field I2
    with pytest.raises(ModelError, match="its vocabulary has 40 tokens, the policy's 41"):
        drafter_of(tiny(), vocabulary_size=41)


def test_the_configuration_loads_a_model_from_its_directory(tmp_path):
    tiny(seed=9).save_pretrained(tmp_path)
    config = DrafterConfig(
        kind="draft_model", draft_model=DraftModelConfig(path=str(tmp_path), width=2, dtype="float64")
    )
    drafter = make_drafter(config, policy=traits("block"))
    reqs = requests()
    ours, _ = run(tiny(), reqs, drafter, acceptance="block")
    theirs, _ = run(tiny(), reqs, drafter_of(tiny(seed=9), "block", width=2), acceptance="block")
    assert said(ours) == said(theirs)
    assert drafter.width == 2
    with pytest.raises(PacelineError, match="draft_model needs a policy"):
        make_drafter(config)


def test_a_training_run_drafts_with_a_model_and_says_what_a_plain_run_says(tmp_path):  # field G8
    policy = make_policy(tmp_path / "policy")
    sides = {"none": [], "draft_model": [f"drafter.draft_model.path={policy}", "drafter.draft_model.dtype=float64"]}
    for kind, own in sides.items():
        fixed = ["policy.dtype=float64", "budget.mode=fixed", "rl.steps=2", f"drafter.kind={kind}", *own]
        records = train(tiny_config(policy, tmp_path / kind, *fixed))
    assert records[0].acceptance == 1.0  # the policy is its own drafter until it moves
    assert records[0].tokens_per_forward > 3
    assert diff_runs(tmp_path / "none", tmp_path / "draft_model").verdict == "identical"


def test_a_tensor_missing_or_of_another_shape_is_named(tmp_path):  # field G6
    tiny().save_pretrained(tmp_path)
    weights, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(weights)
    config = DrafterConfig(kind="draft_model", draft_model=DraftModelConfig(path=str(tmp_path)))
    for changed, message in (({}, "missing"), ({name: torch.zeros(3, 3)}, "mismatched")):
        save_file({k: v for k, v in tensors.items() if k != name} | changed, weights, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"drafter\.draft_model\.path=.*{message} tensor .*{name}") as error:
            make_drafter(config, policy=traits())
        assert "\n" not in str(error.value)


def test_a_path_that_leads_to_no_model_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for path, message in (
        (str(tmp_path / "nowhere"), "no such directory; give a model directory or a hub id"),
        (str(tmp_path), ".*no weights in safetensors"),
    ):
        with pytest.raises(ModelError, match=rf"drafter\.draft_model\.path={path}: {message}") as error:
            make_drafter(DrafterConfig(kind="draft_model", draft_model=DraftModelConfig(path=path)), policy=traits())
        assert "\n" not in str(error.value)


def test_without_a_path_the_configuration_is_refused():
    with pytest.raises(ValueError, match=r"draft_model\.path: '' must be a model directory"):
        DrafterConfig(kind="draft_model")


def test_a_drafter_whose_weights_are_not_numbers_drafts_nothing():
    broken = tiny()
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    reqs = requests(2)
    for acceptance in MODES:
        rollouts, stats = run(tiny(), reqs, drafter_of(copy.deepcopy(broken), acceptance), acceptance=acceptance)
        assert stats.tokens_drafted == 0
        assert said(rollouts) == said(run(tiny(), reqs)[0])


def test_acceptance_by_laws_gives_up_equal_tokens_only_where_drafts_were_drawn():
    """Under rejection point masses are verified by the keyed sample, so a difference would be a violation there."""
    for drafter, law_only in ((drafter_of(near(tiny(), 0.3), "rejection", 1), True), (PromptLookupDrafter(), False)):
        reqs = requests(4, ignore_eos=True)
        engine = HFEngine(tiny(), drafter=drafter, config=EngineConfig(acceptance="rejection"))
        rollouts = engine.generate(reqs)
        assert engine.stats().tokens_drafted > 0
        assert engine.keeps_law_only == law_only
        if not law_only:
            assert check_identity(engine, reqs, rollouts).verdict == "identical"
