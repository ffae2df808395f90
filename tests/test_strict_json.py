"""Every JSON file is strict, also where a number is not finite, and what needs such a number reads it back."""

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.files import exact_numbers, to_json
from paceline.report.example import Example, make_examples
from paceline.rl import checkpoint

SOURCES = Path(__file__).parents[1] / "src" / "paceline"
#: Modules that use ``json.dumps`` for text that is no JSON file: ``to_json`` itself, text to search, headers of whole
#: numbers, a body of texts, digests, and what a log's own messages or a task's own calls are written as.
NO_FILES = {
    "files.py", "drafters/vocabulary_map.py", "engines/vllm/weights.py", "integrations/vllm/access.py",
    "rl/schooling.py", "rl/tasks/function_call.py", "simulate/chats.py",
}  # fmt: skip
ODD = {"nan": math.nan, "inf": math.inf, "deep": [1.5, {"low": -math.inf, "none": None, "few": [math.nan]}]}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def strict(text):
    """What a reader that knows RFC 8259 and nothing else makes of it."""

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def same(left, right):
    """Equality in which NaN equals NaN and 0.0 is not -0.0."""
    return repr(left) == repr(right)


@settings(deadline=None, max_examples=200)
@given(values)
def test_any_value_is_strict_json_and_exact_text_gives_it_back(value):
    assert same(exact_numbers(strict(to_json(value, exact=True))), value)
    strict(to_json(value))


def test_numbers_that_are_not_finite_are_null_or_tagged():
    assert strict(to_json(ODD)) == {"nan": None, "inf": None, "deep": [1.5, {"low": None, "none": None, "few": [None]}]}
    tagged = strict(to_json(ODD, exact=True))
    assert tagged["nan"] == {"__float__": "NaN"}
    assert tagged["deep"][1]["low"] == {"__float__": "-Infinity"}
    assert strict(to_json({math.nan: 1, 0.5: 2})) == {"nan": 1, "0.5": 2}


@pytest.mark.parametrize("odd", [{"__float__": "1.5"}, {"__float__": ["NaN"]}, {"__float__": "NaN", "more": 1}])
def test_what_only_resembles_a_number_stays(odd):
    assert exact_numbers(odd) == odd


def test_a_checkpoints_numbers_come_back_and_its_meta_is_strict(tmp_path):
    path = checkpoint.save(tmp_path, 4, {"policy": {"w": torch.ones(2)}}, ODD)
    strict((path / "meta.json").read_text())
    strict((path / "COMPLETE").read_text())
    assert same(checkpoint.load_latest(tmp_path).meta, {**ODD, "step": 4})


def test_a_checkpoint_of_before_with_bare_nan_is_still_read(tmp_path):
    path = checkpoint.save(tmp_path, 4, {}, {})
    meta = json.dumps({**ODD, "step": 4}).encode()
    (path / "meta.json").write_bytes(meta)
    (path / "COMPLETE").write_text(json.dumps({"meta.json": xxhash.xxh3_64_hexdigest(meta)}))
    assert same(checkpoint.load_latest(tmp_path).meta, {**ODD, "step": 4})


def test_examples_with_a_reward_that_is_no_number_are_read_back(tmp_path):
    example = Example(
        title="The best", step=0, epoch=0, task="t", prompt_id=0, sample_idx=0, reward=math.nan, forwards=1,
        pieces=["a"], sources=["policy"],
    )  # fmt: skip
    (tmp_path / "example.json").write_bytes(msgspec.json.encode([example]))
    (found,) = make_examples(tmp_path, None)
    assert math.isnan(found.reward)
    assert found.pieces == ["a"]


def test_trackers_are_given_strict_json():
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    from paceline.report.trackers import mlflow, tensorboard

    for text in (mlflow._text(ODD["deep"]), tensorboard._plain(ODD["deep"])):
        assert strict(text) == [1.5, {"low": None, "none": None, "few": [None]}]


def test_a_trl_checkpoint_gives_back_what_the_drafters_training_knew(tmp_path):
    pytest.importorskip("trl")
    from paceline.integrations.trl.keeping import Keeper

    found = []
    teaching = SimpleNamespace(
        tensors=lambda: {"weights/w": torch.ones(2)}, state=lambda: ODD, load=lambda *given: found.append(given)
    )
    engine = SimpleNamespace(history_snapshot=lambda: None)
    where = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=3)
    keeper = Keeper(engine, teaching, 0)
    keeper.on_save(*where)
    strict((tmp_path / "checkpoint-3" / "paceline-0.json").read_text())
    keeper.restore(*where)
    ((tensors, state),) = found
    assert torch.equal(tensors["weights/w"], torch.ones(2))
    assert same(state, ODD)


def test_no_module_writes_json_files_past_the_strict_writer():
    callers = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps")
            if is_call and isinstance(node.value, ast.Name) and node.value.id == "json":
                callers.add(path.relative_to(SOURCES).as_posix())
    assert callers == NO_FILES
