"""Odd sampling parameters, prompts and drafts: taken as what they mean, or refused in one line that names the field."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Config
from paceline.sampling.accept import MalformedDraftError, VerifyRow, accept
from paceline.sampling.processors import Spec
from paceline.schema import DraftLawError, Grammar, RolloutRequest, SamplingParams, as_tokens
from paceline.typed_yaml import ConfigError, load

pytestmark = pytest.mark.attacks

ODD = (
    None, True, False, 0, 1, -1, 1.5, 2**31, 2**32 + 5, 2**64, 10**400, math.nan, math.inf, -math.inf, 1e-40, 1e308,
    "", "x", "12", "\ud800", b"x", [], [None], [1], [1.0], [True], [[1]], [[[1]]], [-1], [2**32 + 5], ["x", 1], {},
    {"1": 2}, {1: "x"}, {1: None}, {1: math.nan}, {-1: 1.0}, {"x": 1.0}, {1: 1.0, "1": 2.0}, (), (1,), set(), object(),
    np.int64(3), np.float32(0.5), np.bool_(True), np.array([1]), np.array(3), range(3), [[]], [""],
)  # fmt: skip
FIELDS = SamplingParams.__struct_fields__


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_any_field_is_taken_or_refused_by_name(field):
    for value in ODD:
        refused = None
        try:
            params = SamplingParams(**{field: value})
        except ValueError as error:
            refused = str(error)
        if refused is not None:
            assert refused.startswith((f"sampling parameter {field}=", "sampling parameter min_tokens="))
            assert "\n" not in refused
            assert len(refused) < 300
            continue
        taken = getattr(params, field)
        assert type(taken) in (int, float, bool, str, tuple, dict, type(None)), (value, taken)
        assert SamplingParams(**{field: taken}) == params
        json.dumps(taken if not isinstance(taken, dict) else list(taken.items()))


@pytest.mark.parametrize(
    ("field", "value", "taken"),
    [
        ("stop", "</sql>", ("</sql>",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [np.int64(3), 4], (3, 4)),
        ("bad_words", [[1, 2], (3,)], ((1, 2), (3,))),
        ("logit_bias", {"7": 1, np.int32(8): -math.inf}, {7: 1.0, 8: -math.inf}),
        ("allowed_token_ids", [1, 2], (1, 2)),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1e-40, 0.0),
        ("temperature", 9.9e-6, 0.0),
        ("temperature", 1e-5, 1e-5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("max_tokens", np.int32(5), 5),
        ("ignore_eos", np.bool_(True), True),
    ],
)
def test_what_vllm_takes_is_taken(field, value, taken):
    found = getattr(SamplingParams(**{field: value}), field)
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 1), ("logprobs", True), ("ignore_eos", "false"), ("ignore_eos", 1), ("stop", ("a", 3)),
        ("stop", [""]),
        ("stop_token_ids", [1.0]), ("stop_token_ids", [True]), ("stop_token_ids", [2**32 + 5]), ("stop_token_ids", 3),
        ("stop_token_ids", np.array([3])), ("bad_words", ["word"]), ("bad_words", [[-1]]), ("allowed_token_ids", []),
        ("temperature", None), ("temperature", "1"), ("temperature", True), ("max_tokens", None), ("max_tokens", 3.0),
        ("n", 10**9), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0), ("grammar", {"kind": "regex"}),
        ("repetition_penalty", 1e-40), ("frequency_penalty", 1e300), ("logit_bias", {1: 1e300}), ("top_k", 1.0),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=f"sampling parameter {field}="):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("text", "field", "taken"),
    [
        ("stop: </sql>", "stop", ("</sql>",)),
        ("stop: [a, b]", "stop", ("a", "b")),
        ("stop_token_ids: [3]", "stop_token_ids", (3,)),
    ],
)
def test_a_file_may_say_the_same(tmp_path, text, field, taken):
    path = tmp_path / "run.yml"
    path.write_text(f"policy: {{path: x}}\nsampling:\n  {text}\n")
    assert getattr(load(Config, path, ()).sampling, field) == taken


@pytest.mark.parametrize(
    "text",
    ["stop: 3", "logprobs: 1", "ignore_eos: 'false'", "stop_token_ids: [1.5]", "temperature: .nan", "max_tokens: 3.0"],
)
def test_a_file_is_refused_with_its_line_and_the_key(tmp_path, text):
    path = tmp_path / "run.yml"
    path.write_text(f"policy: {{path: x}}\nsampling:\n  {text}\n")
    with pytest.raises(ConfigError, match=rf"run\.yml:3: sampling\.{text.split(':')[0]}[:=]") as caught:
        load(Config, path, ())
    assert "\n" not in str(caught.value)


# Requests


class Encoding(dict):
    """As a tokenizer's: a mapping that is no plain dictionary."""


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), 6, 7], range(5, 8),
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, Encoding(input_ids=[[5, 6, 7]]),
        {"input_ids": torch.tensor([[0, 5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])},
    ],
)  # fmt: skip
def test_prompts_in_every_form_are_the_same_tokens(prompt):
    made = RolloutRequest(request_id="r", prompt=prompt)
    assert made.prompt.dtype == np.int32
    assert made.prompt.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    "prompt",
    [
        None, "text", b"text", 5, [], [1.0], [1.5], [True], [1, True], [2**32 + 5], [-1], [[1, 2], [3, 4]],
        {}, [[1], [2, 3]],
        {"input_ids": None}, {"input_ids": [[1], [2]]}, {"input_ids": [1, 2], "attention_mask": [1]}, ["a"], [None],
        np.array([1.0]), np.array([True]), torch.tensor([1.0]), {"input_ids": [1], "attention_mask": [0]}, object(),
        [10**400],
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_the_request(prompt):
    with pytest.raises(ValueError, match=r"^request r7: (the )?prompt") as caught:
        RolloutRequest(request_id="r7", prompt=prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("request_id", 3), ("request_id", None), ("params", {}), ("group", 1), ("speculate", "no"), ("begun", {})],
)
def test_every_field_of_a_request_is_checked(field, value):
    with pytest.raises(ValueError, match=field):
        RolloutRequest(**{"request_id": "r", "prompt": [1], field: value})


@pytest.mark.parametrize("trigger", [3, "x", [1.0], [-1], [True], None])
def test_a_grammars_trigger_is_token_ids(trigger):
    with pytest.raises(ValueError, match="trigger: "):
        Grammar(kind="regex", text="a", trigger=trigger)


# Drafts


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-(2**31), -1, 0, 1, 3, 4, 2**31 - 1]), max_size=5),
    st.lists(st.integers(-3, 6), max_size=5),
    st.lists(st.integers(-2, 3), max_size=5) | st.none(),
    st.sampled_from(["none", "good", "narrow", "flat", "nan", "list", "whole"]),
    st.sampled_from(["coupled", "rejection", "block"]),
)
def test_any_draft_is_verified_or_refused_by_name_and_leaves_the_plain_token(tokens, parents, law_of, kind, acceptance):
    vocabulary = 4
    laws = {
        "none": None, "good": torch.zeros(3, vocabulary), "narrow": torch.zeros(3, 2), "flat": torch.zeros(3),
        "nan": torch.full((3, vocabulary), math.nan), "list": [[0.0] * vocabulary] * 3,
        "whole": torch.zeros(3, vocabulary, dtype=torch.int64),
    }[kind]  # fmt: skip
    spec, empty = Spec(SamplingParams()), as_tokens([])
    logits_V = torch.tensor([0.5, 0.1, -1.0, 2.0], dtype=torch.float64)
    plain = accept(logits_V[None], [VerifyRow("r", spec, 3, as_tokens([0]), empty, empty, empty)], 0)[0].tokens[0]
    row = VerifyRow(
        "r", spec, 3, as_tokens([0]), empty, as_tokens(tokens), as_tokens(parents), laws,
        None if law_of is None else as_tokens(law_of),
    )  # fmt: skip
    refused = None
    try:
        (verdict,) = accept(logits_V.expand(1 + len(tokens), -1), [row], 0, acceptance)
    except (MalformedDraftError, DraftLawError) as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith("request r")
        return
    assert ((verdict.tokens >= 0) & (verdict.tokens < vocabulary)).all()
    if acceptance == "coupled":
        assert verdict.tokens[0] == plain


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([1.5], [-1]),
        ([[1]], [-1]),
        ([1], [0]),
        ([1, 2], [1, 0]),
        ([1, 2], [-1]),
        ([1], [-1.0]),
        ([9], [-1]),
        ([-1], [-1]),
    ],
)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_a_draft_that_is_none_is_refused_by_name(tokens, parents, acceptance):
    row = VerifyRow("r", Spec(SamplingParams()), 3, as_tokens([0]), as_tokens([]), np.array(tokens), np.array(parents))
    with pytest.raises(MalformedDraftError, match="request r: its draft's"):
        accept(torch.zeros(1 + len(tokens), 4), [row], 0, acceptance)
