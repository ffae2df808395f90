"""The section about drafters that learn beside the policy."""

import math
from typing import Literal

from paceline.config.base import Section, require


class CotrainConfig(Section):
    """How the model that drafts follows the policy, on the hidden states that the policy's training computes anyway.

    ``when``: ``never``, at ``every`` so many steps, or whenever it ``pays``: when the tokens per pass that its drift
    costs are dearer than the seconds that training takes. A training reads at most ``tokens`` tokens of the step's
    rollouts (0: all), ``microbatch_tokens`` at a time, and takes ``updates`` optimiser steps, each on a part of them.
    ``passes`` is the depth of training-time test and ``decay`` the weight of each pass over the one before it;
    ``schedule`` ends at 0 after ``schedule_steps`` updates if it is ``cosine``.
    """

    when: Literal["never", "every", "pays"] = "pays"
    every: int = 1
    updates: int = 4
    tokens: int = 16384
    microbatch_tokens: int = 4096
    passes: int = 3
    decay: float = 0.8
    lr: float = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    schedule_steps: int = 0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for key in ("every", "updates", "microbatch_tokens", "passes"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("tokens", "schedule_steps", "warmup_steps"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        for key in ("lr", "max_grad_norm"):
            require(0 < getattr(self, key) < math.inf, key, getattr(self, key), "finite and > 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "finite and >= 0")
        require(0 < self.decay <= 1, "decay", self.decay, "in (0, 1]")
        ends = self.schedule == "constant" or self.schedule_steps > self.warmup_steps
        require(ends, "schedule_steps", self.schedule_steps, "above warmup_steps where the schedule is cosine")
