"""Drafters that learn are certified, every kind; a law that is not the one drawn from and a lost drafter are caught."""

import pytest

from paceline.audit.learned import LearnedSubject
from paceline.audit.run import audit
from paceline.audit.subject import Joined, ToySubject
from paceline.drafters.block import BlockDrafter
from paceline.drafters.growth import Laws
from soft_drafting import MODES


@pytest.mark.parametrize("acceptance", MODES)
def test_every_drafter_that_learns_is_certified(acceptance):  # field E1
    subject, scale = LearnedSubject(acceptance), 0.125 if acceptance == "coupled" else 0.25
    kinds = [(case.drafter.kind, case.drafter.head.width) for case in subject.cases(1.0)]
    assert {kind for kind, _ in kinds} == {"eagle3", "mtp", "block", "draft_model", "hybrid"}
    assert ("eagle3", 3) in kinds
    found = audit(subject, scale=scale)
    assert found.verdict == "lossless", [check.says for check in found.failed]
    promised = {"on against off", "replicas", "batch"}
    assert promised & {check.name for check in found.checks} == (promised if acceptance == "coupled" else set())
    for case in subject.cases(scale):
        says = {check.name: check.says for check in found.checks if check.case == case.name}
        assert {"speculation", "log-probabilities"} <= says.keys()
        assert not says["speculation"].endswith(" 0 accepted"), case.name


def test_a_report_of_another_law_than_was_drawn_from_is_caught(monkeypatch):  # field A1, A2
    honest = Laws.of
    monkeypatch.setattr(Laws, "of", lambda laws, draft, depth: 2 * honest(laws, draft, depth))
    found = audit(LearnedSubject("rejection"), only=["draft model"], scale=2.0)
    assert found.verdict == "not lossless"
    assert {check.name for check in found.failed} & {"token law", "sharpness", "likeliest token"}


def test_a_drafter_that_is_lost_on_the_way_is_caught(monkeypatch):
    begin, calls = BlockDrafter._begin, []

    def fails_later(drafter, rows):
        calls.append(len(rows))
        if len(calls) % 4 == 0:
            raise RuntimeError("gone")
        return begin(drafter, rows)

    monkeypatch.setattr(BlockDrafter, "_begin", fails_later)
    found = audit(LearnedSubject(), only=["block"], scale=0.1)
    assert [(check.name, check.case) for check in found.failed] == [("speculation", "block")]
    assert "the drafter was lost; events: {'drafter_lost': 1}" in found.failed[0].says
    assert found.accepted


def test_subjects_that_are_audited_as_one_keep_their_own_engines_and_laws():
    joined = Joined(ToySubject(), LearnedSubject())
    found = audit(joined, only=["heat", "mtp"], scale=0.1)
    assert found.verdict == "lossless", [check.says for check in found.failed]
    assert {check.case for check in found.checks} == {"heat", "mtp"}
    assert found.engine == "toy engine, paceline"
