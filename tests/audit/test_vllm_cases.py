"""The cases of the audit of vLLM on engines that need no vLLM: a right one passes all, broken ones fail theirs."""

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from paceline.audit.certificate import Check, read_certificate
from paceline.audit.run import audit
from paceline.audit.vllm import VllmSubject, World
from paceline.audit.vllm_faults import explained
from paceline.audit.vllm_matrix import FEATURES, summary, support_table
from paceline.audit.vllm_toys import CHARACTERS, CONTEXT, EOS, save_toy, tokenizer
from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.schema import as_tokens

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("toys")


class StaleHead(HFEngine):
    """A refit leaves the output's matrix as it was."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.whole = model

    def load_weights(self, version, tensors):
        old = self.whole.lm_head.weight.detach().clone()
        super().load_weights(version, tensors)
        self.whole.lm_head.weight = torch.nn.Parameter(old, requires_grad=False)


class KeepsAborted(HFEngine):
    """Aborts nothing."""

    def abort(self, request_id):
        pass


class Leaks(HFEngine):
    """Text is cut at a stop string, tokens are not."""

    def submit(self, requests):
        self._stops = requests[0].params.stop
        for request in requests:
            request.params = msgspec.structs.replace(request.params, stop=())
        super().submit(requests)

    def step(self):
        done = super().step()
        for rollout in done:
            found = [rollout.text.find(stop) for stop in self._stops if stop in rollout.text]
            if found:
                rollout.text, rollout.finish_reason = rollout.text[: min(found)], "stop"
        return done


def subject(folder, kind=HFEngine):
    paths = {world: folder / world for world in ("policy", "tied")}
    for world, path in paths.items():
        if not path.exists():
            save_toy(path, tied=world == "tied")
    models = {world: LlamaForCausalLM.from_pretrained(path).eval() for world, path in paths.items()}
    words = tokenizer()

    def decode(ids):
        return words.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def build(wanted):
        model = LlamaForCausalLM.from_pretrained(wanted.path)
        options = {
            "config": EngineConfig(slots=wanted.slots or 32),
            "budget_config": BudgetConfig(mode="fixed"),
            "decode": decode,
            "tokenizer": words,
            "refit_names": wanted.refit_names,
        }
        return kind(model, drafter=HistoryDrafter() if wanted.speculate else None, **options)

    return VllmSubject(
        build,
        {world: World(paths[world], models[world]) for world in paths},
        name="toy",
        engine_name="engine",
        settings={},
        prompts=[as_tokens(words(text)["input_ids"]) for text in ("Hello", "ab", "1 2", "x")],
        context=CONTEXT,
        eos_ids=(EOS,),
        decode=decode,
        tokenizer=words,
        siblings=40,
        max_tokens=12,
    )


def test_a_right_engine_passes_what_only_the_audit_of_vllm_asks(folder):
    unusual = ["limit", "stop strings", "grammar", "siblings", "company", "aborts", "raw", "seeds"]
    with closing(subject(folder)) as right:
        found = audit(right, only=[*unusual, "refit", "refit, in part", "refit, tied"], scale=0.1)
    assert found.verdict == "lossless", [(check.case, check.name, check.says) for check in found.failed]
    assert "alone, again" in {check.name for check in found.checks}
    assert found.drafted > 500


@pytest.mark.parametrize(
    ("kind", "case", "check"),
    [
        (StaleHead, "refit, tied", "log-probabilities"),
        (KeepsAborted, "aborts", "errors"),
        (Leaks, "stop strings", "ends"),
    ],
)
def test_a_broken_engine_fails_its_case(folder, kind, case, check):
    with closing(subject(folder, kind)) as broken:
        found = audit(broken, only=[case], scale=0.1)
    assert check in {failed.name for failed in found.failed}


def test_every_case_has_a_row_in_the_table(folder):
    with closing(subject(folder)) as any_subject:
        assert [case.name for case in any_subject.cases(1.0)] == list(FEATURES)


def test_the_toys_tokenizer_has_one_token_a_character_also_from_disk(folder):
    save_toy(folder / "words")
    loaded = AutoTokenizer.from_pretrained(folder / "words")
    ids = loaded(CHARACTERS)["input_ids"]
    assert ids == list(range(1, 64))
    assert loaded.decode(ids) == CHARACTERS


def test_a_fault_explains_its_own_marks_and_nothing_else(folder):
    with closing(subject(folder)) as any_subject:
        cases = {case.name: case for case in any_subject.cases(1.0)}
    here = {"expand_batch_to_tokens", "tied_head", "top_k_without_drafts"}
    law = {"name": "token law", "outcome": "fail", "says": "", "p_value": 0.0}

    def explains(case, ties=False, **check):
        return explained(Check(case=case, **{**law, **check}), cases[case], ties, here)

    assert explains("plain") == "expand_batch_to_tokens"
    assert explains("greedy") is None
    assert explains("plain", name="counters", p_value=None) is None
    assert explains("refit, tied", ties=True) == "tied_head"
    assert explains("refit, in part") == "expand_batch_to_tokens"
    empty = {"name": "errors", "p_value": None, "says": "max(): ... input.numel() == 0"}
    assert explains("top-k", **empty) == "top_k_without_drafts"
    assert explains("top-k", **{**empty, "says": "index 7 is out of bounds"}) == "expand_batch_to_tokens"


def test_the_table_says_honoured_refused_or_which_fault():
    checks = [
        Check(name="token law", case="plain", outcome="fail", says="", fault="bent (vllm#1)"),
        Check(name="ends", case="plain", outcome="fail", says=""),
        Check(name="ends", case="cool", outcome="pass", says=""),
        Check(name="refused", case="min-p", outcome="refused", says="", fault="ignored"),
        Check(name="refused", case="trigger", outcome="refused", says=""),
    ]
    table = support_table({"engine": msgspec.structs.replace(certificates()["drafting"], checks=checks)})
    rows = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:] if not line.endswith("|  |"))
    assert rows == {
        FEATURES["plain"]: "vLLM's fault vllm#1: token law; **fails**: ends",
        FEATURES["cool"]: "honoured",
        FEATURES["min-p"]: "refused: vLLM's fault `ignored`",
        FEATURES["trigger"]: "refused",
    }


def certificates():
    return {path.stem: read_certificate(path.read_bytes()) for path in sorted((DOCS / "vllm-support").glob("*.json"))}


def test_the_published_certificates_are_of_every_case_and_hold_no_unexplained_failure():
    published = certificates()
    assert set(published) == {"drafting", "plain", "unmended"}
    for name, found in published.items():
        assert {check.case for check in found.checks} >= set(FEATURES), name
        assert [(check.case, check.says) for check in found.failed if check.fault is None] == [], name
    assert published["drafting"].verdict == published["plain"].verdict == "lossless"
    assert "vLLM's fault vllm#55005" in support_table(published)
    assert "lossless" in summary(published["drafting"])
