"""The audit of the real vLLM: it finds vLLM's own faults where they are left alone, and none where they are mended."""

from contextlib import closing

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

import vllm_models  # noqa: F401  the environment in which vLLM runs here
from paceline.audit.certificate import read_certificate
from paceline.audit.run import audit
from paceline.audit.vllm_matrix import FEATURES
from paceline.cli import app
from paceline.cli.audit_vllm import vllm_subject
from paceline.config import load_config

pytestmark = pytest.mark.vllm


def audited(only, *settings, scale=0.1):
    with closing(vllm_subject("toy", load_config(None, ["engine.kind=vllm", *settings]), None, True)) as subject:
        return audit(subject, only=only, scale=scale)


UNMENDED = ("engine.vllm.mend=false", "allow_lossy=true")


def faults_of(certificate):
    return {(check.case, check.fault) for check in certificate.failed}


def test_the_audit_finds_by_itself_that_drafted_tokens_have_another_law():
    """Gone with the fault: when the unmended vLLM passes, the entry of ``workarounds.FAULTS`` can go."""
    found = audited(["plain"], *UNMENDED, scale=0.3)
    assert faults_of(found) == {("plain", "expand_batch_to_tokens (vllm#55005)")}
    assert {"token law", "sharpness", "likeliest token"} & {check.name for check in found.failed}
    assert min(check.p_value for check in found.checks if check.p_value is not None) < 1e-9
    assert found.exit_code == 1
    assert any("vllm#55005" in setting for setting in found.lossy)


def test_the_audit_finds_by_itself_what_a_refit_leaves_behind():
    """Without drafts, so that only the weights can be wrong; what fills up a fused layer may happen to be right."""
    found = audited(["plain", "refit", "refit, in part", "refit, tied"], "drafter.kind=none", *UNMENDED)
    tied, part = ("refit, tied", "tied_head"), ("refit, in part", "partial_layer (vllm#48312)")
    assert {tied} <= faults_of(found) <= {tied, part}
    assert ("refit, tied", "log-probabilities") in {(check.case, check.name) for check in found.failed}


def test_the_audit_finds_by_itself_that_top_k_ends_the_engine():
    found = audited(["top-k"], *UNMENDED)
    assert [(check.name, check.fault) for check in found.failed] == [("errors", "top_k_without_drafts")]


def test_the_mended_engine_is_certified_and_what_it_refuses_is_named(tmp_path):  # field C11, D6
    path = tmp_path / "certificate.json"
    result = CliRunner().invoke(app, ["audit", "--engine", "vllm", "--scale", "0.1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = read_certificate(path.read_bytes())
    assert found.verdict == "lossless"
    refused = {check.case: check.fault for check in found.checks if check.outcome == "refused"}
    assert refused == {"min-p": "ignored_parameters", "bias": "ignored_parameters", "trigger": None}
    assert {check.case for check in found.checks if check.case in FEATURES} == set(FEATURES)
    speculated = {check.case for check in found.checks if check.name == "speculation" and check.outcome == "pass"}
    assert speculated == set(FEATURES) - set(refused)
    assert found.accepted > 500
