"""The audit passes what is right and catches every broken engine, for the reason it is broken."""

import pytest

from broken.registry import BROKEN, CONTROLS
from paceline.audit.run import audit
from paceline.audit.subject import ToySubject
from paceline.schema import PacelineError

#: Which checks a kind of fault, or one by name, must fail, at least one of them; and the case that shows it.
CAUGHT_BY = {
    "law": {"token law", "pair law", "sharpness", "likeliest token", "first pair", "support", "tail law"},
    "logprobs": {"log-probabilities"},
    "ends": {"ends", "records", "length law"},
    "counters": {"counters", "records"},
    "errors": {"errors", "refusals"},
    "silent": {"speculation"},
    "own-noise": {"replicas"},
    "batch-keyed-noise": {"batch"},
    "shared-stream": {"group diversity"},
}
SHOWS_IN = {
    "law-before-top-k": "top two", "temperature-ignored": "heat", "temperature-twice": "heat", "no-truncation": "one",
    "own-noise": "context", "shared-stream": "groups", "batch-keyed-noise": "context", "uniforms-24": "tail",
    "zero-for-accepted": "context", "silently-plain": "raw", "processed-in-place": "raw", "first-of-run": "context",
    "wrong-mode": "half", "raw-where-accepted": "half", "cap-hides-stop": "five", "leaks-past-stop": "context",
    "last-token-only": "context", "one-more": "seven", "one-fewer": "seven", "counts-beyond-end": "context",
    "empty-draft-fails": "ragged", "cuts-early": "limit", "prefix-of-pass": "repeats", "zero-penalty": "refusals",
    "state-keeps-rejected": "counts", "parameters-ignored": "biased", "stop-strings-ignored": "refusals",
}  # fmt: skip


def subject(target, **options):
    return ToySubject(
        target.build, name=target.name, keyed=getattr(target, "base", target.name) == "paceline", **options
    )


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_engine_is_caught_at_the_default_size(name):
    broken = BROKEN[name]
    found = audit(subject(broken, make_params=broken.make_params), only=[SHOWS_IN.get(name, "plain")])
    assert found.verdict == "not lossless"
    wanted = CAUGHT_BY[name] if name in CAUGHT_BY else CAUGHT_BY[broken.kind]
    assert {check.name for check in found.failed} & wanted, [check.says for check in found.failed]


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_right_passes(name):  # field A18
    cases = ["plain", "biased", "tree", "penalties", "cut", "five", "refusals"]
    found = audit(subject(CONTROLS[name]), only=cases, scale=0.3)
    assert found.verdict == "lossless", [check.says for check in found.failed]
    assert found.exit_code == 0
    assert found.accepted > 600


def test_the_whole_audit_passes_at_a_small_size():
    found = audit(ToySubject(), seed=1, scale=0.02)
    assert found.verdict == "lossless", [check.says for check in found.failed]
    assert {check.case for check in found.checks} > {"groups", "tail", "greedy", "limit"}


def test_the_digest_is_a_function_of_the_seed_and_of_nothing_else():
    first, again, other = (audit(ToySubject(), seed=seed, only=["context"], scale=0.05) for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest


def test_an_unknown_case_is_one_line_with_the_known_ones():
    with pytest.raises(PacelineError, match="no case 'contexts'; there are plain, heat"):
        audit(ToySubject(), only=["contexts"])


def test_every_row_of_the_power_table_is_monotone_and_finite():
    found = audit(ToySubject(), only=["context", "plain"], scale=0.3)
    assert {row.name for row in found.power} >= {"token law", "pair law", "stop law", "length law", "sharpness"}
    for row in found.power:
        assert 0 < row.caught_half <= row.caught_90 <= row.caught_99 <= 1


def test_a_lossy_setting_is_a_verdict_of_its_own():
    class Lossy(ToySubject):
        def engine(self, case, speculate, *, slots=None):
            made = super().engine(case, speculate, slots=slots)
            made._stats.lossy = ("verifier=mine:typical",)
            return made

    found = audit(Lossy(), only=["plain"], scale=0.05)
    assert found.verdict == "lossy by setting"
    assert found.exit_code == 1
    assert "verifier=mine:typical" in found.message


def test_the_sequential_test_says_where_it_stopped_and_how_long_it_takes():
    wrong = audit(subject(BROKEN["temperature-ignored"]), only=["heat"])
    stopped = {live.name: live.stopped_at for live in wrong.live if live.rejects}
    assert set(stopped) == {"sharpness", "likeliest token"}
    assert all(0 < at < wrong.tokens / 4 for at in stopped.values())
    right = audit(ToySubject(), only=["heat"], scale=0.5)
    (needs,) = [live.needs for live in right.live if live.name == "likeliest token"]
    assert needs["0.02"] > needs["0.05"] > needs["0.1"] > 50
    assert not any(live.rejects for live in right.live)
