"""A drafter that learns inside TRL: on the states of the trainer's own passes, which stay what they are."""

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from paceline.integrations.trl import rollout_func
from tiny_run import make_policy
from trl_runs import Heard, curve, make_trainer

HEAD = {
    "budget": {"mode": "fixed"},
    "drafter": {"kind": "eagle3", "budget": 3},
    "cotrain": {"when": "every", "updates": 2, "lr": 3e-3},
    "engine": {"sentinel": {"canaries": 0}},
}
NOTHING = {"drafter": {"kind": "none"}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def test_a_head_learns_and_the_trainer_does_what_it_does_without_one(policy, tmp_path):
    found = []
    for settings in (HEAD, NOTHING):
        heard, rollouts = Heard(), rollout_func(settings)
        trainer = make_trainer(policy, tmp_path, rollouts, rewards=heard, max_steps=6)
        trainer.train()
        found.append((heard.said, curve(trainer, "reward", "loss", "grad_norm"), curve(trainer, "paceline/draft_loss")))
    (said, learnt, losses), (plain_said, plain_learnt, none) = found
    assert said == plain_said
    assert learnt == plain_learnt
    assert not none
    assert len(losses) == 5  # what a step trains is told by the next generation
    assert losses[-1][0] < losses[0][0]


def test_documents_are_the_rollouts_with_the_states_of_the_policy_that_said_them(policy, tmp_path):
    rollouts, kept = rollout_func(HEAD), []

    def watching(prompts, trainer):
        found = rollouts(prompts, trainer)
        teaching = rollouts._teaching
        learn = teaching.trainer.train
        weight = trainer.model.get_output_embeddings().weight.detach().clone()

        def train(documents):
            kept.append((rollouts.rollouts, documents, weight))
            return learn(documents)

        teaching.trainer.train = train
        return found

    make_trainer(policy, tmp_path, watching, max_steps=1, per_device_train_batch_size=6, steps_per_generation=2,
                 gradient_accumulation_steps=2).train()  # fmt: skip
    ((said, documents, weight),) = kept
    texts = {(*one.prompt.tolist(), *one.tokens.tolist()): one for one in said}
    assert len(documents) == len([one for one in said if len(one.tokens) > 1])
    for document in documents:
        one = texts[tuple(document.tokens.tolist())]
        assert document.prompt_length == len(one.prompt)
        law = torch.log_softmax(document.final_PH @ weight.T, dim=-1)
        own = law[np.arange(len(one.prompt) - 1, len(document.tokens) - 1), one.tokens.astype(int)]
        assert np.abs(own.double().numpy() - one.logprobs).max() < 1e-4


def test_a_resumed_run_goes_on_with_the_drafter_that_it_had(policy, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = rollout_func(HEAD)
    make_trainer(policy, tmp_path, first, max_steps=2, **saving).train()
    weights = {name: tensor.clone() for name, tensor in first._teaching.trainer.weights.items()}
    second, seen = rollout_func(HEAD), []

    def watching(prompts, trainer):
        found = second(prompts, trainer)
        seen.append({name: tensor.clone() for name, tensor in second._teaching.trainer.weights.items()})
        return found

    trainer = make_trainer(policy, tmp_path, watching, max_steps=3, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(seen[0][name], weights[name]) for name in weights)
    assert second._teaching.trainer.updates == first._teaching.trainer.updates + 2
