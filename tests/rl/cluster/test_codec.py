"""Bytes of our records: what is written is read back exactly, and what is not ours is refused in one line."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Config, load_config
from paceline.rl.cluster import codec
from paceline.rl.cluster.codec import CodecError, decode, encode
from paceline.rl.fleet import Order, Report
from paceline.schema import (
    EngineStats,
    Grammar,
    Rollout,
    RolloutRequest,
    SamplingParams,
    Span,
    as_tokens,
)

NAMES = st.text(max_size=8)
COUNTS = st.integers(0, 1 << 40)
SECONDS = st.floats(allow_nan=True, allow_infinity=True)
TOKEN = st.integers(-(1 << 31), (1 << 31) - 1)
GRAMMARS = st.builds(
    Grammar, kind=st.sampled_from(["json_schema", "regex", "ebnf"]), text=st.just("a|b"), trigger=st.just((1, 2))
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-1e9, 1e9) | st.just(-math.inf), max_size=3),
    bad_words=st.just(((3, 4), (7,))),
    allowed_token_ids=st.none() | st.just((1, 2)),
    stop=st.just(("a", "é")),
    grammar=st.none() | GRAMMARS,
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    logprobs=st.sampled_from(["processed", "raw"]),
)


@st.composite
def rollouts(draw):
    count = draw(st.integers(0, 6))
    tokens, floats = (st.lists(kind, min_size=count, max_size=count) for kind in (TOKEN, SECONDS))
    return Rollout(
        request_id=draw(NAMES),
        group=draw(NAMES),
        prompt_key=draw(NAMES),
        prompt=as_tokens(draw(st.lists(TOKEN, min_size=1, max_size=4))),
        tokens=as_tokens(draw(tokens)),
        logprobs=np.array(draw(floats), np.float64),
        raw_logprobs=np.array(draw(floats), np.float64),
        logprob_mode=draw(st.sampled_from(["processed", "raw"])),
        margins=np.array(draw(floats), np.float64),
        versions=as_tokens(draw(tokens)),
        sources=np.array(draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), np.uint8),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        forwards=draw(COUNTS),
        drafted=draw(COUNTS),
        accepted=draw(COUNTS),
        accept_lengths=as_tokens(draw(st.lists(TOKEN, max_size=4))),
        text=draw(st.none() | NAMES),
        sample_index=draw(COUNTS),
    )


REQUESTS = st.builds(
    RolloutRequest,
    request_id=NAMES,
    prompt=st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=4),
    params=PARAMS,
    group=NAMES,
    speculate=st.booleans(),
    begun=st.none() | rollouts(),
)
SPANS = st.builds(Span, role=NAMES, doing=NAMES, start=SECONDS, seconds=SECONDS, step=COUNTS, version=COUNTS)
STATS = st.builds(
    EngineStats,
    tokens_emitted=COUNTS,
    drafter_version=st.none() | COUNTS,
    canary_acceptance=SECONDS,
    depths_tested=st.just((3, 2, 1)),
    events=st.dictionaries(NAMES, COUNTS, max_size=3),
)
REPORTS = st.builds(
    Report,
    rollouts=st.lists(rollouts(), max_size=2),
    passes=COUNTS,
    stats=st.none() | STATS,
    spans=st.lists(SPANS, max_size=3),
    failure=st.none() | NAMES,
)
ORDERS = st.builds(
    Order, step=COUNTS, group=NAMES, version=COUNTS, requests=st.lists(REQUESTS, max_size=2), begun=st.none() | COUNTS
)
RECORDS = {
    list[RolloutRequest]: st.lists(REQUESTS, max_size=2),
    list[Rollout]: st.lists(rollouts(), max_size=2),
    list[Order]: st.lists(ORDERS, max_size=2),
    Report: REPORTS,
    EngineStats: STATS,
    list[Span]: st.lists(SPANS, max_size=3),
}


def assert_equal(a, b):
    """Field by field, NaN and the types of arrays included."""
    assert type(a) is type(b)
    match a:
        case msgspec.Struct():
            for name in a.__struct_fields__:
                assert_equal(getattr(a, name), getattr(b, name))
        case np.ndarray():
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
            assert b.flags.writeable
        case list() | tuple():
            assert len(a) == len(b)
            for left, right in zip(a, b, strict=True):
                assert_equal(left, right)
        case float():
            assert a == b or (math.isnan(a) and math.isnan(b))
        case _:
            assert a == b


@pytest.mark.parametrize("kind", list(RECORDS))
def test_records_come_back_as_they_were(kind):
    @settings(max_examples=40, deadline=None)
    @given(RECORDS[kind])
    def holds(record):
        assert_equal(record, decode(kind, encode(record)))

    holds()


def test_a_configuration_comes_back_as_it_was():
    config = load_config(None, ["tasks.function_call.options.depth=3", "cluster.kind=ray", "sampling.stop=[a]"])
    assert decode(Config, encode(config)) == config


def refusal(kind, raw):
    """Why the bytes are refused; nothing where they are a record, which can be written again."""
    try:
        encode(decode(kind, raw))
    except CodecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", list(RECORDS))
def test_damaged_bytes_are_read_or_refused_in_one_line(kind):
    @settings(max_examples=60, deadline=None)
    @given(RECORDS[kind], st.data())
    def holds(record, data):
        raw = bytearray(encode(record))
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
        assert "\n" not in refusal(kind, bytes(raw))

    holds()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_refused(raw):
    with pytest.raises(CodecError, match="from another process are no"):
        decode(Report, raw + b"\xc1")


def rollout(**changes):
    two = np.zeros(2)
    fields = {
        "request_id": "r", "group": "g", "prompt_key": "k", "prompt": as_tokens([1]), "tokens": as_tokens([1, 2]),
        "logprobs": two, "raw_logprobs": two, "logprob_mode": "raw", "margins": two, "versions": as_tokens([0, 0]),
        "sources": np.zeros(2, np.uint8), "finish_reason": "stop", "forwards": 2, "drafted": 0, "accepted": 0,
        "accept_lengths": as_tokens([0, 0]),
    }  # fmt: skip
    return Rollout(**{**fields, **changes})


def tampered(**changes):
    """The bytes of a rollout with some fields replaced by plain values."""
    plain = msgspec.msgpack.decode(encode(rollout()))
    return msgspec.msgpack.encode({**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ["<f8", b"\0" * 16]}, "no array of int32"),
        ({"tokens": ["<i4", b"\0" * 7]}, "rollout r|buffer size"),
        ({"tokens": ["|O", b"\0" * 16]}, "no array of int32"),
        ({"tokens": "AAAA"}, "no array of int32"),
        ({"logprobs": ["<f8", b"\0" * 8]}, "2 tokens and 1 logprobs"),
        ({"sources": ["|u1", b"\0\0\0"]}, "2 tokens and 3 sources"),
        ({"finish_reason": "gone"}, "Invalid enum value"),
        ({"forwards": "many"}, "Expected `int`"),
    ],
)
def test_what_a_rollout_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(CodecError, match=message):
        decode(Rollout, tampered(**changes))
    with pytest.raises(CodecError, match=message):
        decode(RolloutRequest, msgspec.msgpack.encode(
            {"request_id": "r", "prompt": ["<i4", b"\0" * 4], "begun": msgspec.msgpack.decode(tampered(**changes))}
        ))  # fmt: skip


def test_deep_nesting_and_huge_claims_are_refused():
    for raw in (b"\x81\xa1x" + b"\x91" * 200_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xffabc"):
        for kind in (Report, list[Rollout], RolloutRequest):
            with pytest.raises(CodecError):
                decode(kind, raw)


def test_what_cannot_be_read_back_is_not_written(monkeypatch):
    for record in (object(), rollout(prompt=np.zeros((2, 2), np.int32)), rollout(margins=np.array(["a", "b"]))):
        with pytest.raises(CodecError, match="cannot be sent"):
            encode(record)
    monkeypatch.setattr(codec, "MOST_BYTES", 100)
    with pytest.raises(CodecError, match="at most 100; send less"):
        encode(rollout())
    with pytest.raises(CodecError, match="at most 100; nothing was read"):
        decode(Rollout, b"\x80" * 101)
