"""Audits of language models: ours and transformers' engines pass, a bent one fails, rounding is no fault."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from paceline.audit.conduct import compare
from paceline.audit.models import PROMPTS, ModelSubject, foreign_engines, generate_engines, paceline_engines
from paceline.audit.run import audit
from paceline.cli import app
from paceline.config import load_config
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.rl.policy import Policy
from paceline.sampling.accept import accept
from paceline.schema import PacelineError, SamplingParams
from tiny_policies import save_tiny


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tiny") / "llama")
    return Policy.load(load_config(None, [f"policy.path={folder}", "policy.dtype=float64"]).policy, 0)


def subject(policy, build, keyed, witness=True):
    return ModelSubject(
        build,
        name="tiny",
        engine_name="engine",
        settings={},
        prompts=[policy.encode_prompt(text) for text in PROMPTS[:4]],
        vocabulary=policy.model.config.vocab_size,
        context=policy.model.config.max_position_embeddings,
        eos_ids=policy.eos_ids,
        decode=lambda ids: policy.decode(np.asarray(ids)),
        witness=policy.engine_model() if witness else None,
        keyed=keyed,
        exact=keyed,
        siblings=6,
        max_tokens=12,
    )


def ours(policy, config=None):
    return paceline_engines(
        policy.engine_model(),
        config or load_config(None, ["engine.slots=8"]),
        [policy.encode_prompt(text) for text in PROMPTS[:4]],
        eos_ids=policy.eos_ids,
        decode=lambda ids: policy.decode(np.asarray(ids)),
        drafter=HistoryDrafter,
    )


def test_the_reference_engine_is_certified_with_its_tokens(policy):
    found = audit(subject(policy, ours(policy), keyed=True))
    assert found.verdict == "lossless", [check.says for check in found.failed]
    assert {"on against off", "replicas", "batch", "token law", "log-probabilities"} <= {c.name for c in found.checks}
    assert found.drafted > 500


def test_the_invariant_mode_is_certified_bit_for_bit_and_the_ordinary_one_is_not(tmp_path):
    folder = save_tiny(tmp_path / "llama")
    for invariant in (True, False):
        config = load_config(None, [f"policy.path={folder}", f"engine.invariant={invariant}".lower(), "engine.slots=8"])
        loaded = Policy.load(config.policy, 0)
        audited = subject(loaded, ours(loaded, config), keyed=True)
        audited.bitwise, audited.tolerance, audited._rounding = True, 2e-3, 1e-3
        found = audit(audited, only=["plain", "cool"], scale=0.5)
        names = {check.name for check in found.failed}
        wanted = set() if invariant else {"on against off", "replicas", "batch"}  # replicas share the pass with fewer
        assert names == wanted, [check.says for check in found.failed]


def test_transformers_assisted_generation_is_certified_by_its_law_and_what_it_refuses_is_named(policy):
    decode = lambda ids: policy.decode(np.asarray(ids))  # noqa: E731
    build = generate_engines(
        policy.engine_model(), {"prompt_lookup_num_tokens": 3}, eos_ids=policy.eos_ids, decode=decode, allow_lossy=False
    )
    found = audit(subject(policy, build, keyed=False), only=["plain", "cool", "penalties", "short"], scale=0.5)
    assert found.verdict == "lossless", [check.says for check in found.failed]
    assert [check.case for check in found.checks if check.outcome == "refused"] == ["penalties"]


def test_without_a_witness_speculation_on_is_compared_with_off(policy):
    found = audit(subject(policy, ours(policy), keyed=False, witness=False), only=["plain"])
    assert found.verdict == "lossless"
    assert {check.says.split(":")[0] for check in found.checks if check.name == "on against off"} >= {"lengths"}


def bent(logits_NV, rows, run_seed):
    """Samples at a temperature of two thirds of what was asked."""
    return accept(1.5 * logits_NV, rows, run_seed)


def test_a_verifier_that_sharpens_the_law_is_caught_and_its_stamp_comes_first(policy):
    model = policy.engine_model()

    def build(speculate, slots):
        drafter = HistoryDrafter() if speculate else None
        return HFEngine(model, drafter=drafter, verifier=bent, allow_lossy=True, eos_ids=policy.eos_ids)

    found = audit(subject(policy, build, keyed=False), only=["plain"])
    assert found.verdict == "lossy by setting"
    assert {"sharpness", "token law", "log-probabilities"} & {check.name for check in found.failed}


def test_an_engine_of_ones_own_is_built_by_a_function_and_must_be_one(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def make(policy, speculate, slots):\n    return object()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacelineError, match="mine:make: what it returns has no method submit"):
        foreign_engines("mine:make", "x")(True, None)


def test_a_token_at_the_edge_of_a_cut_off_is_known_as_such(policy):
    audited = subject(policy, ours(policy), keyed=True)
    audited._rounding = 1e-3
    case = audited.cases(1.0)[2]
    params = SamplingParams(**case.params)
    engine = audited.engine(case, speculate=False)
    (rollout, *_) = engine.generate(case.make_requests(params, 0)[:1])
    engine.close()
    assert not audited.at_edge(case, rollout, 0, params)
    # The token of rank top_k + 1, a hair below the last that is kept.
    raw = audited._logits(case, rollout)[0]
    order = np.argsort(-raw)
    last, next_one = order[params.top_k - 1], order[params.top_k]
    audited._logits = lambda case, rollout: np.where(np.arange(len(raw)) == next_one, raw[last] - 1e-5, raw)[None]
    rollout.tokens = np.array([next_one], dtype=np.int32)
    assert audited.at_edge(case, rollout, 0, params)
    assert compare([rollout], [rollout], lambda *_: False).first is None


def test_the_command_writes_its_certificate_and_says_so_by_its_exit_code(tmp_path):
    path = tmp_path / "certificate.json"
    result = CliRunner().invoke(app, ["audit", "--case", "plain", "--scale", "0.1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "lossless: all" in result.output
    written = json.loads(path.read_text())
    assert written["verdict"] == "lossless"
    assert written["digest"]
    assert written["power"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "transformers"], "--policy toy has an engine and prompts of its own"),
        (["--setting", "k=1"], "--setting k=1: belongs to --engine transformers"),
        (["--case", "none"], "the audit has no case 'none'"),
        (["--policy", "nowhere/at/all"], "policy.path=nowhere/at/all"),
        (
            ["--policy", "{tiny}", "--engine", "sglang"],
            "--engine sglang: must be paceline, transformers, vllm or MODULE:FUNCTION",
        ),
        (["--policy", "{tiny}", "--prompts", "missing.txt"], "--prompts missing.txt: cannot be read"),
        (["--policy", "{tiny}", "--engine", "transformers", "--setting", "x"], "--setting x: must be KEY=VALUE"),
        (["--policy", "{tiny}", "--engine", "transformers", "--setting", "typical=1"], "not known to be lossless"),
    ],
)
def test_what_cannot_be_audited_is_one_line(options, says, tmp_path):
    tiny = str(save_tiny(tmp_path / "tiny"))
    result = CliRunner().invoke(app, ["audit", *[option.format(tiny=tiny) for option in options]])
    assert result.exit_code == 2
    assert says in result.output.replace("\n", " ") or says in result.stderr.replace("\n", " ")


def test_the_witness_is_not_the_engines_own_forward(policy):
    audited = subject(policy, ours(policy), keyed=True)
    case = audited.cases(1.0)[0]
    engine = audited.engine(case, speculate=True)
    (rollout,) = engine.generate(case.make_requests(SamplingParams(max_tokens=8), 0)[:1])
    engine.close()
    raw, law = audited.laws(case, rollout, SamplingParams(max_tokens=8))
    assert raw.shape == law.shape == (len(rollout.tokens), policy.model.config.vocab_size)
    assert torch.allclose(torch.tensor(law).sum(1), torch.ones(len(law), dtype=torch.float64))
