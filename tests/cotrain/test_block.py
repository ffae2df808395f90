"""What a block head is trained on, against the same loss written down densely, block by block, in float64."""

import numpy as np
import pytest
import torch

from block_reference import block_rows
from paceline.config import HeadConfig
from paceline.cotrain.block import BlockObjective, sample_anchors
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.drafters.heads import make_head
from paceline.schema import as_tokens
from tiny_models import VOCABULARY, tiny

BLOCK, DECAY, TEMPERATURE = 4, 0.7, 0.8
SHAPES = ((1, 9), (5, 23), (7, 8), (3, 60))


def head_of(policy, dtype="float64"):
    head = make_head("block", HeadConfig(init="random", taps=(0, 1), layers=2, block=BLOCK, dtype=dtype), policy, 3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head.requires_grad_(True)


def documents_of(policy, shapes=SHAPES, seed=0):
    rng, documents = np.random.default_rng(seed), []
    for prompt_length, length in shapes:
        tokens = as_tokens(rng.integers(1, VOCABULARY, length))
        with torch.no_grad():
            out = policy(torch.from_numpy(tokens[None, :-1].astype(np.int64)), output_hidden_states=True)
        states = torch.cat([out.hidden_states[1][0], torch.randn(length - 1, 32, dtype=torch.float64)], dim=-1)
        documents.append(Document(tokens, prompt_length, states, out.hidden_states[-1][0]))
    return documents


def objective_of(head, policy):
    return BlockObjective(head, Teacher.of(policy), temperature=TEMPERATURE, decay=DECAY)


def dense(head, policy, documents, update=0):
    """The weighted sum of the loss, the weights' sum, and the overlap of the first mask, one block after the other."""
    weights, matrix = head.checkpoint(), policy.get_output_embeddings().weight.detach()
    loss, count, overlap = 0.0, 0.0, 0.0
    for document in documents:
        for anchor in sample_anchors(document, BLOCK, update).tolist():
            embedding = policy.get_input_embeddings().weight[int(document.tokens[anchor])].detach()
            rows = block_rows(weights, head.config, document.states_PS, embedding, anchor, BLOCK)
            for j in range(1, BLOCK + 1):
                if anchor + j < len(document.tokens):
                    law = (document.final_PH[anchor + j - 1] @ matrix.T / TEMPERATURE).softmax(-1)
                    log_q = (rows[j - 1] @ matrix.T / TEMPERATURE).log_softmax(-1)
                    loss = loss - DECAY ** (j - 1) * (law * log_q).sum()
                    count += DECAY ** (j - 1)
                    overlap += float(torch.minimum(law, log_q.detach().exp()).sum()) if j == 1 else 0.0
    return loss, count, overlap


def gradients(head, loss):
    head.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_loss_and_gradients_are_those_of_a_dense_implementation(architecture):
    policy = tiny(architecture)
    head, documents = head_of(policy), documents_of(policy)
    objective = objective_of(head, policy)
    expected, count, overlap = dense(head, policy, documents)
    assert objective.count(documents) == pytest.approx(count, rel=1e-14)
    loss, sums = objective.loss(documents, denominator=count)
    assert abs((loss - expected / count).item()) < 1e-12
    assert sums["overlap_1"] == pytest.approx(overlap, abs=1e-11)
    ours, theirs = gradients(head, loss), gradients(head, expected / count)
    for name, grad in theirs.items():
        assert grad.abs().max() > 1e-9
        assert (ours[name] - grad).abs().max() < 1e-12, name


def test_packed_documents_and_micro_batches_sum_to_the_same_and_blocks_do_not_see_each_other():
    policy = tiny()
    head, documents = head_of(policy), documents_of(policy)
    objective = objective_of(head, policy)
    count = objective.count(documents)
    packed, sums = objective.loss(documents, denominator=count)
    whole = gradients(head, packed)
    parts = [objective.loss([document], denominator=count) for document in reversed(documents)]
    assert abs((packed - sum(loss for loss, _ in parts)).item()) < 1e-13
    apart = gradients(head, sum(loss for loss, _ in parts))
    assert all((whole[name] - apart[name]).abs().max() < 1e-13 for name in whole)
    for name, value in sums.items():
        assert value == pytest.approx(sum(own.get(name, 0.0) for _, own in parts), abs=1e-11)


def test_single_precision_is_near_the_dense_implementation():
    policy = tiny(dtype=torch.float32)
    head = head_of(policy, "float32")
    exact = head_of(tiny())
    documents = documents_of(tiny())
    expected, count, _ = dense(exact, tiny(), documents)
    loss, _ = objective_of(head, policy).loss(documents, denominator=count)
    assert abs((loss - expected / count).item()) < 1e-5


def test_the_policy_gets_no_gradient_from_the_drafters_loss():  # field K1
    policy = tiny().requires_grad_(True)
    head, documents = head_of(policy), documents_of(policy)
    for document in documents:
        document.states_PS.requires_grad_(True)
        document.final_PH.requires_grad_(True)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    loss, _ = objective_of(head, policy).loss(documents, denominator=1.0)
    loss.backward()
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(document.states_PS.grad is None and document.final_PH.grad is None for document in documents)
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.named_parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())


def test_a_mask_is_taught_the_law_of_its_own_token_and_not_of_the_next():  # field K3
    policy = tiny()
    head, (document,) = head_of(policy), documents_of(policy, ((3, 30),))
    objective = objective_of(head, policy)
    count = objective.count([document])
    right = objective.loss([document], denominator=count)[0].item()
    shifted = Document(document.tokens, 3, document.states_PS, document.final_PH.roll(-1, 0))
    expected, _, _ = dense(head, policy, [document])
    assert right == pytest.approx((expected / count).item(), abs=1e-12)
    assert abs(objective.loss([shifted], denominator=count)[0].item() - right) > 1e-3


def test_anchors_are_drawn_from_the_response_by_the_document_and_the_update_alone():
    policy = tiny()
    document, other = documents_of(policy, ((5, 60), (5, 60)))
    anchors = sample_anchors(document, BLOCK, 0)
    assert len(anchors) == 14
    assert len(set(anchors.tolist())) == 14
    assert anchors.min() >= 4
    assert anchors.max() <= 58
    assert (sample_anchors(document, BLOCK, 0) == anchors).all()
    assert (sample_anchors(document, BLOCK, 1) != anchors).any()
    assert (sample_anchors(other, BLOCK, 0) != anchors).any()
    # Every place where a draft can begin is drawn in the long run.
    seen = np.concatenate([sample_anchors(document, BLOCK, update) for update in range(60)])
    assert set(seen.tolist()) == set(range(4, 59))
