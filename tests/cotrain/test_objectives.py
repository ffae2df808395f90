"""The objective of each kind of model that drafts; heads that carry a state have tests of their own."""

import pytest
import torch

from paceline.config import HeadConfig
from paceline.cotrain.block import BlockObjective
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import Distillation, Drawing, make_objective
from paceline.cotrain.ttt import TrainingTimeTest
from paceline.drafters.heads import make_head
from paceline.forward.pretrained import ModelError
from taught import SHAPES, documents_of
from tiny_models import VOCABULARY, tiny

KEYS = {"temperature": 0.7, "passes": 3, "decay": 0.8}


@pytest.fixture(scope="module")
def policy():
    return tiny("llama").requires_grad_(False)


def test_each_kind_of_model_has_its_objective(policy):
    kinds = {"eagle3": TrainingTimeTest, "mtp": TrainingTimeTest, "block": BlockObjective}
    teacher = Teacher.of(policy)
    for kind, objective in kinds.items():
        assert type(make_objective(make_head(kind, HeadConfig(), policy, 0), teacher, **KEYS)) is objective
    assert type(make_objective(tiny("qwen3"), teacher, **KEYS)) is Distillation


def test_only_an_objective_that_draws_is_told_the_update(policy):
    teacher = Teacher.of(policy)
    kinds = {"eagle3": False, "mtp": False, "block": True}
    for kind, draws in kinds.items():
        objective = make_objective(make_head(kind, HeadConfig(), policy, 0), teacher, **KEYS)
        assert isinstance(objective, Drawing) is draws
    assert not isinstance(make_objective(tiny("qwen3"), teacher, **KEYS), Drawing)


# field K1
@pytest.mark.parametrize("padded", [0, 8])
def test_a_draft_model_learns_the_policy_s_law_at_every_response_token_and_the_policy_nothing(padded):
    policy = tiny("llama").requires_grad_(True)
    draft = tiny("qwen3", seed=1)
    draft.resize_token_embeddings(VOCABULARY + padded)
    documents = documents_of(policy, ())
    total, count, overlap = 0.0, 0, 0.0
    for document in documents:
        tokens = torch.from_numpy(document.tokens).long()
        rows = slice(document.prompt_length - 1, len(tokens) - 1)
        law = (policy.lm_head(document.final_PH[rows]) / 0.7).softmax(-1).detach()
        log_q = (draft(input_ids=tokens[None, :-1]).logits[0, rows, :VOCABULARY] / 0.7).log_softmax(-1)
        total = total - (law * log_q).sum()
        count += len(law)
        overlap += torch.minimum(law, log_q.exp()).sum().item()
    (total / count).backward()
    wanted = {name: parameter.grad for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    objective = make_objective(draft, Teacher.of(policy), **KEYS)
    assert objective.count(documents) == count == sum(length - prompt for length, prompt in SHAPES)
    loss, sums = objective.loss(documents, denominator=count)
    loss.backward()
    assert abs(loss.item() - total.item() / count) < 1e-12
    assert sums == pytest.approx({"rows_1": count, "loss_1": total.item(), "overlap_1": overlap}, abs=1e-10)
    for name, parameter in draft.named_parameters():
        assert (parameter.grad - wanted[name]).abs().max() < 1e-12 * max(1.0, wanted[name].abs().max()), name
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_draft_model_whose_logits_are_capped_is_refused(policy):
    draft = tiny("gemma3")
    draft.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="capped or biased"):
        make_objective(draft, Teacher.of(policy), **KEYS)
