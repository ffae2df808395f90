"""The real TRL with the real vLLM in its process: weights arrive, drafts are accepted, the law is the trainer's."""

import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("trl")
pytest.importorskip("vllm")

import vllm_models  # noqa: F401  the environment that vLLM reads
from paceline.audit.stats import g_test
from paceline.engines.guard import LossyError
from paceline.integrations.trl import TrlError, rollout_func, speculate
from paceline.typed_yaml import ConfigError
from tiny_run import make_policy
from trl_runs import curve, make_trainer

pytestmark = pytest.mark.vllm

HISTORY = {"budget": {"mode": "fixed"}, "drafter": {"budget": 4}}
NGRAM = {"drafter": {"kind": "ngram", "budget": 4}}
NOTHING = {"drafter": {"kind": "none"}}
OPTIONS = {"dtype": "float32", "max_num_batched_tokens": 512}
COLOCATED = {
    "dtype": "float32",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 64,
    "vllm_gpu_memory_utilization": 0.2,
}
VOCABULARY = 12
PROMPT = [1, 4, 5, 6, 4, 2]


@pytest.fixture(autouse=True)
def environment():
    """TRL leaves ranks in the environment, which later trainers would take for torch.distributed's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def spread_out(folder, **changes):
    """A tiny policy whose laws have a shape, so that drafts are accepted and an update shows."""
    model = AutoModelForCausalLM.from_pretrained(make_policy(folder, head_dim=32, **changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(8.0 if "embed" in name else 3.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return spread_out(tmp_path_factory.mktemp("policy"))


@torch.no_grad()
def law_of_pairs(model, prompt):
    """The law (V * V) of the first two tokens of a response."""
    texts = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    logits = model(texts).logits[:, -2:].double()
    return (logits[0, 0].softmax(-1)[:, None] * logits[:, 1].softmax(-1)).flatten().numpy()


def pairs_of(llm, prompt, count=1500):
    """How often vLLM samples which first two tokens (V * V)."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt}] * count, sampling_params=params, use_tqdm=False)
    pairs = [VOCABULARY * output.outputs[0].token_ids[0] + output.outputs[0].token_ids[1] for output in outputs]
    return np.bincount(pairs, minlength=VOCABULARY**2)


@pytest.mark.parametrize(
    ("settings", "is_tied"), [(HISTORY, True), (NGRAM, False), (NOTHING, False)], ids=["history", "ngram", "plain"]
)
def test_vllm_samples_the_law_of_the_weights_that_the_trainer_has_by_then(settings, is_tied, tmp_path, caplog):
    from vllm import SamplingParams

    path = spread_out(tmp_path / "policy", tie_word_embeddings=is_tied)
    with speculate(settings, **OPTIONS) as drafting:
        trainer = make_trainer(path, tmp_path, save_strategy="steps", save_steps=1, **COLOCATED)
    trainer.train()
    trained = drafting.stats()
    trainer.vllm_generation.sync_weights()
    pairs = pairs_of(drafting.llm, PROMPT)
    after = drafting.stats()
    if drafts := settings is not NOTHING:
        with pytest.raises(TrlError, match=r"min_p=0\.1: vLLM .* does not apply it where it speculates"):
            drafting.llm.generate([{"prompt_token_ids": PROMPT}], sampling_params=SamplingParams(min_p=0.1))
    with pytest.raises(TrlError, match="a second engine was asked for within one block"):
        drafting.start(None)
    drafting.close()
    with pytest.raises(TrlError, match="no engine runs"):
        _ = drafting.llm
    differences = curve(trainer, "sampling/sampling_logp_difference/max")
    ratios = curve(trainer, "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max")
    figures = curve(trainer, "paceline/tokens_per_forward", "paceline/generation_seconds")
    before = law_of_pairs(AutoModelForCausalLM.from_pretrained(path), PROMPT)
    law = law_of_pairs(trainer.model, PROMPT)
    assert len(differences) == len(figures) == 3
    assert max(differences)[0] < 1e-4
    assert np.abs(np.array(ratios) - 1).max() < 1e-3
    assert (trained.weight_version, after.weight_version) == (2, 3)
    assert g_test(pairs, law).p_value > 1e-4
    assert g_test(pairs, before).p_value < 1e-8
    assert (trained.tokens_accepted > 0) is drafts
    assert all((tokens > 1) is drafts for tokens, _ in figures)
    if settings is HISTORY:
        assert after.tokens_accepted - trained.tokens_accepted > 100
        resumes(path, tmp_path)
    assert "starts anew" not in caplog.text


def resumes(path, out):
    """A run that is resumed starts from what the checkpoint remembers, and its weights arrive."""
    with speculate(HISTORY, **OPTIONS) as drafting:
        trainer = make_trainer(path, out, **COLOCATED)
    trainer.train(resume_from_checkpoint=out / "checkpoint-2")
    remembered, stats = len(drafting.history_snapshot()), drafting.stats()
    drafting.close()
    kept = (out / "checkpoint-2" / "paceline-0.plh").stat().st_size
    assert remembered > kept > 0
    assert stats.tokens_emitted <= 12 * 12
    assert stats.weight_version == 2
    assert max(curve(trainer, "sampling/sampling_logp_difference/max")[-1:])[0] < 1e-4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seed": 1}, "seed is what TRL gives vLLM itself"),
        ({"speculative_config": {}}, "speculative_config is set here; use drafter"),
        ({"disable_log_stats": True}, "disable_log_stats is set here; leave it out"),
    ],
)
def test_what_contradicts_trl_is_one_line_before_a_model_is_loaded(options, line, policy, tmp_path):
    with pytest.raises(TrlError, match=line), speculate(HISTORY, **options):
        make_trainer(policy, tmp_path, **COLOCATED)


def test_an_engine_that_no_trainer_starts_is_refused(policy):
    from trl.generation import vllm_generation

    with pytest.raises(TrlError, match="was not started by a trainer"), speculate(HISTORY):
        vllm_generation.LLM(model=str(policy))


@pytest.mark.parametrize(
    ("settings", "error", "line"),
    [
        (HISTORY, TrlError, "TRL started no engine within the block; build the trainer within the block"),
        ({"drafter": {"knid": "none"}}, ConfigError, "speculate.*knid"),
        ({"engine": {"slots": 4}}, ConfigError, "engine.slots has no say where TRL drives vLLM"),
        ({"engine": {"vllm": {"sleep": 1}}}, ConfigError, "engine.vllm.sleep has no say"),
        ({"cotrain": {"when": "every"}}, ConfigError, "cotrain has no say"),
        (
            {"engine": {"vllm": {"speculative": {"rejection_sample_method": "synthetic"}}}},
            LossyError,
            "not known to be lossless",
        ),
    ],
)
def test_settings_are_refused_before_anything_is_started(settings, error, line):
    from trl.generation import vllm_generation

    make = vllm_generation.LLM
    with pytest.raises(error, match=line), speculate(settings):
        pass
    assert vllm_generation.LLM is make
    with pytest.raises(ConfigError, match="speculate: tokens: budget: -1 must be"), speculate(tokens=-1):
        pass


def test_rollouts_that_paceline_decodes_by_vllm_have_the_trainers_log_probabilities(policy, tmp_path):
    engine = {"kind": "vllm", "slots": 8, "max_batched_tokens": 256, "context": 64}
    rollouts, differences = rollout_func({**HISTORY, "engine": engine}), []

    def watching(prompts, trainer):
        found = rollouts(prompts, trainer)
        for prompt, said, logprobs in zip(*found.values(), strict=True):
            ids = torch.tensor([prompt + said])
            with torch.no_grad():
                own, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), len(said)
                )
            differences.append(float((own[0] - torch.tensor(logprobs)).abs().max()))
        return found

    make_trainer(policy, tmp_path, watching, dtype="float32", max_steps=2).train()
    accepted = rollouts.stats().tokens_accepted
    rollouts.close()
    assert len(differences) == 24
    assert max(differences) < 1e-4
    assert accepted > 0
