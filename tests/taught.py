"""Documents that drafters learn from, random tokens with a policy's states; and heads that do, with the dense truth."""

import numpy as np
import torch

import dense_head
from paceline.config import HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import make_objective
from paceline.drafters.heads import make_head
from paceline.forward.taps import FINAL, Taps
from tiny_models import VOCABULARY

KEYS = {"temperature": 0.7, "passes": 4, "decay": 0.8}
# (length, length of the prompt): prompts of one token, responses of one, and a document shorter than the passes.
SHAPES = ((12, 4), (9, 1), (4, 2), (7, 6), (15, 11))


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
    if head.kind == "eagle3":
        one_pass = dense_head.eagle3_pass
        fuse = lambda w, document: document.states_PS.double() @ w["fc.weight"].T  # noqa: E731
        output = lambda w: w["lm_head.weight"]  # noqa: E731
    else:
        one_pass = dense_head.mtp_pass
        fuse = lambda w, document: document.final_PH  # noqa: E731
        output = lambda w: policy.lm_head.weight  # noqa: E731
    loss, count, sums = dense_head.training_time_test(
        one_pass,
        weights,
        head.config,
        fuse,
        policy,
        output,
        ids,
        documents,
        *KEYS.values(),
    )
    loss.backward()
    return loss.detach(), count, sums, {name: weight.grad for name, weight in weights.items()}
