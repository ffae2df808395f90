"""A policy's own attention over the ring against the whole policy on each document alone, by simulated ranks."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.cotrain.parallel import rows
from paceline.cotrain.parallel.layout import Layout, Piece
from paceline.cotrain.parallel.transport import simulate
from sharded_cases import _rms_norm
from tiny_policies import VOCABULARY, tiny_config

LAYERS = ["full_attention", "sliding_attention", "full_attention"]
#: Kinds of policies, all of whose layers look back over everything, or over a window, or some over this and some that.
KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": {},
    "qwen3 with windows": {"use_sliding_window": True, "sliding_window": 3, "layer_types": LAYERS},
}
WORLDS = (1, 2, 4)
BARS = {torch.float64: 1e-12, torch.float32: 1e-5}
LENGTHS = (1, 13, 2, 7, 1)


def policy_of(kind, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(tiny_config(kind.split()[0], **KINDS[kind]), dtype=dtype)
    for module in policy.modules():
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
    return policy


@pytest.fixture(scope="module")
def policies():
    """Of each kind and type the whole policy, and one for every rank, made before threads share torch's generator."""
    return {(kind, dtype): [policy_of(kind, dtype) for _ in range(1 + max(WORLDS))] for kind in KINDS for dtype in BARS}


def texts_of(lengths, width, dtype):
    """The documents' tokens, and the weight in the loss of what comes out of each row."""
    draw = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=draw)
    return ids, torch.randn((len(ids), width), generator=draw, dtype=torch.float64).to(dtype)


def played(policy, ids, weight_NH, **kwargs):
    """The final states of rows, and the gradient of every weight, 0 where there is none."""
    policy.zero_grad()
    out_LH = policy.get_decoder()(input_ids=ids[None], use_cache=False, **kwargs).last_hidden_state[0]
    (out_LH[: len(weight_NH)] * weight_NH).sum().backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in policy.named_parameters()
    }
    return out_LH[: len(weight_NH)].detach(), gradients


def of_ranks(policies, lengths, world, padding=1):
    """The states in packed order, and the sum of the ranks' gradients."""
    ids, weight_TH = texts_of(lengths, policies[0].config.hidden_size, policies[0].dtype)
    layout = Layout(lengths, world)

    def play(transport):
        policy = policies[transport.rank]
        policy.config._attn_implementation = policy.get_decoder().config._attn_implementation = rows.NAME
        own_N, position_N = (torch.from_numpy(of(transport.rank)) for of in (layout.rows, layout.positions))
        ids_L, position_L = (torch.nn.functional.pad(side, (0, padding)) for side in (ids[own_N], position_N))
        ring = rows.RingRows(layout, transport)
        return played(policy, ids_L, weight_TH[own_N], position_ids=position_L[None], paceline=ring)

    parts = simulate(world, play)
    states_TH = torch.cat([states for states, _ in parts])[torch.from_numpy(layout.inverse)]
    return states_TH, {name: sum(gradients[name] for _, gradients in parts) for name in parts[0][1]}


def alone(policy, lengths):
    """The same by the whole policy and its own attention, one document after the other."""
    ids, weight_TH = texts_of(lengths, policy.config.hidden_size, policy.dtype)
    sides = (side.split(list(lengths)) for side in (ids, weight_TH))
    documents = [played(policy, *each) for each in zip(*sides, strict=True)]
    names = documents[0][1]
    states_TH = torch.cat([states for states, _ in documents])
    return states_TH, {name: sum(gradients[name] for _, gradients in documents) for name in names}


def furthest(found, wanted):
    """The largest difference of states and of gradients, of each tensor by its size if that is above 1."""
    (states, gradients), (wanted_states, wanted_gradients) = found, wanted
    assert gradients.keys() == wanted_gradients.keys()
    pairs = [(states, wanted_states), *((gradients[name], grad) for name, grad in wanted_gradients.items())]
    return max(float((own - other).abs().max() / other.abs().max().clamp_min(1)) for own, other in pairs)


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_are_the_whole_policy(policies, kind, dtype):
    whole, *ranks = policies[kind, dtype]
    wanted = alone(whole, LENGTHS)
    for world in WORLDS:
        assert furthest(of_ranks(ranks, LENGTHS, world), wanted) < BARS[dtype]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.one_of(st.just(1), st.integers(1, 24)), min_size=1, max_size=4),
    st.sampled_from(list(KINDS)),
    st.sampled_from(WORLDS),
    st.integers(1, 3),
)
def test_any_packed_documents_are_those_of_the_whole_policy(policies, lengths, kind, world, padding):
    whole, *ranks = policies[kind, torch.float64]
    assert furthest(of_ranks(ranks, lengths, world, padding), alone(whole, lengths)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_of_four_ranks_one_has_the_only_row_and_of_no_document_none_learns(policies, kind):
    whole, *ranks = policies[kind, torch.float64]
    assert furthest(of_ranks(ranks, [1], 4), alone(whole, [1])) < 1e-12
    states_TH, gradients = of_ranks(ranks, [], 4)
    assert len(states_TH) == 0
    assert not any(gradient.any() for gradient in gradients.values())


def attended(layout, sides, transport, **options):
    """One call of the attention, whose options are what a model gives."""
    options = {"attention_mask": None, "scaling": 0.3} | options
    return rows.attend(torch.nn.Identity(), *sides, paceline=rows.RingRows(layout, transport), **options)[0]


def test_a_pass_without_any_document_sends_nothing():
    sides = [torch.zeros((1, 2, 1, 8))] * 3

    def play(transport):
        assert not attended(Layout([], 2), sides, transport).any()
        return transport.traffic.messages.total()

    assert simulate(2, play) == [0, 0]


@pytest.mark.parametrize("scaling", [0.2, 0.7])
def test_scores_are_scaled_as_the_model_says(scaling):
    query, key, value = sides = torch.randn((3, 1, 2, 5, 8), generator=torch.Generator().manual_seed(1))
    out_1LHD = simulate(1, lambda transport: attended(Layout([5], 1), sides, transport, scaling=scaling))[0]
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    torch.testing.assert_close(out_1LHD, wanted.transpose(1, 2))


def a_wider_window(plan):
    return lambda queries, keys, capacity, window: plan(queries, keys, capacity, window + 1)


def no_window(plan):
    return lambda queries, keys, capacity, window: plan(queries, keys, capacity, None)


def one_document(plan):
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()

    def of(pieces):
        return [Piece(0, starts[piece.document] + piece.first, piece.count, piece.at) for piece in pieces]

    return lambda queries, keys, *more: plan(of(queries), [of(own) for own in keys], *more)


@pytest.mark.parametrize("fault", [a_wider_window, no_window, one_document])
def test_the_comparison_sees(policies, monkeypatch, fault):
    whole, *ranks = policies["mistral", torch.float64]
    wanted = alone(whole, LENGTHS)
    assert furthest(of_ranks(ranks, LENGTHS, 2), wanted) < 1e-12
    monkeypatch.setattr(rows, "RingPlan", fault(rows.RingPlan))
    assert furthest(of_ranks(ranks, LENGTHS, 2), wanted) > 1e-2


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"softcap": 30.0}, r"\['softcap'\]"),
        ({"s_aux": torch.zeros(4)}, r"\['s_aux'\]"),
        ({"dropout": 0.1}, "a mask or dropout"),
        ({"attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, "a mask or dropout"),
    ],
    ids=str,
)
def test_an_option_of_a_models_attention_that_is_not_honoured_is_refused(option, says):
    sides = [torch.zeros((1, 2, 3, 8))] * 3
    unused = {"sliding_window": None, "softcap": None, "s_aux": None}

    with pytest.raises(NotImplementedError, match=says):
        simulate(1, lambda transport: attended(Layout([3], 1), sides, transport, **unused | option))
    assert simulate(1, lambda transport: attended(Layout([3], 1), sides, transport, **unused))[0].shape == (1, 3, 2, 8)
