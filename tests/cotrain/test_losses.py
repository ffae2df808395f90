"""Soft cross-entropy in chunks: the closed-form gradient, the policy's law, and what is ever in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.cotrain import losses
from paceline.cotrain.losses import Teacher, soft_cross_entropy
from tiny_models import VOCABULARY, tiny

ROWS, STATES = 23, 9


def sides(dtype=torch.float64, hidden=32):
    generator = torch.Generator().manual_seed(0)
    read = torch.randn((ROWS, hidden), generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)
    final = torch.randn((STATES, hidden), generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(STATES, (ROWS,), generator=generator)
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return read, final, target, weight


@pytest.mark.parametrize("chunk", [VOCABULARY, 7 * VOCABULARY, 1 << 22])
@pytest.mark.parametrize("ids", [None, [3, 4, 9, 30, 39]], ids=["all tokens", "some tokens"])
def test_loss_gradients_and_overlap_are_those_of_the_whole_softmax(monkeypatch, chunk, ids):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    policy = tiny().requires_grad_(False)
    read, final, target, weight = sides()
    ids = None if ids is None else torch.tensor(ids)
    matrix = torch.randn((VOCABULARY if ids is None else len(ids), 32), dtype=torch.float64).requires_grad_(True)
    keys = {"temperature": 0.7, "denominator": 3.0, "policy_ids": ids, "weight_N": weight}
    loss, scores = soft_cross_entropy(read, matrix, Teacher.of(policy), final, target, **keys)
    (2 * loss).backward()
    own = [side.grad.clone() for side in (read, matrix)]
    read.grad = matrix.grad = None
    law = (policy.lm_head(final[target]) / 0.7).softmax(-1)
    law = law if ids is None else law[:, ids]
    log_q = (read @ matrix.T / 0.7).log_softmax(-1)
    rows = -(law * log_q).sum(-1)
    (2 * (weight * rows).sum() / 3.0).backward()
    assert abs(loss.item() - (weight * rows).sum().item() / 3) < 1e-12
    assert (scores.loss_N - rows).abs().max() < 1e-12
    assert (scores.overlap_N - torch.minimum(law, log_q.exp()).sum(-1)).abs().max() < 1e-12
    for side, grad in zip((read, matrix), own, strict=True):
        assert (side.grad - grad).abs().max() < 1e-12


def test_the_least_loss_is_the_law_on_the_draft_vocabulary_and_what_is_outside_weighs_nothing():
    policy = tiny().requires_grad_(False)
    _, final, _, _ = sides()
    ids, target = torch.tensor([3, 4, 9]), torch.arange(STATES)
    law = policy.lm_head(final).softmax(-1)[:, ids]
    # With an identity for a matrix, what is read are the logits.
    best = law.log().requires_grad_(True)
    loss, scores = soft_cross_entropy(
        best, torch.eye(3, dtype=torch.float64), Teacher.of(policy), final, target,
        temperature=1.0, denominator=1.0, policy_ids=ids,
    )  # fmt: skip
    loss.backward()
    assert best.grad.abs().max() < 1e-15
    mass, restricted = law.sum(-1), law / law.sum(-1, keepdim=True)
    assert (scores.loss_N - mass * torch.special.entr(restricted).sum(-1)).abs().max() < 1e-14
    assert (scores.overlap_N - mass).abs().max() < 1e-14


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


def test_logits_exist_for_a_chunk_at_a_time_of_the_policy_as_of_the_drafter(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    policy = tiny().requires_grad_(False)
    read, final, target, _ = sides()
    matrix = policy.lm_head.weight.clone().requires_grad_(True)
    with Largest() as largest:
        loss, _ = soft_cross_entropy(read, matrix, Teacher.of(policy), final, target, temperature=1.0, denominator=1.0)
        loss.backward()
    assert max(read.numel(), matrix.numel()) == 32 * VOCABULARY == largest.elements
    assert ROWS * VOCABULARY > 5 * 4 * VOCABULARY


def test_the_teacher_is_the_policy_s_own_law_caps_included():
    for architecture in ("llama", "gemma3"):
        policy = tiny(architecture).requires_grad_(False)
        if architecture == "gemma3":
            policy.config.final_logit_softcapping = 5.0
        ids = torch.arange(6)[None]
        final = policy.model(input_ids=ids).last_hidden_state[0]
        wanted = policy(input_ids=ids).logits[0]
        laws = Teacher.of(policy).laws(final, 0.5)
        assert (laws - (wanted / 0.5).softmax(-1)).abs().max() < 1e-12
        greedy = Teacher.of(policy).laws(final, 0.0)
        assert greedy.argmax(-1).tolist() == wanted.argmax(-1).tolist()
        assert greedy.sum(-1).tolist() == greedy.amax(-1).tolist() == [1.0] * 6


def test_a_denominator_must_be_given_and_positive():
    policy = tiny().requires_grad_(False)
    read, final, target, _ = sides()
    given = (read, policy.lm_head.weight, Teacher.of(policy), final, target)
    with pytest.raises(TypeError, match="denominator"):
        soft_cross_entropy(*given, temperature=1.0)
    with pytest.raises(ValueError, match="denominator=0"):
        soft_cross_entropy(*given, temperature=1.0, denominator=0)
