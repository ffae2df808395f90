"""GPUs as described, and collectives: by hand on round numbers, against what was measured, and in their limits."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schema import PacelineError
from paceline.simulate.hardware import PRESETS, Hardware, load_hardware

TOY = Hardware(
    name="toy",
    source="made up",
    bf16_flops=1e6,
    fp8_flops=2e6,
    memory_bytes=1e6,
    memory_bytes_per_s=1e6,
    domain=4,
    link_bytes_per_s=1000.0,
    network_bytes_per_s=100.0,
    link_latency_s=0.5,
    network_latency_s=2.0,
    memory_share=0.5,
    matmul_share=0.25,
    attention_share=0.75,
    link_share=1.0,
    network_share=1.0,
)


def test_what_is_reached_is_the_peak_times_its_share():
    assert TOY.read_bytes_per_s == 0.5e6
    assert TOY.matmul_flops("bf16") == 0.25e6
    assert TOY.matmul_flops("fp8") == 0.5e6
    assert TOY.attention_flops == 0.75e6


def test_within_a_domain_a_ring_moves_all_but_ones_own_share():
    assert TOY.all_gather_seconds(4000, 4) == pytest.approx(0.5 + 3.0)
    assert TOY.all_reduce_seconds(4000, 4) == pytest.approx(0.5 + 6.0)
    assert TOY.all_to_all_seconds(4000, 4) == pytest.approx(0.5 + 3.0)
    assert TOY.send_seconds(4000, far=False) == pytest.approx(0.5 + 4.0)


def test_beyond_a_domain_the_network_moves_a_share_of_each_gpu():
    # Of 8 GPUs in two domains each fetches one share of 500 bytes from the other domain, then three of four quarters.
    assert TOY.all_gather_seconds(4000, 8) == pytest.approx(2.0 + 500 / 100 + 0.5 + 3.0)
    assert TOY.all_reduce_seconds(4000, 8) == pytest.approx(2.5 + 2 * (5.0 + 3.0))
    # Half of what each sends leaves the domain, and takes longer than the three eighths that stay.
    assert TOY.all_to_all_seconds(4000, 8) == pytest.approx(2.0 + 2000 / 100)
    quick = msgspec.structs.replace(TOY, network_bytes_per_s=1e6)
    assert quick.all_to_all_seconds(40_000, 8) == pytest.approx(0.5 + 40_000 * 3 / 8 / 1000)
    assert TOY.send_seconds(4000, far=True) == pytest.approx(2.0 + 40.0)


def test_one_rank_alone_waits_for_nobody():
    assert TOY.all_gather_seconds(4000, 1) == TOY.all_reduce_seconds(4000, 1) == TOY.all_to_all_seconds(4000, 1) == 0.0


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.sampled_from([2, 4, 8, 16]))
def test_more_bytes_never_take_less(less: float, more: float, ranks: int):
    less, more = sorted((less, more))
    for collective in (TOY.all_gather_seconds, TOY.all_reduce_seconds, TOY.all_to_all_seconds):
        assert collective(less, ranks) <= collective(more, ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "sent_bytes", "bus_gb_per_s", "off"),
    [
        # NCCL's bus bandwidth is 2 (n - 1) / n bytes / seconds. Azure's AI benchmarking guide.
        ("gb200", 4, 64 * 2**10, 5.71, 0.02),
        ("gb200", 4, 2**20, 80.48, 0.15),
        ("gb200", 4, 8 * 2**30, 679.61, 0.02),
        ("h200", 8, 64 * 2**10, 3.97, 0.02),
        ("h200", 8, 2**20, 57.15, 0.15),
    ],
)
def test_all_reduces_take_about_what_was_measured(
    name: str, ranks: int, sent_bytes: int, bus_gb_per_s: float, off: float
):
    measured = 2 * (ranks - 1) / ranks * sent_bytes / (bus_gb_per_s * 1e9)
    assert PRESETS[name].all_reduce_seconds(sent_bytes, ranks) == pytest.approx(measured, rel=off)


def test_presets_are_the_data_sheets():
    peaks = {name: (gpu.bf16_flops, gpu.fp8_flops, gpu.memory_bytes_per_s) for name, gpu in PRESETS.items()}
    assert peaks == {
        "a100": (312e12, None, 2.039e12),
        "h100": (989e12, 1979e12, 3.35e12),
        "h200": (989e12, 1979e12, 4.8e12),
        "b200": (2.25e15, 4.5e15, 8e12),
        "gb200": (2.5e15, 5e15, 8e12),
        "rtx-pro-6000": (500e12, 1000e12, 1.792e12),
    }
    assert all(gpu.source for gpu in PRESETS.values())


def test_fp8_where_there_is_none_is_refused():
    with pytest.raises(PacelineError, match=r"^a100: no matrix products in fp8: take bf16$"):
        PRESETS["a100"].matmul_flops("fp8")


def test_a_file_describes_a_gpu_of_ones_own(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_bytes(msgspec.json.encode(TOY))
    assert load_hardware(str(path)) == TOY
    assert load_hardware("H100") is PRESETS["h100"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a description of a GPU"),
        (msgspec.json.encode(msgspec.to_builtins(TOY) | {"memory": 1}), "unknown field `memory`"),
        (msgspec.json.encode(msgspec.to_builtins(TOY) | {"link_share": 1.5}), "link_share=1.5: is a share"),
        (msgspec.json.encode(msgspec.to_builtins(TOY) | {"bf16_flops": 0}), "bf16_flops=0.0: is more than 0"),
    ],
)
def test_a_file_that_describes_none_is_refused_in_one_line(tmp_path, content: bytes, message: str):
    path = tmp_path / "gpu.json"
    path.write_bytes(content)
    with pytest.raises(PacelineError, match=message) as refusal:
        load_hardware(str(path))
    assert "\n" not in str(refusal.value)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(PacelineError, match=r"--hardware h10: no such file, and no preset.*presets: a100, h100"):
        load_hardware("h10")
