"""A head trained for a moment on what a tiny policy says, so that engines accept well above chance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.config import CotrainConfig, HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import Head, HeadKind, make_head
from paceline.forward.taps import FINAL, Taps
from paceline.schema import Rollout


@torch.no_grad()
def documents(policy: PreTrainedModel, head: Head, rollouts: Sequence[Rollout]) -> list[Document]:
    """The rollouts with the states that the policy has at their positions."""
    taps = Taps(policy, (*head.taps, FINAL))
    found = []
    for rollout in rollouts:
        ids = np.concatenate([rollout.prompt, rollout.tokens])
        with taps.watching():
            policy(torch.from_numpy(ids[None, :-1]).long())
        width = policy.config.hidden_size
        states_PS, final_PH = taps.take()[0].split([len(head.taps) * width, width], dim=1)
        found.append(Document(ids, len(rollout.prompt), states_PS, final_PH))
    taps.close()
    return found


def trained_head(
    policy: PreTrainedModel, rollouts: Sequence[Rollout], kind: HeadKind = "eagle3", *, updates: int = 30, **config: Any
) -> Head:
    """A head of ``kind`` and ``config`` after so many updates on all of the rollouts."""
    counts = np.bincount(np.concatenate([rollout.tokens for rollout in rollouts]), minlength=policy.config.vocab_size)
    head = make_head(kind, HeadConfig(**config), policy, seed=1, counts=counts)
    trainer = Trainer(head, policy, CotrainConfig(lr=3e-3, passes=2, updates=1), temperature=1.0)
    learnt = documents(policy, head, rollouts)
    for _ in range(updates):
        trainer.train(learnt)
    return head.requires_grad_(False)
