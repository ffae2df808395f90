"""What travels: a manifest of the tensors of one transaction, and where in which part their bytes lie."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from paceline.rl.fleet import Weights
from paceline.schema import PacelineError

#: Dtypes that weights may have, by the name that stands in a manifest.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    )
}  # fmt: skip
#: Every tensor starts at a multiple of this many bytes, and the size of a part is one.
ALIGNMENT = 64
#: A part holds as many whole tensors as fit into this many bytes, or one that is larger.
PART_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_DIGEST_BYTES = 8
_MAX_MESSAGE_BYTES = 64 << 20
_MASK64 = (1 << 64) - 1

Kind = Literal["shared_memory", "object", "broadcast"]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class TransportError(PacelineError):
    """Weights that did not arrive whole: have them sent again, or the worker replaced."""


class Parcel(NamedTuple):
    """One transaction for any number of workers: the manifest's bytes, and references that Ray must see.

    It is handed to an actor's method as an argument; what ``parts`` refers to lives as long as the sender keeps it or
    an argument is under way.
    """

    message: bytes
    parts: tuple[Any, ...] = ()


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A tensor: its bytes start at ``offset`` of part ``part``; tied tensors share them."""

    name: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]
    part: _Size
    offset: _Size

    @property
    def end(self) -> int:
        """The first byte behind it, in its part."""
        return self.offset + math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a transaction says of itself: ``where`` its parts are, their ``sizes`` in bytes and their ``digests``.

    A digest is the part's xxh3-64, or, where the part is on a GPU (``device`` cuda), the sum of its 64-bit words.
    """

    kind: Kind
    where: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    version: _Size
    drafter_version: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 48)]
    sizes: Annotated[list[_Size], msgspec.Meta(max_length=1 << 20)]
    digests: list[int]
    policy: list[Entry]
    drafter: list[Entry] | None


@dataclass(frozen=True)
class Plan:
    """Where each tensor of ``weights`` goes, before anything is copied: ``sources`` are (offset, tensor) by part."""

    weights: Weights
    policy: list[Entry]
    drafter: list[Entry] | None
    sizes: list[int]
    sources: list[list[tuple[int, Tensor]]]

    def manifest(self, kind: Kind, digests: Sequence[int], **where: Any) -> bytes:
        """The message for the parts that were made of this plan."""
        return encode(
            Manifest(
                kind=kind, version=self.weights.version, drafter_version=self.weights.drafter_version,
                sizes=self.sizes, digests=list(digests), policy=self.policy, drafter=self.drafter, **where,
            )
        )  # fmt: skip


def plan(weights: Weights, part_bytes: int = PART_BYTES) -> Plan:
    """Lay out the tensors, those that are tied once. TransportError names one of a dtype that no weights have."""
    sizes: list[int] = []
    sources: list[list[tuple[int, Tensor]]] = []
    known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def place(tensor: Tensor) -> tuple[int, int]:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in known:
            return known[key]
        nbytes = -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if not sizes or (sizes[-1] and sizes[-1] + nbytes > part_bytes):
            sizes.append(0)
            sources.append([])
        known[key] = len(sizes) - 1, sizes[-1]
        sources[-1].append((sizes[-1], tensor))
        sizes[-1] += nbytes
        return known[key]

    def entries(tensors: Mapping[str, Tensor]) -> list[Entry]:
        found = []
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise TransportError(f"{name}: weights of dtype {dtype} cannot travel; convert it to another dtype")
            found.append(Entry(name, dtype, tuple(tensor.shape), *place(tensor.detach())))
        return found

    policy = entries(weights.policy)
    drafter = None if weights.drafter is None else entries(weights.drafter)
    return Plan(weights, policy, drafter, [max(size, ALIGNMENT) for size in sizes], sources)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on its device; a view of it where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def fill(part_N: Tensor, sources: Sequence[tuple[int, Tensor]]) -> None:
    """Write the tensors of a part to its N bytes, on any device; gaps become zeros."""
    end = 0
    for offset, tensor in sources:
        bytes_N = raw(tensor)
        part_N[end:offset].zero_()
        end = offset + len(bytes_N)
        part_N[offset:end].copy_(bytes_N)
    part_N[end:].zero_()


def stream(size: int, sources: Sequence[tuple[int, Tensor]]) -> Iterator[memoryview]:
    """The ``size`` bytes of a part, in chunks."""
    end = 0
    for offset, tensor in [*sources, (size, torch.empty(0))]:
        yield memoryview(bytes(offset - end))
        data = raw(tensor).cpu().numpy().data
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]
        end = offset + len(data)


def digest_of(part_N: Tensor) -> int:
    """What a manifest's ``digests`` says of a part."""
    if part_N.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(part_N.numpy().data)
    return int(part_N.view(torch.int64).sum()) & _MASK64


def encode(manifest: Manifest) -> bytes:
    """A manifest's bytes, its own checksum in front."""
    try:
        body = msgspec.msgpack.encode(manifest)
    except UnicodeEncodeError as error:
        raise TransportError(f"the name {error.object!r} of a tensor is no Unicode text; rename it") from None
    return xxhash.xxh3_64_intdigest(body).to_bytes(_DIGEST_BYTES, "little") + body


def decode(message: bytes) -> Manifest:
    """The inverse of ``encode``; TransportError for bytes that are no manifest, or one that contradicts itself."""
    head, body = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
    if len(message) > _MAX_MESSAGE_BYTES or xxhash.xxh3_64_intdigest(body) != int.from_bytes(head, "little"):
        raise TransportError(f"a manifest of {len(message)} bytes is damaged; publish the weights again")
    try:
        manifest = msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"no manifest of weights: {' '.join(str(error).split())}") from None
    if len(manifest.digests) != len(manifest.sizes):
        raise _wrong(manifest, f"it has {len(manifest.sizes)} parts and {len(manifest.digests)} checksums")
    used = [ALIGNMENT] * len(manifest.sizes)
    for entries in (manifest.policy, manifest.drafter or []):
        if len({entry.name for entry in entries}) < len(entries):
            raise _wrong(manifest, "a tensor is named twice")
        for entry in entries:
            if entry.dtype not in DTYPES:
                raise _wrong(manifest, f"{entry.name!r} has dtype {entry.dtype!r}")
            if entry.part >= len(used) or entry.end > manifest.sizes[entry.part] or entry.offset % ALIGNMENT:
                raise _wrong(manifest, f"{entry.name!r} lies out of bounds")
            used[entry.part] = max(used[entry.part], -(-entry.end // ALIGNMENT) * ALIGNMENT)
    if used != manifest.sizes:
        raise _wrong(manifest, "its parts are not of the sizes of what they hold")
    return manifest


def unpack(manifest: Manifest, parts: Sequence[Tensor]) -> Weights:
    """The weights whose bytes are ``parts`` (uint8, N each), as views of them; TransportError where a part is damaged.

    A view keeps its part alive, nothing else does.
    """
    if [len(part_N) for part_N in parts] != manifest.sizes:
        raise _wrong(manifest, "what arrived is not of the size that it says")
    for part, (part_N, digest) in enumerate(zip(parts, manifest.digests, strict=True)):
        if digest_of(part_N) != digest:
            raise _wrong(manifest, f"part {part} fails its checksum")

    def views(entries: Sequence[Entry]) -> dict[str, Tensor]:
        return {
            e.name: parts[e.part][e.offset : e.end].view(DTYPES[e.dtype]).view(e.shape) for e in entries
        }  # fmt: skip

    drafter = None if manifest.drafter is None else views(manifest.drafter)
    return Weights(manifest.version, views(manifest.policy), drafter, manifest.drafter_version)


def _wrong(manifest: Manifest, what: str) -> TransportError:
    return TransportError(f"weights of version {manifest.version}: {what}; publish them again")
