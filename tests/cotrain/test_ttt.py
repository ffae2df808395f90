"""Training-time test against a dense definition in float64: the loss and every gradient, packed or not."""

import numpy as np
import pytest
import torch

import dense_head
from paceline.config import HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import make_objective
from paceline.drafters.heads import make_head
from paceline.forward.taps import FINAL, Taps
from tiny_models import VOCABULARY, tiny

# (length, length of the prompt): prompts of one token, responses of one, and a document shorter than the passes.
SHAPES = ((12, 4), (9, 1), (4, 2), (7, 6), (15, 11))
KEYS = {"temperature": 0.7, "passes": 4, "decay": 0.8}


def documents_of(policy, layers, shapes=SHAPES, seed=0):
    """Random token sequences with the policy's states."""
    generator = np.random.default_rng(seed)
    taps = Taps(policy, (*layers, FINAL))
    documents = []
    for length, prompt in shapes:
        tokens = generator.integers(0, VOCABULARY, length).astype(np.int32)
        with taps.watching(), torch.no_grad():
            policy(input_ids=torch.from_numpy(tokens[:-1]).long()[None])
        states_PX = taps.take()[0]
        width = policy.config.hidden_size
        documents.append(Document(tokens, prompt, states_PX[:, :-width], states_PX[:, -width:]))
    taps.close()
    return documents


@pytest.fixture(scope="module")
def policy():
    return tiny("llama").requires_grad_(False)


def trained(policy, kind="eagle3", dtype="float64", **keys):
    """A head far from its start, with gradients on, and its objective."""
    head = make_head(kind, HeadConfig(init="random", dtype=dtype, **keys), policy, seed=3).requires_grad_(True)
    with torch.no_grad():
        for index, parameter in enumerate(head.parameters()):
            generator = torch.Generator().manual_seed(index)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return head, make_objective(head, Teacher.of(policy), **KEYS)


def gradients(head, loss):
    head.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


def dense_of(head, policy, documents):
    """The dense definition's loss, count, sums and gradients by parameter name."""
    weights = {name: p.detach().double().requires_grad_(True) for name, p in head.named_parameters()}
    ids = torch.arange(VOCABULARY) if head.policy_ids() is None else head.policy_ids()
    loss, count, sums = dense_head.training_time_test(
        dense_head.eagle3_pass,
        weights,
        head.config,
        lambda w, document: document.states_PS.double() @ w["fc.weight"].T,
        policy,
        lambda w: w["lm_head.weight"],
        ids,
        documents,
        *KEYS.values(),
    )
    loss.backward()
    return loss.detach(), count, sums, {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("vocabulary", [0, 17])
def test_loss_sums_and_every_gradient_are_those_of_the_dense_definition(policy, vocabulary):
    head, objective = trained(policy, vocabulary=vocabulary)
    documents = documents_of(policy, head.taps)
    loss, count, sums, grads = dense_of(head, policy, documents)
    assert objective.count(documents) == pytest.approx(count, rel=1e-15)
    own, own_sums = objective.loss(documents, denominator=objective.count(documents))
    own_grads = gradients(head, own)
    assert abs(own.item() - loss.item()) < 1e-12
    assert own_sums == pytest.approx(sums, abs=1e-11)
    for name, grad in grads.items():
        assert (own_grads[name] - grad).abs().max() < 1e-12, name
        assert grad.abs().max() > 1e-6, name
