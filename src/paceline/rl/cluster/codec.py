"""Our records as bytes and back: msgpack, with arrays as raw little-endian buffers. What is read can run no code."""

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.rl.fleet import Order, Report
from paceline.schema import PacelineError, Rollout, RolloutRequest

T = TypeVar("T")

#: The longest message that is written or read.
MOST_BYTES = 1 << 30


class CodecError(PacelineError):
    """Bytes that are no record of the kind that was asked for, or a record that has no bytes; one line."""


def encode(record: Any) -> bytes:
    """The bytes of a record of ``schema``, ``config`` or ``rl.fleet``, or of a list of them.

    CodecError for what cannot be read back: other objects, and more than ``MOST_BYTES``.
    """
    try:
        data = msgspec.msgpack.encode(record, enc_hook=_flat)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{type(record).__name__} cannot be sent to another process: {_line(error)}") from None
    if len(data) > MOST_BYTES:
        raise CodecError(f"{type(record).__name__} takes {len(data)} bytes, a message at most {MOST_BYTES}; send less")
    return data


def decode(kind: type[T], data: bytes) -> T:
    """The record of type ``kind``, such as ``Report`` or ``list[Rollout]``, whose bytes are ``data``; arrays are new.

    CodecError where it is none: damaged or hostile bytes, impossible values, per-token arrays of unequal lengths.
    """
    if len(data) > MOST_BYTES:
        raise CodecError(f"{len(data)} bytes came, a message has at most {MOST_BYTES}; nothing was read")
    try:
        record: T = _decoder(kind).decode(data)  # type: ignore[arg-type]
        for rollout in _rollouts(record):
            _check(rollout)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # msgspec's own are ValueErrors
        name = str(kind) if get_args(kind) else kind.__name__
        raise CodecError(f"{len(data)} bytes from another process are no {name}: {_line(error)}") from None
    return record


@cache
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind, dec_hook=_array)


def _flat(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iuf":
        raise TypeError(f"it holds {type(value).__name__}, which is no record and no one-dimensional array of numbers")
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return little.dtype.str, little.tobytes()


def _array(kind: Any, value: Any) -> npt.NDArray[Any]:
    """The array that ``_flat`` made of one whose annotation is ``kind``."""
    _, dtype_hint = get_args(kind)
    (scalar,) = get_args(dtype_hint)
    dtype = np.dtype(scalar)
    match value:
        case [str(name), bytes(raw)] if name == dtype.newbyteorder("<").str:
            return np.frombuffer(raw, name).astype(dtype)
        case _:
            raise ValueError(f"no array of {dtype}")


def _rollouts(record: Any) -> Iterator[Rollout]:
    """Every rollout within a record."""
    match record:
        case Rollout():
            yield record
        case RolloutRequest(begun=begun):
            yield from _rollouts(begun)
        case Order(requests=inner) | Report(rollouts=inner):
            yield from _rollouts(inner)
        case list():
            for each in record:
                yield from _rollouts(each)


def _check(rollout: Rollout) -> None:
    count = len(rollout.tokens)
    for name in ("logprobs", "raw_logprobs", "margins", "versions", "sources"):
        if (own := len(getattr(rollout, name))) != count:
            raise ValueError(f"rollout {rollout.request_id} has {count} tokens and {own} {name}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
