"""The audit passes what is right and catches every broken engine, for the reason it is broken."""

import pytest
from broken.registry import BROKEN, CONTROLS

from paceline.audit.run import audit
from paceline.audit.subject import ToySubject
from paceline.schema import PacelineError

#: Which checks a kind of fault must fail, at least one of them; and the case of the default audit that shows it.
CAUGHT_BY = {
    "law": {"token law", "pair law", "sharpness", "likeliest token", "first pair", "support", "tail law"},
    "noise": {"on against off", "replicas", "batch", "group diversity"},
    "logprobs": {"log-probabilities"},
    "ends": {"ends", "records", "length law"},
    "counters": {"counters", "records"},
    "errors": {"errors", "refusals"},
    "silent": {"speculation"},
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
    return ToySubject(target.build, name=target.name, keyed=getattr(target, "base", target.name) == "paceline", **options)


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_engine_is_caught_at_the_default_size(name):
    broken = BROKEN[name]
    found = audit(subject(broken, make_params=broken.make_params), only=[SHOWS_IN.get(name, "plain")])
    assert found.verdict == "not lossless"
    assert {check.name for check in found.failed} & CAUGHT_BY[broken.kind], [check.says for check in found.failed]
