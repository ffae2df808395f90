"""What a head is: a small model that reads the policy's hidden states and predicts what the policy will say."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

HeadKind = Literal["eagle3", "mtp", "block"]


class Head(nn.Module, ABC):
    """A head of ``policy``, to which it is bound: it reads that model's embeddings and, without an output matrix of
    its own, the policy's. It never holds them, so they move with the policy and are no part of its weights.

    Its layers go through transformers' attention interface: ``config._attn_implementation`` names who attends, and
    what ``forward`` gets beside its tensors is handed through to it.
    """

    kind: ClassVar[HeadKind]
    #: The layers of the policy whose outputs ``fuse`` takes, as ``forward.taps.Taps`` names them.
    taps: tuple[int, ...]
    #: The configuration of the head's own layers, which are numbered from 0.
    config: LlamaConfig
    #: Draft id i stands for the policy's token i + d2t[i], (Vd,) int64; None where it drafts the policy's vocabulary.
    d2t: Tensor | None

    def bind(self, policy: PreTrainedModel) -> None:
        """Read embeddings and output matrix of this model from now on."""
        # Behind a tuple, so that the policy's parameters do not become the head's.
        self._policy = (policy,)

    @property
    def policy(self) -> PreTrainedModel:
        """The model that the head is bound to."""
        policy: PreTrainedModel = self._policy[0]
        return policy

    @property
    def context(self) -> int:
        """Most positions that the head was made for."""
        return int(self.config.max_position_embeddings)

    @torch.no_grad()
    def embed(self, ids_N: Tensor) -> Tensor:
        """The policy's embeddings of token ids, (N, H), in the head's dtype and without a gradient."""
        embedded: Tensor = self.policy.get_input_embeddings()(ids_N)
        return embedded.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's weights."""
        return next(self.parameters()).dtype

    @abstractmethod
    def fuse(self, states_NS: Tensor) -> Tensor:
        """What the head makes of the tapped states, (N, H)."""

    @abstractmethod
    def forward(
        self, embeds_1NH: Tensor, carried_1NH: Tensor, position_1N: Tensor, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed rows; returns what the output matrix reads and what the next pass carries on."""

    @abstractmethod
    def output_weight(self) -> Tensor:
        """The output matrix (Vd, H), the policy's own without a gradient."""

    def policy_ids(self) -> Tensor | None:
        """The policy's token of each draft id, (Vd,); None where they are the same."""
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @abstractmethod
    def checkpoint(self) -> dict[str, Tensor]:
        """The weights by the names that they have in a checkpoint; live tensors, no copies."""

    @abstractmethod
    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights by those names. WeightsError, with nothing loaded, where they do not fit."""
