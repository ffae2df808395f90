import numpy as np
import pytest
import torch

from families import tiny_family
from paceline.config import LoraConfig, PolicyConfig
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from tiny_policies import VOCABULARY, save_tiny

ATTENTION = ("llama", "llama-tied", "qwen3", "gemma3", "mistral", "gpt2")


def tiny_policy(tmp_path, kind="llama", dtype="float64", **settings):
    return Policy.load(PolicyConfig(path=str(save_tiny(tmp_path, kind)), dtype=dtype, device="cpu", **settings), seed=0)


def siblings():
    """Two prompts, with responses that agree, fork early and late, repeat each other, and one that stands alone."""
    draw = np.random.default_rng(0)
    common = draw.integers(0, VOCABULARY, 6)
    tails = [draw.integers(0, VOCABULARY, n) for n in (3, 1, 5)]
    first, second = draw.integers(0, VOCABULARY, 7), draw.integers(0, VOCABULARY, 4)
    responses = [np.concatenate([common[:k], tail]) for k, tail in zip((6, 6, 2), tails, strict=True)]
    rows = [(first, responses[0]), (second, tails[0]), (first, responses[1]), (first, responses[0])]
    rows += [(first, responses[2]), (first, common), (second, tails[2])]
    return [as_tokens(prompt) for prompt, _ in rows], [as_tokens(response) for _, response in rows]


def row_by_row(policy, prompts, responses, temperature):
    """The definition: the model's own forward pass over each rollout alone."""
    logprobs, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.long)[None]
        law_NV = (policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        logprobs.append(law_NV.gather(1, ids[0, len(prompt) :, None])[:, 0])
        entropies.append(-(law_NV.exp() * law_NV).sum(-1).detach())
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("kind", [*ATTENTION, "mamba"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_and_entropies_are_those_of_the_rows_alone(tmp_path, kind, temperature):
    policy = tiny_policy(tmp_path, kind)
    prompts, responses = siblings()
    with torch.no_grad():
        got = policy.logprobs(prompts, responses, temperature)
        expected = row_by_row(policy, prompts, responses, temperature)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_soft_caps_and_sinks_are_scored_as_the_models_own_forward(tmp_path, family, temperature):
    model = tiny_family(family, dtype=torch.float64)
    save_tiny(tmp_path, "llama")  # for its tokenizer
    model.save_pretrained(tmp_path)
    settings = PolicyConfig(path=str(tmp_path), dtype="float64", device="cpu")
    policy = Policy.load(settings, seed=0)
    prompts, responses = siblings()
    prompts, responses = ([as_tokens(ids % 64) for ids in rows] for rows in (prompts, responses))
    with torch.no_grad():
        got = policy.logprobs(prompts, responses, temperature)
        policy.model.set_attn_implementation("eager")
        expected = row_by_row(policy, prompts, responses, temperature)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ATTENTION)
def test_gradients_through_shared_prefixes_are_those_of_the_rows_alone(tmp_path, kind):
    policy = tiny_policy(tmp_path, kind)
    prompts, responses = siblings()
    weights_N = torch.from_numpy(np.random.default_rng(1).normal(size=sum(map(len, responses))))
    gradients = []
    for score in (policy.logprobs, lambda *args: row_by_row(policy, *args)):
        logprobs_N, entropy_N = score(prompts, responses, 0.7)
        assert not entropy_N.requires_grad
        (weights_N * logprobs_N).sum().backward()
        gradients.append({name: p.grad for name, p in policy.trainable()})
        policy.model.zero_grad()
    # RMSNorm computes in float32 whatever the model's dtype, and so do its gradients.
    atol = 1e-9 if kind == "gpt2" else 5e-5
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=atol)
    assert max(float(g.abs().max()) for g in gradients[0].values()) > 0.1


def test_attention_models_share_prefixes_and_a_running_state_does_not(tmp_path):
    assert all(tiny_policy(tmp_path / kind, kind).scorer.shares_prefixes for kind in ATTENTION)
    assert not tiny_policy(tmp_path / "mamba", "mamba").scorer.shares_prefixes


def test_a_head_that_is_more_than_its_matrix_is_noticed(tmp_path):
    policy = tiny_policy(tmp_path)
    prompts, responses = siblings()
    forward = policy.model.forward

    def doubled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    policy.model.forward = doubled
    assert not policy.scorer.shares_prefixes
    with torch.no_grad():
        got, expected = (policy.logprobs(prompts, responses, 1.0), row_by_row(policy, prompts, responses, 1.0))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_a_response_alone_or_in_a_batch_has_the_same_logprobs(tmp_path):
    policy = tiny_policy(tmp_path)
    prompts, responses = siblings()
    with torch.no_grad():
        together, _ = policy.logprobs(prompts, responses, 1.0)
        alone = [policy.logprobs([p], [r], 1.0)[0] for p, r in zip(prompts, responses, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


def test_long_batches_are_scored_in_chunks_with_the_same_result(tmp_path, monkeypatch):
    policy = tiny_policy(tmp_path)
    prompts, responses = siblings()
    whole = policy.logprobs(prompts, responses, 1.0)
    monkeypatch.setattr("paceline.rl.scoring._CHUNK_ELEMENTS", 4 * VOCABULARY)
    torch.testing.assert_close(policy.logprobs(prompts, responses, 1.0), whole, rtol=0, atol=1e-12)


def test_layers_below_the_adapter_keep_no_activations(tmp_path):
    policy = tiny_policy(tmp_path, lora=LoraConfig(r=2, layers=1))
    tracked = []
    for layer in policy.model.get_decoder().layers:
        layer.register_forward_hook(lambda module, args, output: tracked.append(output.requires_grad))
    prompts, responses = siblings()
    assert policy.scorer.shares_prefixes
    tracked.clear()
    logprobs_N, _ = policy.logprobs(prompts, responses, 1.0)
    assert tracked == [False, False, True]
    logprobs_N.sum().backward()
    assert {name for name, p in policy.model.named_parameters() if p.grad is not None} == {
        name for name, p in policy.model.named_parameters() if p.requires_grad
    }


def test_bfloat16_is_scored_in_float32(tmp_path):
    policy = tiny_policy(tmp_path, dtype="bfloat16")
    prompts, responses = siblings()
    with torch.no_grad():
        logprobs_N, entropy_N = policy.logprobs(prompts, responses, 1.0)
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_law_is_refused(tmp_path, temperature):
    with pytest.raises(ValueError, match="temperature"):
        tiny_policy(tmp_path).logprobs([as_tokens([1])], [as_tokens([2])], temperature)
