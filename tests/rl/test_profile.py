import msgspec
import pytest

from paceline.config import Config
from paceline.rl import profile as profiling
from paceline.rl.profile import Point, profile, summary
from paceline.schema import PacelineError
from paceline.simulate.cost import load_cost
from tiny_run import make_policy, tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("profile")
    return tiny_config(make_policy(root / "policy", max_position_embeddings=256), root / "run")


def test_every_pass_is_over_the_rows_and_drafts_that_it_is_named_by(config, monkeypatch):
    passes = []
    verify = profiling.HFEngine.step

    def counted(engine):
        before = engine.stats()
        rows, drafted = before.row_forwards, before.tokens_drafted
        done = verify(engine)
        after = engine.stats()
        passes.append((after.row_forwards - rows, after.tokens_drafted - drafted))
        return done

    monkeypatch.setattr(profiling.HFEngine, "step", counted)
    told = []
    found = profile(config, [1, 3], [0, 2, 5], passes=4, prompt=7, told=told.append)
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
    found = profile(config, [1, 2], [0, 3], passes=3, prompt=5, told=lambda _: None)
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(found))
    _, cost = load_cost(str(path))
    for point in found.points:
        middle = sorted(point.seconds)[1]
        assert cost.seconds(point.rows, point.tokens, 0.0) == pytest.approx(middle)
        assert point.median == middle
    assert msgspec.json.decode(path.read_bytes(), type=type(found)) == found


@pytest.mark.parametrize(
    ("change", "rows", "drafted", "prompt", "message"),
    [
        ("engine.kind=vllm", [1], [0], 8, "profiling is of the engine on transformers; set engine.kind=hf"),
        ("seed=0", [], [0], 8, r"--rows \[\]: give numbers of 1 or more"),
        ("seed=0", [0, 4], [0], 8, r"--rows \[0, 4\]: give numbers of 1 or more"),
        ("seed=0", [1], [-1], 8, r"--drafted \[-1\]: give numbers of 0 or more"),
        ("seed=0", [1], [0], 254, "more than the context of 256; ask for less"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(config, change, rows, drafted, prompt, message):
    own = msgspec.convert(msgspec.to_builtins(config), Config)
    if change.startswith("engine"):
        own.engine.kind = "vllm"
    with pytest.raises(PacelineError, match=message) as error:
        profile(own, rows, drafted, passes=8, prompt=prompt, told=lambda _: None)
    assert "\n" not in str(error.value)


def test_a_point_is_told_in_one_line():
    seconds = [0.001, 0.005, 0.002, 0.003, 0.004, 0.007, 0.006]
    point = Point(rows=8, drafted=3, tokens=32, kv_tokens=800, seconds=seconds)
    assert point.median == 0.004
    assert summary(point) == "8 rows, 3 drafted each: 4.0 ms a pass (quartiles 2.0 to 6.0)"
