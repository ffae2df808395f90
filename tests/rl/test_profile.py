import re

import msgspec
import pytest

from paceline.engines.hf.engine import HFEngine
from paceline.rl.probes import Point
from paceline.rl.profile import profile, summary
from paceline.schema import PacelineError
from paceline.simulate.cost import load_cost
from tiny_run import make_policy, tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("profile")
    return tiny_config(make_policy(root / "policy", max_position_embeddings=256), root / "run")


def test_every_pass_is_over_the_rows_and_drafts_that_it_is_named_by(config, monkeypatch):
    passes = []
    verify = HFEngine.step

    def counted(engine):
        before = engine.stats()
        rows, drafted = before.row_forwards, before.tokens_drafted
        done = verify(engine)
        after = engine.stats()
        if after.row_forwards > rows:  # what was measured is not decoded to its end
            passes.append((after.row_forwards - rows, after.tokens_drafted - drafted))
        return done

    monkeypatch.setattr(HFEngine, "step", counted)
    told = []
    found = profile(config, [1, 3], [0, 2, 5], passes=4, prompts=[7], told=told.append)
    pairs = [(rows, drafted) for rows in (1, 3) for drafted in (0, 2, 5)]
    assert [(point.rows, point.drafted) for point in found.points] == pairs
    assert told == found.points
    # In each of four turns a pass of every pair counts, behind two that do not.
    for index, (rows, drafted) in enumerate(pairs * 4):
        assert passes[index * 3 + 2] == (rows, rows * drafted)
    assert len(passes) == 4 * 6 * 3
    assert all(len(point.seconds) == 4 and min(point.seconds) > 0 for point in found.points)
    assert all(point.tokens == point.rows * (1 + point.drafted) for point in found.points)
    # Prompts of 7 tokens, and a token or little more in each of the passes up to the middle one.
    assert all(7 + 2 <= point.kv_tokens / point.rows <= 7 + 3 * (1 + point.drafted) for point in found.points)


def test_what_is_written_is_a_cost(config, tmp_path):
    found = profile(config, [1, 2], [0, 3], passes=3, prompts=[5], told=lambda _: None)
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(found))
    _, cost = load_cost(str(path))
    for point in found.points:
        middle = sorted(point.seconds)[1]
        assert cost.seconds(point.rows, point.tokens, 0.0) == pytest.approx(middle)
        assert point.median == middle
    assert msgspec.json.decode(path.read_bytes(), type=type(found)) == found


def test_longer_prompts_are_places_of_their_own_and_the_cost_knows_them(config, tmp_path):
    found = profile(config, [1, 2], [0, 2], passes=1, prompts=[90, 5], told=lambda _: None)
    assert [(p.prompt_tokens, p.rows, p.drafted) for p in found.points] == [
        (prompt, rows, drafted) for prompt in (5, 90) for rows in (1, 2) for drafted in (0, 2)
    ]
    assert all(0 < p.kv_tokens - p.rows * p.prompt_tokens <= p.rows * 3 * (1 + p.drafted) for p in found.points)
    assert [row[:2] for row in found.step_times] == [(1, 1), (1, 3), (2, 2), (2, 6)]
    assert [row[2] for row in found.step_times] == [p.seconds for p in found.points if p.prompt_tokens == 5]
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(found))
    _, cost = load_cost(str(path))
    for point in found.points:
        assert cost.seconds(point.rows, point.tokens, point.kv_tokens) == pytest.approx(point.seconds[0])


def test_a_profile_says_what_ran_it(config):
    ran = profile(config, [1], [0], passes=1, prompts=[5], told=lambda _: None).engine
    assert (ran.kind, ran.device, ran.graphs, ran.captured) == ("hf", "cpu", "NONE", [])
    assert re.fullmatch(r"transformers \d\S*, torch \d\S*", ran.version)
    assert not ran.async_scheduling
    assert not ran.prefix_caching


@pytest.mark.parametrize(
    ("rows", "drafted", "prompt", "message"),
    [
        ([1], [0], 0, r"--prompt \[0\]: give numbers of 1 or more"),
        (
            [300],
            [0, 6],
            8,
            "--rows 300 and --drafted 6: a pass of 2100 tokens is more than engine.max_batched_tokens=2048; raise it",
        ),
        ([], [0], 8, r"--rows \[\]: give numbers of 1 or more"),
        ([0, 4], [0], 8, r"--rows \[0, 4\]: give numbers of 1 or more"),
        ([1], [-1], 8, r"--drafted \[-1\]: give numbers of 0 or more"),
        ([1], [0], 254, "more than the context of 256; ask for less"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(config, rows, drafted, prompt, message):
    with pytest.raises(PacelineError, match=message) as error:
        profile(config, rows, drafted, passes=8, prompts=[prompt], told=lambda _: None)
    assert "\n" not in str(error.value)


def test_a_point_is_told_in_one_line():
    seconds = [0.001, 0.005, 0.002, 0.003, 0.004, 0.007, 0.006]
    point = Point(rows=8, drafted=3, tokens=32, kv_tokens=800, prompt_tokens=99, seconds=seconds)
    assert point.median == 0.004
    assert summary(point) == "8 rows, 3 drafted each: 4.0 ms a pass behind prompts of 99 (quartiles 2.0 to 6.0)"
