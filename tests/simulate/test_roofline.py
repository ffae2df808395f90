"""Reckoned step times: by hand on a small model, experts against a draw, never less for more, and in their limits."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schema import PacelineError
from paceline.simulate.breakdown import Breakdown, Layout, Part, experts_touched
from paceline.simulate.hardware import PRESETS, Hardware
from paceline.simulate.roofline import BUCKETS, GRAPH_GAP_S, LAUNCH_GAP_S, Roofline
from paceline.sizes.shapes import load_shape, shape_of

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
    "head_dim": 16,
}
DENSE = shape_of(SMALL | {"model_type": "llama"}, "dense")
MIXTURE_SIZES = {"num_local_experts": 8, "num_experts_per_tok": 2}
MIXTURE = shape_of(SMALL | MIXTURE_SIZES | {"model_type": "mixtral"}, "mixture")
HYBRID = shape_of(
    SMALL
    | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    "hybrid",
)
GPU = Hardware(
    name="toy",
    source="made up",
    bf16_flops=1e6,
    fp8_flops=4e6,
    memory_bytes=1e6,
    memory_bytes_per_s=1e6,
    domain=4,
    link_bytes_per_s=1e6,
    network_bytes_per_s=1e5,
    link_latency_s=0.01,
    network_latency_s=0.1,
    memory_share=1.0,
    matmul_share=1.0,
    attention_share=0.5,
    link_share=1.0,
    network_share=1.0,
)
# Of a layer of the small model: q, k, v and o; the MLP with two norms.
OWN = 64 * (64 + 2 * 32) + 64 * 64
REST = 3 * 64 * 96 + 2 * 64


def parts(breakdown: Breakdown) -> dict[str, Part]:
    return {part.name: part for part in breakdown.parts}


def test_a_small_model_is_what_it_comes_to_by_hand():
    found = Roofline(DENSE, GPU, buckets=[8]).breakdown(2, 6, 20)
    assert found.padded == 8
    by_name = parts(found)
    assert by_name["projections"] == Part("projections", 2 * OWN * 2 / 1e6, 2 * 2 * OWN * 8 / 1e6)
    assert by_name["mlp"] == Part("mlp", 2 * REST * 2 / 1e6, 2 * 2 * REST * 8 / 1e6)
    assert by_name["output"] == Part("output", 6400 * 2 / 1e6, 2 * 6400 * 8 / 1e6)
    # Two layers, keys and values of 2 heads of 16 numbers: 20 tokens read, 6 written. 6 queries of 64 see 10 tokens.
    assert by_name["attention"].memory_s == pytest.approx(2 * (2 * 32 * 2) * 26 / 1e6)
    assert by_name["attention"].compute_s == pytest.approx(2 * 4 * 64 * 6 * 10 / 0.5e6)
    assert by_name["sampling"].memory_s == pytest.approx(6 * 100 * 4 * 3 / 1e6)
    assert found.kernels_s == pytest.approx(2 * 7 * GRAPH_GAP_S)
    assert found.all_reduce_s == found.all_to_all_s == found.pipeline_s == found.host_s == 0.0
    slower = sum(max(part.memory_s, part.compute_s) for part in found.parts)
    assert found.seconds == pytest.approx(slower + found.kernels_s)
    assert found.seconds == pytest.approx(sum(found.by_kind().values()))
    assert by_name["mlp"].bound == "compute"
    assert parts(Roofline(DENSE, GPU).breakdown(1, 1, 0))["sampling"].bound == "memory"


def test_precisions_change_what_is_read_and_how_fast_it_is_multiplied():
    bf16, fp8 = (parts(Roofline(DENSE, GPU, precision=p).breakdown(1, 1, 50)) for p in ("bf16", "fp8"))
    assert fp8["mlp"].memory_s == bf16["mlp"].memory_s / 2
    assert fp8["mlp"].compute_s == bf16["mlp"].compute_s / 4
    assert fp8["output"] == bf16["output"]
    mixed = Roofline(DENSE, GPU, precision="fp8", attention_precision="bf16", kv_precision="fp8")
    found = parts(mixed.breakdown(1, 1, 50))
    assert found["projections"] == bf16["projections"]
    assert found["attention"].memory_s == bf16["attention"].memory_s / 2
    assert found["attention"].compute_s == bf16["attention"].compute_s


def test_tensor_parallelism_divides_parts_and_adds_collectives():
    alone, four = (Roofline(DENSE, GPU, Layout(tensor=t), buckets=[]).breakdown(2, 4, 40) for t in (1, 4))
    for name in ("projections", "mlp", "output"):
        assert parts(four)[name].memory_s == pytest.approx(parts(alone)[name].memory_s / 4)
        assert parts(four)[name].compute_s == pytest.approx(parts(alone)[name].compute_s / 4)
    # Two heads of keys on four GPUs are there twice.
    assert parts(four)["attention"].memory_s == pytest.approx(parts(alone)["attention"].memory_s / 2)
    assert parts(four)["attention"].compute_s == pytest.approx(parts(alone)["attention"].compute_s / 4)
    reduced = 0.01 + 2 * (4 * 64 * 2) * 3 / 4 / 1e6
    gathered = 0.01 + (4 * 4 * 100) * 3 / 4 / 1e6
    assert four.all_reduce_s == pytest.approx(5 * reduced + gathered)


def test_a_pipeline_is_filled_with_micro_batches_and_sends_between_stages():
    alone = Roofline(DENSE, GPU, buckets=[]).breakdown(2, 4, 40)
    filled = Roofline(DENSE, GPU, Layout(pipeline=2), buckets=[]).breakdown(4, 8, 80)
    assert filled.parts == alone.parts
    assert filled.pipeline_s == pytest.approx(0.01 + 4 * 64 * 2 / 1e6)
    far = Roofline(DENSE, GPU, Layout(pipeline=2, tensor=4), buckets=[]).breakdown(4, 8, 80)
    assert far.pipeline_s == pytest.approx(0.1 + 4 * 64 * 2 / 4 / 1e5)


def test_uneven_stages_go_at_the_pace_of_the_longest():
    shape = shape_of(SMALL | {"model_type": "llama", "num_hidden_layers": 3}, "three layers")
    found = Roofline(shape, GPU, Layout(pipeline=2), buckets=[]).breakdown(1, 1, 0)
    assert parts(found)["mlp"].memory_s == pytest.approx(4 * REST * 2 / 1e6)


def test_copies_share_the_batch():
    two = Roofline(DENSE, GPU, Layout(data=2), buckets=[]).breakdown(4, 8, 80)
    assert two.parts == Roofline(DENSE, GPU, buckets=[]).breakdown(2, 4, 40).parts


def test_tokens_are_rounded_up_to_a_bucket_and_padding_costs():
    time = Roofline(DENSE, GPU, buckets=[4, 8])
    assert [time.breakdown(1, t, 0).padded for t in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, 9]
    assert parts(time.breakdown(1, 5, 0))["mlp"] == parts(time.breakdown(1, 8, 0))["mlp"]
    assert parts(time.breakdown(1, 5, 0))["mlp"].compute_s > parts(time.breakdown(1, 4, 0))["mlp"].compute_s
    assert time.breakdown(1, 9, 0).kernels_s == pytest.approx(2 * 7 * LAUNCH_GAP_S), "beyond the largest: no graph"
    assert Roofline(DENSE, GPU, buckets=[]).breakdown(1, 1, 0).kernels_s == pytest.approx(2 * 7 * LAUNCH_GAP_S)
    assert BUCKETS[-1] == 512
    assert len(set(BUCKETS)) == len(BUCKETS)


def test_a_window_bounds_what_its_layer_reads():
    whole, windowed = (
        parts(Roofline(DENSE, GPU, windows=windows).breakdown(2, 2, 2000))["attention"] for windows in ({}, {1: 100})
    )
    layer_bytes = 2 * 32 * 2
    assert whole.memory_s == pytest.approx(layer_bytes * 2 * (2000 + 2) / 1e6)
    assert windowed.memory_s == pytest.approx(layer_bytes * ((2000 + 2) + (200 + 2)) / 1e6)
    assert windowed.compute_s == pytest.approx(4 * 64 * 2 * (1000 + 100) / 0.5e6)


def test_linear_attention_reads_a_state_however_long_the_context():
    time = Roofline(HYBRID, GPU)
    short, long = (parts(time.breakdown(2, 6, kv)) for kv in (20, 20_000))
    state = 4 * 16 * 16
    assert short["linear attention"].memory_s == pytest.approx(4 * state * (2 + 6) / 1e6)
    assert short["linear attention"].compute_s == pytest.approx(7 * state * 6 / 0.5e6)
    assert short["linear attention"] == long["linear attention"]
    assert long["attention"].memory_s == pytest.approx(2 * 32 * 2 * (20_000 + 6) / 1e6)


@pytest.mark.parametrize(("count", "active", "tokens"), [(8, 2, 1), (8, 2, 3), (128, 8, 32), (16, 1, 40)])
def test_experts_touched_are_those_of_a_draw(count: int, active: int, tokens: int):
    draws = np.random.default_rng(5).random((2000, tokens, count)).argsort(-1)[..., :active]
    touched = np.array([len(np.unique(draw)) for draw in draws])
    error = touched.std() / math.sqrt(len(touched)) + 1e-12
    assert experts_touched(count, active, tokens) == pytest.approx(touched.mean(), abs=4 * error)


def test_experts_are_read_as_far_as_they_are_touched():
    found = Roofline(MIXTURE, GPU, buckets=[]).breakdown(3, 3, 0)
    share = 1 - (3 / 4) ** 3
    expert = 3 * 64 * 96
    assert found.experts_touched == pytest.approx(share)
    assert parts(found)["experts"].memory_s == pytest.approx(2 * 8 * share * expert * 2 / 1e6)
    assert parts(found)["experts"].compute_s == pytest.approx(2 * 2 * expert * 2 * 3 / 1e6)


def test_a_mixture_whose_tokens_take_all_experts_costs_what_as_wide_a_dense_model_does():
    wide = shape_of(SMALL | {"model_type": "llama", "intermediate_size": 8 * 96}, "wide")
    everything = shape_of(SMALL | MIXTURE_SIZES | {"num_experts_per_tok": 8, "model_type": "mixtral"}, "all experts")
    for rows, tokens in ((1, 1), (3, 12)):
        dense, mixed = (Roofline(shape, GPU).breakdown(rows, tokens, 30) for shape in (wide, everything))
        router, norms = 8 * 64, 2 * 64
        assert mixed.experts_touched == 1.0
        for field, each in (("memory_s", 2 / 1e6), ("compute_s", 2 * mixed.padded / 1e6)):
            of_experts = getattr(parts(mixed)["experts"], field)
            assert of_experts == pytest.approx(getattr(parts(dense)["mlp"], field) - 2 * norms * each)
            assert getattr(parts(mixed)["mlp"], field) == pytest.approx(2 * (router + norms) * each)


def test_experts_within_tensor_parallelism_need_no_exchange_and_imbalance_is_the_busiest_gpus():
    cut, spread = (Roofline(MIXTURE, GPU, Layout(tensor=4, expert=e), buckets=[]).breakdown(3, 3, 0) for e in (1, 4))
    assert parts(cut)["experts"] == parts(spread)["experts"]
    assert cut.all_to_all_s == spread.all_to_all_s == 0.0
    uneven = Roofline(MIXTURE, GPU, Layout(tensor=4, expert=4), buckets=[], imbalance=2.0).breakdown(3, 3, 0)
    assert parts(uneven)["experts"].compute_s == pytest.approx(2 * parts(spread)["experts"].compute_s)
    assert uneven.experts_touched == pytest.approx(1 - (3 / 4) ** 6)
    whole = Roofline(MIXTURE, GPU, Layout(tensor=4), buckets=[], imbalance=2.0).breakdown(3, 3, 0)
    assert whole.parts == cut.parts, "experts that are cut have no busiest GPU"


def test_experts_over_copies_meet_all_their_tokens_and_are_sent_them():
    found = Roofline(MIXTURE, GPU, Layout(data=4, expert=4), precision="fp8", buckets=[]).breakdown(8, 8, 0)
    share = 1 - (3 / 4) ** 8
    assert found.experts_touched == pytest.approx(share)
    expert = 3 * 64 * 96
    assert parts(found)["experts"].memory_s == pytest.approx(2 * 2 * share * expert / 1e6)
    assert parts(found)["experts"].compute_s == pytest.approx(2 * 2 * expert * 2 * 8 / 4 / 4e6)
    # A token takes 2 experts on 4 GPUs: on 4 (1 - (3/4)^2) of them. A copy has 2 tokens of 64 numbers.
    numbers = 2 * 4 * (1 - (3 / 4) ** 2) * 64
    assert found.all_to_all_s == pytest.approx(2 * (2 * 0.01 + numbers * 3 / 4 * (1 + 2) / 1e6))
    assert found.all_reduce_s == 0.0


def test_experts_over_copies_replace_their_layers_sum_by_an_exchange_and_a_gather():
    found = Roofline(MIXTURE, GPU, Layout(tensor=2, data=2, expert=4), buckets=[]).breakdown(4, 4, 0)
    # A copy of two GPUs has 2 tokens: attention's sums and the embeddings', then logits.
    whole = 2 * 64 * 2
    assert found.all_reduce_s == pytest.approx(3 * (0.01 + 2 * whole / 2 / 1e6) + 0.01 + 2 * 100 * 4 / 2 / 1e6)
    numbers = 4 * (1 - (3 / 4) ** 2) * 64
    there_and_back = 2 * (0.01 + numbers * 2 * 3 / 4 / 1e6)
    assert found.all_to_all_s == pytest.approx(2 * (there_and_back + 0.01 + whole / 2 / 1e6))


@given(
    rows=st.integers(1, 300),
    drafted=st.integers(0, 7),
    more_drafted=st.integers(0, 8),
    context=st.integers(0, 20_000),
    more_context=st.integers(0, 20_000),
    name=st.sampled_from(["qwen3-8b", "qwen3-30b-a3b", "qwen3.5-122b-a10b"]),
    layout=st.sampled_from([Layout(), Layout(tensor=2), Layout(tensor=2, data=2, expert=4), Layout(pipeline=4)]),
)
@settings(max_examples=60, deadline=None)
def test_more_drafts_and_longer_contexts_never_take_less(
    rows: int, drafted: int, more_drafted: int, context: int, more_context: int, name: str, layout: Layout
):
    if name == "qwen3-8b":
        layout = msgspec.structs.replace(layout, expert=1)
    time = Roofline(load_shape(name), PRESETS["h200"], layout, precision="fp8")
    base = time.seconds(rows, rows * (1 + drafted), rows * context)
    assert 0 < base < math.inf
    for again in (context, context + more_context):
        whole = time.breakdown(rows, rows * (1 + drafted), rows * again).seconds
        assert time.seconds(rows, rows * (1 + drafted), rows * again) == pytest.approx(whole)
    assert time.seconds(rows, rows * (1 + drafted + more_drafted), rows * context) >= base
    assert time.seconds(rows, rows * (1 + drafted), rows * (context + more_context)) >= base * (1 - 1e-12)


@given(st.integers(1, 600), st.integers(1, 600))
@settings(max_examples=60, deadline=None)
def test_more_requests_never_take_less_and_never_more_than_a_pass_each(rows: int, more: int):
    time = Roofline(load_shape("qwen3-30b-a3b"), PRESETS["h100"], buckets=[])
    few, both = (time.seconds(count, count, count * 3000) for count in (rows, rows + more))
    assert few <= both <= few + time.seconds(more, more, more * 3000)


def test_the_host_s_time_is_added_to_each_pass():
    assert Roofline(DENSE, GPU, host_s=0.5).seconds(1, 1, 0) == pytest.approx(
        Roofline(DENSE, GPU).seconds(1, 1, 0) + 0.5
    )


def test_memory_holds_weights_then_caches():
    time = Roofline(DENSE, GPU)
    weights = 2 * (2 * (OWN + REST) + 2 * 6400)
    row = 2 * (2 * 32 * 2) * 100
    assert time.weight_bytes() == weights
    assert time.row_bytes(100) == row
    assert time.most_rows(100) == int((0.9e6 - weights) // row)
    assert time.most_rows(100, share=0.5, other_bytes=1e5) == int((0.5e6 - 1e5 - weights) // row)
    tied = shape_of(SMALL | {"model_type": "llama", "tie_word_embeddings": True}, "tied")
    assert Roofline(tied, GPU).weight_bytes() == weights - 2 * 6400
    assert Roofline(DENSE, GPU, Layout(pipeline=2)).weight_bytes() == weights / 2, "the ends have a matrix each"
    assert Roofline(DENSE, GPU, Layout(pipeline=2)).row_bytes(100) == row / 2
    assert Roofline(DENSE, GPU, Layout(data=3)).most_rows(100) == 3 * time.most_rows(100)
    assert Roofline(DENSE, GPU, windows={0: 10}).row_bytes(100) == row / 2 + row / 20
    assert Roofline(HYBRID, GPU).row_bytes(100) == 2 * 32 * 2 * 100 + 4 * 4 * 16 * 16


def test_published_sizes_of_weights_come_out():
    # What Qwen3-235B-A22B's FP8 checkpoint and Llama-3.1-8B's BF16 one weigh.
    whole = Roofline(load_shape("qwen3-235b-a22b"), PRESETS["gb200"], precision="fp8").weight_bytes()
    assert whole == pytest.approx(236e9, rel=0.01)
    assert Roofline(load_shape("llama-3.1-8b"), PRESETS["h100"]).weight_bytes() == pytest.approx(16.06e9, rel=0.001)


def test_weights_that_do_not_fit_are_refused():
    time = Roofline(load_shape("qwen3-235b-a22b"), PRESETS["h100"], Layout(tensor=2), precision="fp8")
    with pytest.raises(PacelineError, match=r"118\.\d GB of weights a GPU do not fit into 0\.9 of 80 GB less 0") as no:
        time.most_rows(1000)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        (Layout(tensor=0), {}, "each axis is 1 or more"),
        (Layout(tensor=3), {}, "tensor 3 does not divide 4 heads"),
        (Layout(pipeline=3), {}, "pipeline 3 is more than 2 layers"),
        (Layout(data=3, expert=3), {}, "expert 3 does not divide 8 experts"),
        (Layout(expert=2), {}, "expert 2 is more than tensor x data"),
        (Layout(), {"imbalance": 0.5}, "imbalance 0.5: is 1 or more"),
        (Layout(), {"host_s": -1.0}, "host_s -1.0: is 0 or more"),
        (Layout(), {"buckets": [0, 4]}, "each is 1 or more"),
        (Layout(), {"windows": {2: 10}}, "of layers of the model"),
    ],
)
def test_what_does_not_divide_is_refused_in_one_line(layout: Layout, settings: dict, message: str):
    with pytest.raises(PacelineError, match=message) as refusal:
        Roofline(MIXTURE, GPU, layout, **settings)
    assert "\n" not in str(refusal.value)


def test_refusals_reach_dense_models_hardware_and_passes():
    with pytest.raises(PacelineError, match="expert 2 does not divide 1 experts"):
        Roofline(DENSE, GPU, Layout(tensor=2, expert=2))
    six = shape_of(SMALL | MIXTURE_SIZES | {"num_local_experts": 6, "model_type": "mixtral"}, "six experts")
    with pytest.raises(PacelineError, match="expert 6 and tensor 4: one is a multiple of the other"):
        Roofline(six, GPU, Layout(tensor=4, data=2, expert=6))
    with pytest.raises(PacelineError, match="a100: no matrix products in fp8"):
        Roofline(DENSE, PRESETS["a100"], precision="fp8")
    with pytest.raises(PacelineError, match="a100: no matrix products in fp8"):
        Roofline(DENSE, PRESETS["a100"], attention_precision="fp8")
    with pytest.raises(PacelineError, match=r"needs tokens >= requests >= 1"):
        Roofline(DENSE, GPU).seconds(2, 1, 0)


def test_it_says_that_it_is_reckoned_and_of_what():
    time = Roofline(load_shape("qwen3-8b"), PRESETS["h200"], Layout(tensor=2), precision="fp8")
    assert time.mode == "analytic"
    assert time.source == "roofline of qwen3-8b on h200, tensor 2, fp8"
