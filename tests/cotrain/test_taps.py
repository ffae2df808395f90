"""Documents out of the policy's own passes: the right states, and nothing of the policy changes."""

import numpy as np
import pytest
import torch

from paceline.config import LoraConfig, PolicyConfig, RLConfig
from paceline.cotrain.taps import Collector, spread
from paceline.forward.taps import FINAL
from paceline.rl.batch import Batch
from paceline.rl.learner import Learner
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from tiny_policies import VOCABULARY, save_tiny

LAYERS = (0, 1)


def load(tmp_path, kind="llama", **settings):
    return Policy.load(PolicyConfig(path=str(save_tiny(tmp_path, kind)), dtype="float64", device="cpu", **settings), 0)


def rollouts(groups=3, size=3):
    """Siblings that agree for a while; the second group has equal rewards, so the update does not compute it."""
    draw = np.random.default_rng(0)
    prompts = [as_tokens(draw.integers(0, VOCABULARY, n)) for n in draw.integers(2, 9, groups)]
    opening = [draw.integers(0, VOCABULARY, 3) for _ in range(groups)]
    rows = [
        (g, np.concatenate([opening[g], draw.integers(0, VOCABULARY, n)])) for g in range(groups) for n in (1, 4, 2)
    ]
    return Batch(
        prompts=[prompts[g] for g, _ in rows],
        responses=[as_tokens(response) for _, response in rows],
        rewards=[0.5 if g == 1 else float(draw.random()) for g, _ in rows],
        group_ids=[g for g, _ in rows],
    )


@torch.no_grad()
def alone(policy, tokens):
    """States of one text by the model's own pass: the tapped layers, and what the output matrix reads."""
    ids = torch.from_numpy(tokens[:-1].astype(np.int64))[None]
    states = policy.model(input_ids=ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1), states[-1][0]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_documents_of_prefix_trees_hold_the_states_of_each_text_alone(tmp_path, kind):
    policy, batch = load(tmp_path, kind), rollouts()
    collector = Collector(policy.model, LAYERS)
    policy.logprobs(batch.prompts, batch.responses, 1.0, collector)
    documents = collector.documents()
    rows = list(zip(batch.prompts, batch.responses, strict=True))
    texts = {(*prompt.tolist(), *response.tolist()): len(prompt) for prompt, response in rows}
    assert {tuple(d.tokens.tolist()): d.prompt_length for d in documents} == texts
    assert len(documents) == len(texts) == len(rows)
    for document in documents:
        assert not document.states_PS.requires_grad
        assert not document.final_PH.requires_grad
        expected = alone(policy, document.tokens)
        # RMSNorm computes in float32 whatever the model's dtype.
        torch.testing.assert_close((document.states_PS, document.final_PH), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_shares_no_prefixes_is_read_row_by_row(tmp_path):
    policy, batch = load(tmp_path, "mamba"), rollouts()
    collector = Collector(policy.model, (0,))
    policy.logprobs(batch.prompts, batch.responses, 1.0, collector)
    for document in collector.documents():
        ids = torch.from_numpy(document.tokens[:-1].astype(np.int64))[None]
        states = policy.model(input_ids=ids, output_hidden_states=True).hidden_states
        # Mamba lists no embeddings before its layers.
        torch.testing.assert_close(document.states_PS, states[0][0].detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(document.final_PH, states[-1][0].detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, layers=2)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_and_updates_of_the_policy_are_bitwise_the_same_with_taps(tmp_path, lora, checkpointing):  # field K1
    batch, found = rollouts(), []
    for tapped in (False, True):
        policy = load(tmp_path, lora=lora)
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            policy.model.train()
            policy.model.enable_input_require_grads()
        learner = Learner(policy, RLConfig(lr=0.01, microbatch_tokens=24, inner_updates=2), 0.8)
        collector = Collector(policy.model, (*LAYERS, FINAL)) if tapped else None
        metrics = learner.update(batch, collector, range(len(batch.prompts)))
        found.append((policy.state(), learner.state(), metrics))
        if collector is not None:
            documents = collector.documents()
            texts = [d.tokens.tolist() for d in documents]
            assert len(texts) == len({tuple(t) for t in texts}) == 6, "what is computed again is not seen again"
            assert all(torch.equal(d.states_PS[:, -16:], d.final_PH) for d in documents)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
    np.testing.assert_equal(found[0][2], found[1][2])


def test_only_what_is_wanted_is_kept_whatever_the_microbatches(tmp_path):
    policy, batch = load(tmp_path), rollouts()
    found = []
    for microbatch_tokens in (12, 4096):
        learner = Learner(policy, RLConfig(lr=1e-9, microbatch_tokens=microbatch_tokens), 1.0)
        collector = Collector(policy.model, LAYERS)
        learner.update(batch, collector, [0, 4, 7])
        assert len(collector.documents()) == 2, "row 4 has no advantage and is not computed"
        learner.read(batch, [4], collector)
        found.append({tuple(d.tokens.tolist()): d.states_PS for d in collector.documents()})
        collector.close()
    assert found[0].keys() == found[1].keys() == {(*batch.prompts[i], *batch.responses[i]) for i in (0, 4, 7)}
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_the_order_of_the_documents_is_their_texts_own_whatever_the_order_of_the_passes(tmp_path):
    policy, batch = load(tmp_path), rollouts()
    # The same tokens, once with more of them in the prompt.
    rows = [*zip(batch.prompts, batch.responses, strict=True)]
    prompt, response = rows[1]
    rows.append((np.concatenate([prompt, response[:2]]), response[2:]))
    found = []
    for order in (rows, rows[::-1], [*rows[4:], *rows[:4]]):
        collector = Collector(policy.model, LAYERS)
        for first in range(0, len(order), 3):
            prompts, responses = zip(*order[first : first + 3], strict=True)
            policy.logprobs(prompts, responses, 1.0, collector)
        found.append([(d.tokens.tolist(), d.prompt_length) for d in collector.documents()])
        collector.close()
    assert len(found[0]) == len(rows)
    assert found[0] == found[1] == found[2]


def test_hooks_are_gone_after_close(tmp_path):
    policy = load(tmp_path)
    collector = Collector(policy.model, LAYERS)
    collector.close()
    assert not any(module._forward_hooks for module in policy.model.modules())


def test_the_choice_takes_one_of_each_group_in_turn_within_the_limit():
    lengths, groups = [10, 10, 10, 30, 30, 30, 5, 5, 5], list("aaabbbccc")
    assert spread(lengths, groups, 0) == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    assert spread(lengths, groups, 60) == [0, 3, 6, 1, 7]
    assert spread(lengths, groups, 60, rows={8, 4, 2}) == [2, 4, 8]
    assert spread(lengths, groups, 4) == []


def test_a_collector_takes_no_more_tokens_than_it_may(tmp_path):
    policy, batch = load(tmp_path), rollouts()
    most = len(batch.prompts[0]) + len(batch.responses[0]) + 3
    collector = Collector(policy.model, LAYERS, most)
    policy.logprobs(batch.prompts, batch.responses, 1.0, collector)
    assert 0 < collector.tokens == sum(len(d.tokens) for d in collector.documents()) <= most
