"""Accelerators as their makers describe them, the shares of it that were measured, and what collectives take on them.

Peaks are a GPU's own, dense, and links count one direction. The shares reached are the same for every model:

* memory: 4.18 of 4.8 TB/s, BabelStream's triad on an H200; GPUs that no such figure was found for take that share too.
* matrix products: cuBLASLt in FP8 at 16384 x 16384 x 16384, 1305 of 1979 TFLOP/s on an H200 and 2819.5 of 5000 on a
  GB200. A100 and H100 take Hopper's share, B200 and RTX PRO 6000 that of the GB200; BF16 is taken to reach the same.
* attention: 0.7; FlashAttention-2 reaches up to 0.73 on A100 (arXiv 2307.08691), FlashAttention-3 0.75 on H100
  (arXiv 2407.08608), FlashAttention-4 0.71 on B200 (its abstract, 2026).
* fast links: 679.6 of 900 GB/s, NCCL's ring all-reduce of 8 GB on a GB200. Networks: 0.9; DeepEP's kernels between
  nodes reach 43 to 47 of 50 GB/s.
* what a collective takes however little it moves: NCCL's all-reduce of 64 KB, 17 us on a GB200 with 4 ranks and 29 us
  on an H200 with 8, taken for all of Blackwell and for the older ones. Kernels made for small messages are quicker.

The H200's and GB200's figures are those of Azure's AI benchmarking guide (ND H200 v5, ND GB200 v6).
"""

from pathlib import Path
from typing import Literal

import msgspec

from paceline.schema import PacelineError
from paceline.typed_yaml import nearest

Precision = Literal["bf16", "fp8"]
BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}

_HOPPER_MATMUL, _BLACKWELL_MATMUL = 1305 / 1979, 2819.5 / 5000
_HOPPER_LATENCY_S, _BLACKWELL_LATENCY_S = 29e-6, 17e-6


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU and its links: FLOP/s, bytes, bytes a second, seconds. ``domain`` GPUs reach each other by fast links.

    ``fp8_flops`` is None where there are no FP8 matrix products. The shares are of the peaks (see the module).
    """

    name: str
    source: str
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: float
    memory_bytes_per_s: float
    domain: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    link_latency_s: float = _HOPPER_LATENCY_S
    network_latency_s: float = _HOPPER_LATENCY_S
    memory_share: float = 4.18 / 4.8
    matmul_share: float = _HOPPER_MATMUL
    attention_share: float = 0.7
    link_share: float = 679.6 / 900
    network_share: float = 0.9

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"{field}={value}: is more than 0 and finite")
            if field.endswith("_share") and value > 1:
                raise ValueError(f"{field}={value}: is a share of the peak, at most 1")

    def matmul_flops(self, precision: Precision) -> float:
        """FLOP/s that matrix products reach. PacelineError where the GPU has none of that precision."""
        peak = self.bf16_flops if precision == "bf16" else self.fp8_flops
        if peak is None:
            raise PacelineError(f"{self.name}: no matrix products in {precision}: take bf16")
        return peak * self.matmul_share

    @property
    def attention_flops(self) -> float:
        """FLOP/s that attention reaches, in BF16."""
        return self.bf16_flops * self.attention_share

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes a second that reading memory reaches."""
        return self.memory_bytes_per_s * self.memory_share

    @property
    def _link(self) -> float:
        return self.link_bytes_per_s * self.link_share

    @property
    def _network(self) -> float:
        return self.network_bytes_per_s * self.network_share

    def all_gather_seconds(self, whole_bytes: float, ranks: int) -> float:
        """Seconds until each of ``ranks`` has all of ``whole_bytes``, of which it had an equal share; a ring.

        Beyond a domain: shares go between domains over the network first, then around within each.
        """
        if ranks == 1:
            return 0.0
        inside = min(ranks, self.domain)
        seconds = self.link_latency_s + whole_bytes * (inside - 1) / inside / self._link
        if ranks > inside:
            domains = ranks / inside
            seconds += self.network_latency_s + whole_bytes / inside * (domains - 1) / domains / self._network
        return seconds

    def all_reduce_seconds(self, whole_bytes: float, ranks: int) -> float:
        """Seconds of the sum of ``whole_bytes`` over ``ranks``: a ring moves each byte twice, with one latency."""
        if ranks == 1:
            return 0.0
        latency = self.link_latency_s + (self.network_latency_s if ranks > self.domain else 0.0)
        return 2 * self.all_gather_seconds(whole_bytes, ranks) - latency

    def all_to_all_seconds(self, rank_bytes: float, ranks: int) -> float:
        """Seconds for each of ``ranks`` to send ``rank_bytes``, evenly over all (to itself too, which takes nothing).

        Links and network work side by side.
        """
        if ranks == 1:
            return 0.0
        inside = min(ranks, self.domain)
        near = self.link_latency_s + rank_bytes * (inside - 1) / ranks / self._link
        if ranks == inside:
            return near
        return max(near, self.network_latency_s + rank_bytes * (ranks - inside) / ranks / self._network)

    def send_seconds(self, sent_bytes: float, *, far: bool) -> float:
        """Seconds from one GPU to another, over the network if it is ``far``."""
        if far:
            return self.network_latency_s + sent_bytes / self._network
        return self.link_latency_s + sent_bytes / self._link


def _blackwell(**fields: object) -> Hardware:
    shares = {"matmul_share": _BLACKWELL_MATMUL, "link_latency_s": _BLACKWELL_LATENCY_S}
    return msgspec.convert(shares | fields, Hardware)


#: By the name that they are asked for by. Peaks with sparsity are halved where the sheet gives no others.
PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="a100",
            source="NVIDIA A100 80GB SXM data sheet; HDR InfiniBand, 200 Gb/s a GPU",
            bf16_flops=312e12,
            fp8_flops=None,
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            domain=8,
            link_bytes_per_s=300e9,
            network_bytes_per_s=25e9,
        ),
        Hardware(
            name="h100",
            source="NVIDIA H100 SXM data sheet; NDR InfiniBand, 400 Gb/s a GPU",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            domain=8,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
        ),
        Hardware(
            name="h200",
            source="NVIDIA H200 SXM data sheet; NDR InfiniBand, 400 Gb/s a GPU",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
            domain=8,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
        ),
        _blackwell(
            name="b200",
            source="NVIDIA DGX B200 data sheet, an eighth of it; 400 Gb/s a GPU",
            bf16_flops=2.25e15,
            fp8_flops=4.5e15,
            memory_bytes=180e9,
            memory_bytes_per_s=8e12,
            domain=8,
            link_bytes_per_s=900e9,
            network_bytes_per_s=50e9,
        ),
        _blackwell(
            name="gb200",
            source="NVIDIA GB200 NVL72 data sheet, a 72nd of it; 400 Gb/s a GPU",
            bf16_flops=2.5e15,
            fp8_flops=5e15,
            memory_bytes=186e9,
            memory_bytes_per_s=8e12,
            domain=72,
            link_bytes_per_s=900e9,
            network_bytes_per_s=50e9,
        ),
        _blackwell(
            name="rtx-pro-6000",
            source="NVIDIA RTX PRO 6000 Blackwell data sheet (4000 sparse FP4 TOPS: FP8 a quarter, BF16 an eighth); "
            "PCIe 5 x16 for links and network",
            bf16_flops=500e12,
            fp8_flops=1000e12,
            memory_bytes=96e9,
            memory_bytes_per_s=1.792e12,
            domain=8,
            link_bytes_per_s=64e9,
            network_bytes_per_s=50e9,
        ),
    )
}


def load_hardware(name: str) -> Hardware:
    """A preset by its name, or a JSON file of the fields of ``Hardware``. PacelineError in one line for others."""
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    path = Path(name)
    if not path.is_file():
        raise PacelineError(
            f"--hardware {name}: no such file, and no preset{nearest(name.lower(), PRESETS)}; "
            f"presets: {', '.join(PRESETS)}"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Hardware)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PacelineError(f"--hardware {path}: not a description of a GPU: {error}") from None
