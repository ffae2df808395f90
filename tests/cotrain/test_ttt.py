"""Training-time test against a dense definition in float64: the loss and every gradient, packed or not."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.config import HeadConfig
from paceline.cotrain.branch import attending
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import make_objective
from paceline.cotrain.ttt import TrainingTimeTest, _pack
from paceline.drafters.head import HeadDrafter
from paceline.drafters.heads import make_head
from paceline.schema import RolloutRequest, SamplingParams
from soft_drafting import seen, traits
from taught import dense_of, documents_of, gradients, trained
from tiny_models import tiny


@pytest.fixture(scope="module")
def policy():
    return tiny("llama").requires_grad_(False)


def exact_norms(head):
    """Norms that compute in float64, which transformers' do not."""
    for module in list(head.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                exact = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                exact.weight = child.weight
                setattr(module, name, exact)


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


def test_an_mtp_head_is_trained_as_the_dense_definition_says(policy):
    head, objective = trained(policy, "mtp")
    exact_norms(head)
    documents = documents_of(policy, head.taps)
    loss, _, sums, grads = dense_of(head, policy, documents)
    own, own_sums = objective.loss(documents, denominator=objective.count(documents))
    own_grads = gradients(head, own)
    assert abs(own.item() - loss.item()) < 1e-12
    assert own_sums == pytest.approx(sums, abs=1e-11)
    assert own_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert (own_grads[name] - grad).abs().max() < 1e-12, name
        assert grad.abs().max() > 1e-6, name


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_float32_stays_within_its_rounding_of_float64(policy, kind):
    head, objective = trained(policy, kind, dtype="float32")
    documents = documents_of(policy, head.taps)
    loss, _, _, grads = dense_of(head, policy, documents)
    own, _ = objective.loss(documents, denominator=objective.count(documents))
    own_grads = gradients(head, own)
    assert own.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, grad in grads.items():
        assert (own_grads[name] - grad).abs().max() < 1e-5 * max(1.0, grad.abs().max()), name


@pytest.mark.parametrize("keys", [{"vocabulary": 17}, {"layers": 2}], ids=str)
def test_packed_is_unpacked_and_micro_batches_are_the_whole(policy, keys):
    head, objective = trained(policy, **keys)
    documents = documents_of(policy, head.taps)
    denominator = objective.count(documents)
    whole, whole_sums = objective.loss(documents, denominator=denominator)
    wanted = gradients(head, whole)
    for parts in ([[document] for document in documents], [documents[:2], documents[2:]]):
        head.zero_grad()
        total, sums = 0.0, dict.fromkeys(whole_sums, 0.0)
        for part in parts:
            loss, part_sums = objective.loss(part, denominator=denominator)
            loss.backward()
            total += loss.item()
            for name, value in part_sums.items():
                sums[name] += value
        assert abs(total - whole.item()) < 1e-12
        assert sums == pytest.approx(whole_sums, abs=1e-11)
        for name, parameter in head.named_parameters():
            assert (parameter.grad - wanted[name]).abs().max() < 1e-12, name


def test_a_document_does_not_see_its_neighbours_and_a_row_not_what_follows(policy):
    head, objective = trained(policy)
    one, other = documents_of(policy, head.taps, [(12, 4), (9, 5)])
    (alone,) = documents_of(policy, head.taps, [(12, 4)])
    # Row 3, the first that counts, is the only one of a document cut behind the token that it is taught at.
    cut = Document(one.tokens[:6], 4, one.states_PS[:5], one.final_PH[:5])
    sums = [objective.loss(batch, denominator=1.0)[1] for batch in ([one, other], [alone], [other], [cut])]
    assert sums[0]["loss_1"] == pytest.approx(sums[1]["loss_1"] + sums[2]["loss_1"], abs=1e-12)
    assert (sums[3]["rows_1"], sums[3]["rows_2"]) == (1.0, 0.0)
    changed = Document(one.tokens, 4, one.states_PS.clone(), one.final_PH)
    changed.states_PS[6:] = 0
    with torch.no_grad():
        kept, moved = (_first_row(head, document) for document in (one, changed))
    assert torch.equal(kept, moved)


def _first_row(head, document):
    """What the output matrix reads of row 3 in every pass."""
    batch = _pack([document], 4, torch.device("cpu"))
    objective = TrainingTimeTest(head, Teacher.of(head.policy), temperature=1.0, passes=4, decay=1.0)
    with attending(head):
        read_NH, _, row_N = objective._passes(batch, document.states_PS[:-1])
    return read_NH[row_N == 0]


# field K1
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_policy_gets_no_gradient_from_the_draft_loss(kind):
    policy = tiny("llama").requires_grad_(True)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    head, objective = trained(policy, kind)
    documents = documents_of(policy, head.taps)
    for document in documents:
        document.states_PS.requires_grad_(True)  # as if a tap had let the policy's graph through
        document.final_PH.requires_grad_(True)
    optimiser = torch.optim.AdamW([*head.parameters(), *policy.parameters()], lr=0.1)
    loss, _ = objective.loss(documents, denominator=1.0)
    loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(document.states_PS.grad is None and document.final_PH.grad is None for document in documents)
    optimiser.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())


# field K3
def test_a_perfect_drafter_of_a_deterministic_teacher_has_no_loss_and_one_off_by_a_label_has():
    policy = tiny("llama").requires_grad_(False)
    size = policy.config.hidden_size
    with torch.no_grad():
        # Behind token x the policy says token x + 1: its layers add nothing, and its matrices are one-hot.
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        policy.get_input_embeddings().weight.zero_()[:size] = torch.eye(size)
        policy.lm_head.weight.zero_()[1 : size + 1] = 200 * torch.eye(size)
    tokens = np.arange(3, 15).astype(np.int32)
    with torch.no_grad():
        hidden = policy.model(input_ids=torch.from_numpy(tokens[:-1]).long()[None]).last_hidden_state[0]
        said = policy.lm_head(hidden).argmax(-1)
    assert said.tolist() == tokens[1:].tolist()
    document = Document(tokens, 4, hidden, hidden)
    head = make_head("mtp", HeadConfig(init="random", dtype="float64"), policy, 0)
    objective = make_objective(head, Teacher.of(policy), temperature=1.0, passes=3, decay=0.8)
    count = objective.count([document])

    def loss_of(state, embedding, document=document):
        with torch.no_grad():
            head.project.weight.copy_(torch.cat([state * torch.eye(size), embedding * torch.eye(size)], dim=1))
            head.layer.self_attn.o_proj.weight.zero_()
            head.layer.mlp.down_proj.weight.zero_()
        return objective.loss([document], denominator=count)

    perfect, sums = loss_of(0, 1)
    assert perfect.item() == 0
    assert [sums[f"overlap_{d}"] for d in (1, 2, 3)] == [sums[f"rows_{d}"] for d in (1, 2, 3)] == [7, 6, 5]
    # A head that says what the policy said already, and a teacher that is one position early.
    assert loss_of(1, 0)[0].item() > 100
    early = Document(tokens, 4, hidden, torch.cat([hidden[:1], hidden[:-1]]))
    assert loss_of(0, 1, early)[0].item() > 100


def test_nothing_to_learn_from_is_no_loss(policy):
    head, objective = trained(policy)
    documents = documents_of(policy, head.taps, [(5, 4)])
    assert objective.count(documents) == 0
    loss, sums = objective.loss(documents, denominator=1.0)
    loss.backward()
    assert (loss.item(), sums) == (0.0, {})


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_is_trained_in_pass_d_is_what_drafts_the_d_th_token(policy, kind):
    head, _ = trained(policy, kind)
    drafter = HeadDrafter(head, traits("rejection"))
    layers = drafter.attach(policy)
    request = RolloutRequest(request_id="r", prompt=[5, 9, 2, 30, 11, 7], params=SamplingParams(temperature=0.7))
    drafter.start([request])
    drafter.observe([seen(policy, layers, "r", request.prompt)])
    (draft,) = drafter.propose(["r"], 3)
    assert len(draft.tokens) == 3
    # The drafted tokens as a response: the row before the prompt's last token drafted them, one pass a token.
    states_PS = seen(policy, layers, "r", request.prompt).states
    padded_PS = torch.cat([states_PS, torch.zeros((4, states_PS.shape[1]), dtype=torch.float64)])
    tokens = np.concatenate([request.prompt, draft.tokens, [0]]).astype(np.int32)
    document = Document(tokens, 5, padded_PS, torch.zeros((9, policy.config.hidden_size), dtype=torch.float64))
    objective = TrainingTimeTest(head, Teacher.of(policy), temperature=0.7, passes=3, decay=1.0)
    with torch.no_grad(), attending(head):
        read_NH, pass_N, row_N = objective._passes(_pack([document], 3, torch.device("cpu")), padded_PS[:-1])
        logits_NV = read_NH @ head.output_weight().T / 0.7
    assert pass_N[row_N == 0].tolist() == [0, 1, 2]
    assert (draft.laws.log_softmax(-1) - logits_NV[row_N == 0].log_softmax(-1)).abs().max() < 1e-12
