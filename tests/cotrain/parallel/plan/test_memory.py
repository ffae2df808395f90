"""What ranks hold and send is what the layout, the schedule and the loss of co-training make of it, and adds up."""

import msgspec
import pytest

from paceline.cotrain.parallel.layout import Layout as Packed
from paceline.cotrain.parallel.plan.activations import layer_gradient_bytes, layer_saved_bytes, norm_saved_bytes
from paceline.cotrain.parallel.plan.drafter import drafter_for
from paceline.cotrain.parallel.plan.layouts import Job, Layout, layouts, microbatches, objection, rank_tokens
from paceline.cotrain.parallel.plan.memory import (
    rank_memory,
    stage_parameters,
    teacher_logits_bytes,
    trunk_bytes,
)
from paceline.cotrain.parallel.plan.taps import states_sent, tap_slots
from paceline.cotrain.parallel.plan.timing import Hardware, stage_flops, step_times
from paceline.cotrain.parallel.plan.traffic import rank_traffic, ring_backward_bytes, ring_forward_bytes
from paceline.cotrain.parallel.slots import SCHEDULES, free_running, minimum, order_of
from paceline.schema import PacelineError
from paceline.sizes.shapes import load_shape

GIB = 1 << 30
CONTEXT = 262144


def job(model: str, *, kind: str = "eagle3", gpus: int = 256, batch: int = 64, **options: object) -> Job:
    shape = load_shape(model)
    return Job(shape=shape, drafter=drafter_for(shape, kind), context=CONTEXT, batch=batch, gpus=gpus, **options)


def ranks(
    data: int = 1, context: int = 1, tensor: int = 1, pipeline: int = 1, expert: int = 1, schedule: str = "1F1B"
) -> Layout:
    each = 1 if schedule in ("GPipe", "1F1B") else 2
    return Layout(
        data=data,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        schedule=schedule,
        stages_per_rank=each,
    )


def test_at_256k_the_trunk_is_a_gibibyte_a_layer_and_the_teachers_logits_would_be_74() -> None:
    shape = load_shape("qwen3-8b")
    assert (shape.kv_heads, shape.head_dim, shape.hidden) == (8, 128, 4096)
    assert trunk_bytes(CONTEXT, shape.kv, 2) == GIB
    assert int(teacher_logits_bytes(CONTEXT, shape.vocabulary, 2) / GIB) == 74


@pytest.mark.parametrize("world", [1, 2, 4, 64])
def test_the_ring_sends_what_its_closed_forms_say(world: int) -> None:
    tokens, heads, dim, b, accumulated = CONTEXT, 8, 128, 2, 4
    kv, share = heads * dim, tokens // world
    forward = (world - 1) * 2 * (tokens // world) * heads * dim * b
    assert ring_forward_bytes(world, share, kv, b) == forward
    backward = forward + world * 2 * (tokens // world) * heads * dim * accumulated
    assert ring_backward_bytes(world, share, kv, b) == (backward if world > 1 else 0)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [16, 17, 4099])
def test_a_rank_has_the_tokens_that_the_packed_layout_gives_it(world: int, tokens: int) -> None:
    own = msgspec.structs.replace(job("qwen3-8b"), context=tokens)
    assert rank_tokens(own, ranks(context=world)) == Packed([tokens], world).capacity


@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "qwen3.5-122b-a10b", "llama-3.1-8b"])
@pytest.mark.parametrize("pipeline", [1, 3, 8])
def test_stages_hold_all_parameters_between_them(model: str, pipeline: int) -> None:
    own = job(model)
    parts = [stage_parameters(own, ranks(pipeline=pipeline), stage) for stage in range(pipeline)]
    assert sum(map(sum, parts)) == own.shape.parameters()


def test_embeddings_that_are_tied_lie_on_both_ends_of_a_pipeline() -> None:
    own = job("qwen3-8b")
    own = msgspec.structs.replace(own, shape=msgspec.structs.replace(own.shape, tied=True))
    whole = own.shape.parameters()
    assert sum(stage_parameters(own, ranks(), 0)) == whole
    halves = [sum(stage_parameters(own, ranks(pipeline=2), stage)) for stage in range(2)]
    assert sum(halves) == whole + own.shape.matrix


def test_training_takes_sixteen_bytes_a_weight_over_all_ranks() -> None:
    own, layout = job("llama-3.1-8b", gpus=8), ranks(data=2, context=2, tensor=2)
    memory = rank_memory(own, layout, 0)
    each = memory["weights"] + memory["gradients"] + memory["optimiser"]
    assert each == -(-own.shape.parameters() // 8) * 16


def test_context_ranks_divide_what_grows_with_tokens_and_the_ring_takes_two_layers_share() -> None:
    own = job("qwen3-8b", gpus=8)
    one, eight = (rank_memory(own, ranks(context=world), 0) for world in (1, 8))
    for kind in ("activations", "trunk K/V", "branch K/V", "taps"):
        assert one[kind] == 8 * eight[kind] > 0
    assert one["ring buffers"] == 0
    assert eight["ring buffers"] == 2 * (GIB // 8) * (2 + 4) // 2


def test_checkpointing_leaves_inputs_and_one_layer() -> None:
    own = job("llama-3.1-8b", gpus=8)
    plain = msgspec.structs.replace(own, checkpoint=False)
    layout = ranks(context=8)
    kept, whole = (rank_memory(each, layout, 0)["activations"] for each in (own, plain))
    inputs = 32 * (CONTEXT // 8) * 4096 * 2
    # All layers are alike, so 31 of them are what is not kept.
    layer = (whole - kept + inputs) // 31
    assert whole - kept == 31 * layer - inputs
    assert kept < whole / 5


def test_a_stage_holds_micro_batches_of_all_stages_behind_it() -> None:
    own = job("qwen3-8b", batch=64)
    layout = ranks(pipeline=4)
    inputs = 9 * CONTEXT * 4096 * 2
    first, second = (rank_memory(own, layout, stage)["activations"] for stage in (0, 1))
    assert first - second == inputs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_are_those_of_the_micro_batches_that_the_schedule_holds_at_once(schedule: str) -> None:
    """Counted by the lives of micro-batches in the schedule's list, stage by stage, without and with checkpoints."""
    own, layout = job("qwen3-8b", batch=8), ranks(context=8, pipeline=4, schedule=schedule)
    tokens, count = CONTEXT // 8, 36 // layout.stages + 1
    layers = [count if stage < 36 % layout.stages else 36 // layout.stages for stage in range(layout.stages)]
    each, input_ = layer_saved_bytes(own.shape, 0, tokens, 2), tokens * 4096 * 2
    gradients = layer_gradient_bytes(own.shape, 0, tokens, 2)
    end = tokens * (norm_saved_bytes(own.shape, 2) + 4 * 4096)
    is_split = schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    plain = msgspec.structs.replace(own, checkpoint=False)
    for rank, steps in enumerate(order_of(schedule, 4, layout.stages, 8).steps_R):
        whole, kept = [0], [0]
        for stage, kind, _ in steps:
            last = end if stage == layout.stages - 1 else 0
            more = layers[stage] * gradients if stage else 0
            sign = {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
            parted = {"I": more, "W": -more}.get(kind, 0)
            whole.append(whole[-1] + sign * (layers[stage] * each + last) + parted)
            kept.append(kept[-1] + sign * (layers[stage] * input_ + last))
        assert whole[-1] == kept[-1] == 0
        assert rank_memory(plain, layout, rank)["activations"] == max(whole)
        assert rank_memory(own, layout, rank)["activations"] == (max(whole) if is_split else max(kept) + each)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_drafter_is_on_the_rank_of_the_last_stage_alone(schedule: str) -> None:
    own, layout = job("qwen3-235b-a22b"), ranks(context=8, pipeline=4, schedule=schedule)
    kinds = ("drafter", "drafter activations", "trunk K/V", "branch K/V", "taps", "teacher", "tap rings")
    home = 0 if schedule in ("ZBVZeroBubble", "DualPipeV") else 3
    for rank in range(4):
        memory = rank_memory(own, layout, rank)
        assert all((memory[kind] > 0) is (rank == home) for kind in kinds)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tap_rings_have_the_slots_that_a_channel_of_the_schedule_makes(schedule: str) -> None:
    own, layout = job("qwen3-235b-a22b"), ranks(context=8, pipeline=4, schedule=schedule)
    sent = states_sent(own, layout)
    order = order_of(schedule, 4, layout.stages, 64)
    slots = free_running(order, tuple(sent))
    home = order.rank_of[layout.stages - 1]
    state = CONTEXT // 8 * 4096 * 2
    assert rank_memory(own, layout, home)["tap rings"] == state * sum(slots[stage] * sent[stage] for stage in sent)
    planned = tap_slots(own, layout, step_times(own, layout, Hardware()))
    assert planned.recommended == slots
    assert planned.minimum == minimum(order, tuple(sent))


def test_in_a_v_neighbours_on_one_rank_and_taps_of_the_drafters_own_rank_send_nothing() -> None:
    own, state = job("qwen3-235b-a22b"), CONTEXT // 8 * 4096 * 2
    folded, looped = (ranks(context=8, pipeline=4, schedule=name) for name in ("ZBVZeroBubble", "Interleaved1F1B"))
    sent = [rank_traffic(own, folded, rank)["pipeline"] for rank in range(4)]
    # Stages 0 to 7 lie on ranks 0 1 2 3 3 2 1 0: rank 3 hands nothing from its one to its other.
    assert sent == [64 * edges * state for edges in (2, 4, 4, 2)]
    assert [rank_traffic(own, looped, rank)["pipeline"] for rank in range(4)] == [
        64 * edges * state for edges in (3, 4, 4, 3)
    ]
    # Taps on layers 1, 46 and 90 of 94, and embeddings: stages 0 (twice), 3 and 7 of eight.
    assert states_sent(own, folded) == {0: 2, 3: 1}
    assert [rank_traffic(own, folded, rank)["tap transfers"] for rank in range(4)] == [0, 0, 0, 64 * state]
    assert [rank_traffic(own, looped, rank)["tap transfers"] for rank in range(4)] == [128 * state, 0, 0, 0]


def test_tied_embeddings_that_meet_on_one_rank_are_one() -> None:
    own = job("qwen3-8b")
    own = msgspec.structs.replace(own, shape=msgspec.structs.replace(own.shape, tied=True))
    for schedule, copies in (("DualPipeV", 0), ("LoopedBFS", 1)):
        layout = ranks(pipeline=2, schedule=schedule)
        parts = [sum(stage_parameters(own, layout, stage)) for stage in range(4)]
        assert sum(parts) == own.shape.parameters() + copies * own.shape.matrix


def test_tap_rings_have_the_slots_of_the_schedule_for_what_each_stage_sends() -> None:
    own, layout = job("qwen3-235b-a22b"), ranks(context=8, pipeline=4)
    # Taps on layers 1, 46 and 90 of 94, in stages of 24, 24, 23 and 23: the last is made where it is used.
    assert own.drafter.taps == (1, 46, 90)
    assert states_sent(own, layout) == {0: 2, 1: 1}
    slots = tap_slots(own, layout, step_times(own, layout, Hardware()))
    assert (slots.minimum, slots.recommended) == ({0: 1, 1: 1}, {0: 3, 1: 2})
    assert slots.stalls_at_minimum > 0
    # Eight stages wait for each other.
    eight = ranks(context=8, pipeline=8)
    deep = tap_slots(own, eight, step_times(own, eight, Hardware()))
    assert deep.minimum == {0: 1, 3: 1}
    assert deep.recommended == {0: 7, 3: 4}
    assert deep.longer_at_minimum > slots.longer_at_minimum == deep.longer_at_recommended == 0
    state = CONTEXT // 8 * 4096 * 2
    assert rank_memory(own, layout, 3)["tap rings"] == (3 * 2 + 2 * 1) * state
    count = microbatches(own, layout)
    assert [rank_traffic(own, layout, stage)["tap transfers"] for stage in range(4)] == [
        count * 2 * state,
        count * state,
        0,
        0,
    ]


def test_one_stage_sends_nothing_along_a_pipeline() -> None:
    own, layout = job("qwen3-8b", gpus=1), ranks()
    assert set(rank_traffic(own, layout, 0).values()) == {0}
    assert rank_memory(own, layout, 0)["tap rings"] == 0
    assert tap_slots(own, layout, step_times(own, layout, Hardware())).recommended == {}


def test_a_step_sends_each_kind_as_often_as_it_is_used() -> None:
    own, layout = job("qwen3-8b", gpus=8, batch=8), ranks(data=2, context=4)
    sent, count, share = rank_traffic(own, layout, 0), 4, CONTEXT // 4
    ring = (2 * ring_forward_bytes(4, share, 1024, 2) + ring_backward_bytes(4, share, 1024, 2)) * 36
    assert sent["policy ring"] == count * ring
    drafter = ring_forward_bytes(4, share, 1024, 2) + ring_backward_bytes(4, share, 1024, 2)
    assert sent["drafter ring"] == count * 3 * drafter
    weights = own.shape.parameters() * 2 * 7 // 8 + own.drafter.parameters() * 2 * 7 // 8
    assert sent["FSDP gathers"] == count * 2 * weights
    assert sent["FSDP reductions"] == count * 2 * weights
    assert sent["experts"] == sent["tensor"] == sent["pipeline"] == 0


def test_linear_attention_has_no_ring() -> None:
    own, layout = job("qwen3.5-122b-a10b"), ranks(context=8)
    each = 2 * ring_forward_bytes(8, CONTEXT // 8, 512, 2) + ring_backward_bytes(8, CONTEXT // 8, 512, 2)
    assert rank_traffic(own, layout, 0)["policy ring"] == 64 * 12 * each


def test_experts_are_gathered_by_those_that_share_them_and_tokens_go_where_they_are() -> None:
    own = job("qwen3-30b-a3b", gpus=8)
    apart, together = (rank_traffic(own, ranks(context=8, expert=expert), 0) for expert in (8, 1))
    assert together["experts"] == 0
    assert apart["FSDP gathers"] < together["FSDP gathers"] / 4
    states = CONTEXT // 8 * 2048 * 2
    assert apart["experts"] == 64 * 2 * 3 * (48 * 8 * states * 7 // 8)
    held = [rank_memory(own, ranks(context=8, expert=expert), 0)["gathered"] for expert in (8, 1)]
    assert held[0] < held[1]


def test_flops_of_a_short_context_are_six_a_weight_and_token() -> None:
    own = msgspec.structs.replace(job("llama-3.1-8b"), context=128, checkpoint=False)
    flops = stage_flops(own, ranks(), 0)
    each = 2 * 128 * (own.shape.parameters() - own.shape.matrix)
    drafter = 128 * (6 * 3 * own.drafter.parameters() + 2 * own.shape.matrix)
    assert [flops[kind] for kind in "FIW"] == pytest.approx([each + drafter, each, each], rel=0.01)


def test_a_block_head_scores_its_rows_with_the_policys_matrix() -> None:
    own = msgspec.structs.replace(job("llama-3.1-8b", kind="dflash"), context=128)
    flops, matrix = stage_flops(own, ranks(), 0), own.shape.matrix
    trained = 6 * (own.drafter.parameters() + matrix) * own.drafter.rows(128)
    assert flops["F"] - flops["W"] == pytest.approx(trained + 2 * matrix * 128, rel=0.01)


def test_a_backward_in_two_parts_takes_as_long_together_and_the_first_stage_has_the_second_alone() -> None:
    own, layout = job("qwen3-8b"), ranks(data=2, context=8, pipeline=4, schedule="ZBVZeroBubble")
    times = step_times(own, layout, Hardware())
    assert set(times) == {(stage, kind) for stage in range(8) for kind in "FBIW"}
    for stage in range(8):
        assert times[stage, "B"] == pytest.approx(times[stage, "I"] + times[stage, "W"])
        assert (times[stage, "I"] > 0) is (stage > 0)
    # Attention's backward is by the input alone, and nothing is run again.
    flops = stage_flops(own, layout, 1)
    assert flops["I"] - flops["W"] == pytest.approx(2.5 * (flops["F"] - flops["W"]))
    kept = stage_flops(own, ranks(data=2, context=8, pipeline=8), 1)
    assert kept["I"] - kept["W"] == pytest.approx(2.5 * (kept["F"] - kept["W"]) + kept["F"])


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (ranks(data=8), "data x context x tensor x pipeline = 8, and there are 256 GPUs"),
        (ranks(data=32, tensor=8), "tensor=8 does not divide 4 KV heads"),
        (ranks(data=2, pipeline=128), "pipeline=128 stages for 94 layers"),
        (ranks(context=256, expert=3), r"expert=3 does not divide 128 expert\(s\)"),
        (ranks(data=2, context=32, pipeline=4, expert=128), "expert=128 does not divide data x context = 64"),
        (ranks(data=128, tensor=2), "data=128 does not divide a batch of 64 sequences"),
    ],
)
def test_an_impossible_layout_is_refused_with_its_reason(layout: Layout, reason: str) -> None:
    own = job("qwen3-235b-a22b")
    assert objection(own, layout) is not None
    with pytest.raises(PacelineError, match=reason):
        layouts(own, msgspec.structs.asdict(layout))


def test_every_layout_that_is_found_is_possible_and_none_is_left_out() -> None:
    own = job("qwen3-30b-a3b", gpus=8, batch=4)
    powers = [1, 2, 4, 8]
    experts = [2**n for n in range(8)]
    every = [
        ranks(data=d, context=c, tensor=t, pipeline=p, expert=e)
        for d in powers
        for c in powers
        for t in powers
        for p in powers
        for e in experts
    ]
    found = layouts(own, {})
    assert len(found) == len({msgspec.structs.astuple(layout) for layout in found})
    assert {msgspec.structs.astuple(layout) for layout in found} == {
        msgspec.structs.astuple(layout) for layout in every if objection(own, layout) is None
    }


def test_two_layers_are_gathered_at_a_time_and_what_is_outside_of_layers_throughout() -> None:
    own = job("llama-3.1-8b", gpus=8)
    shape, layout = own.shape, ranks(data=4, tensor=2)
    layer, ends = shape.dense_parameters(0), 2 * shape.matrix + shape.hidden
    assert rank_memory(own, layout, 0)["gathered"] == (3 * (layer // 2) + 2 * (ends // 2)) * 2
    middle = ranks(data=2, pipeline=4)
    assert rank_memory(own, middle, 1)["gathered"] == 3 * layer * 2


def test_the_drafter_is_sharded_over_context_ranks_and_whole_on_tensor_ranks() -> None:
    own = job("llama-3.1-8b", gpus=8)
    parameters = own.drafter.parameters()
    for layout in (ranks(context=4), ranks(data=2, context=2), ranks(data=2, context=2, tensor=2)):
        assert rank_memory(own, layout, 0)["drafter"] == -(-parameters // 4) * 16 + parameters * 4


@pytest.mark.parametrize(("is_checkpointed", "exchanges"), [(True, 12), (False, 8)])
def test_tensor_ranks_exchange_their_states_around_attention_and_mlp(is_checkpointed: bool, exchanges: int) -> None:
    own = job("llama-3.1-8b", gpus=8, batch=3, checkpoint=is_checkpointed)
    states = CONTEXT // 2 * 4096 * 2
    sent = rank_traffic(own, ranks(context=2, tensor=4), 0)
    assert sent["tensor"] == 3 * 32 * exchanges * (states * 3 // 4)


def test_stages_hand_states_on_and_gradients_back() -> None:
    own, layout = job("llama-3.1-8b", batch=8), ranks(pipeline=4, tensor=2)
    states = CONTEXT * 4096 * 2 // 2
    assert [rank_traffic(own, layout, s)["pipeline"] for s in range(4)] == [8 * n * states for n in (1, 2, 2, 1)]
