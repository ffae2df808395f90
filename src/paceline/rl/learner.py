"""Updates the policy from rollouts: GRPO with AdamW, in micro-batches that change nothing but memory."""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.config import RLConfig
from paceline.cotrain.taps import Collector
from paceline.forward.optimiser import Optimiser
from paceline.rl import grpo
from paceline.rl.policy import Policy
from paceline.rl.ranks import Alone, Ranks
from paceline.schema import Tokens

_Sums = defaultdict[str, float]


@dataclass(frozen=True)
class Batch:
    """The rollouts of one step. Rollouts with equal ``group_ids`` answer the same prompt.

    ``engine_logprobs`` are the processed log-probabilities that the engine sampled with, one array a rollout; they are
    compared with the trainer's and take no part in the update. None: not compared.
    """

    prompts: Sequence[Tokens]
    responses: Sequence[Tokens]
    rewards: npt.ArrayLike
    group_ids: Sequence[Hashable]
    engine_logprobs: Sequence[npt.NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        rollouts = len(self.prompts)
        for name in ("responses", "group_ids"):
            if len(getattr(self, name)) != rollouts:
                raise ValueError(f"batch: {len(getattr(self, name))} {name} for {rollouts} prompts")
        for row, logprobs in enumerate(self.engine_logprobs or ()):
            if len(logprobs) != len(self.responses[row]):
                raise ValueError(
                    f"batch: rollout {row} has {len(self.responses[row])} tokens and {len(logprobs)} engine_logprobs"
                )


@dataclass(frozen=True)
class _Collecting:
    """Who sees the passes, and which rollouts of the batch are kept."""

    collector: Collector
    wanted: frozenset[int]


class Learner:
    """Holds the optimiser. Build it before a checkpoint is loaded: the KL reference is the policy as it is then.

    An update is a function of tokens, rewards and weights alone. Rollouts that add no gradient (advantage 0 and no KL
    penalty) are not computed; the denominators count them all the same. ``ranks`` are those who share the work.
    """

    def __init__(self, policy: Policy, config: RLConfig, temperature: float, ranks: Ranks | None = None) -> None:
        self.policy = policy
        self.ranks = ranks or Alone()
        self.config = config
        self.temperature = temperature
        self._reference: dict[str, Tensor] | None = None
        if config.kl_coef:
            if not policy.pristine:
                raise ValueError(
                    "the KL reference is the initial policy: build the learner before loading a checkpoint"
                )
            self._reference = {name: p.detach().clone() for name, p in policy.trainable()}
        self.optimiser = Optimiser(
            policy.trainable(), config.lr, config.weight_decay, config.max_grad_norm, config.warmup_steps
        )

    def update(
        self, batch: Batch, collector: Collector | None = None, wanted: Collection[int] = ()
    ) -> dict[str, float]:
        """Move the policy by ``inner_updates`` optimiser steps on the batch; returns the step's metrics.

        Means over the computed tokens: ``kl`` (k3, to the reference; NaN without one), ``entropy``, ``clip_fraction``,
        ``mismatch_kl`` (k3 of KL(engine || trainer); NaN where nothing was compared). Means over the optimiser steps:
        ``loss``, ``grad_norm`` (before clipping). Counts: ``tokens`` of all rollouts, ``trained_rollouts`` (those with
        a gradient), optimiser steps ``skipped_no_advantage`` and ``skipped_not_finite``. ``lr`` is that of the last
        step, or of the next one where none was taken. A ``collector`` gets those of the rollouts ``wanted`` that are
        computed.
        """
        advantages_R = grpo.advantages(batch.rewards, batch.group_ids, self.config.scale_rewards)
        minibatches = self._minibatches(batch)
        active = [self._active(batch, rows, advantages_R) for rows in minibatches]
        collecting = None if collector is None else _Collecting(collector, frozenset(wanted))
        old_of: dict[int, Tensor] = {}
        for rows in active[1:]:
            # Later steps meet a policy that has moved; their ratio is to the one that sampled.
            for part in self._parts(batch, rows):
                with torch.no_grad():
                    logp_N, _ = self._logprobs(batch, part)
                old_of |= dict(zip(part, logp_N.split([len(batch.responses[row]) for row in part]), strict=True))
        sums: _Sums = defaultdict(float)
        for rows, trained in zip(minibatches, active, strict=True):
            if trained:
                self._step(batch, rows, trained, advantages_R, old_of, sums, collecting)
            else:
                sums["skipped_no_advantage"] += 1
        return self._metrics(batch, active, sums)

    def computed(self, batch: Batch) -> list[int]:
        """The rollouts that an update on ``batch`` computes."""
        advantages_R = grpo.advantages(batch.rewards, batch.group_ids, self.config.scale_rewards)
        return self._active(batch, range(len(batch.prompts)), advantages_R)

    @torch.no_grad()
    def read(self, batch: Batch, rows: Sequence[int], collector: Collector) -> None:
        """One pass over ``rows`` for the collector alone; the policy stays as it is."""
        for part in self._parts(batch, rows):
            self._logprobs(batch, part, _Collecting(collector, frozenset(rows)))

    @property
    def updates(self) -> int:
        """Optimiser steps taken so far, over all batches."""
        return self.optimiser.updates

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state, ``Optimiser.state``."""
        return self.optimiser.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises ModelError, naming the tensor, where it does not fit."""
        self.optimiser.load_state(tensors)

    def _minibatches(self, batch: Batch) -> list[list[int]]:
        """Rows of each optimiser step: groups in their order of appearance, cut into equal parts."""
        first_seen = {group: i for i, group in reversed(list(enumerate(batch.group_ids)))}
        rows = sorted(range(len(batch.prompts)), key=lambda row: (first_seen[batch.group_ids[row]], row))
        return [part.tolist() for part in np.array_split(rows, self.config.inner_updates) if len(part)]

    def _active(self, batch: Batch, rows: Sequence[int], advantages_R: grpo.Floats) -> list[int]:
        has_gradient = [bool(self.config.kl_coef or advantage) for advantage in advantages_R]
        return [row for row in rows if has_gradient[row] and len(batch.responses[row])]

    def _parts(self, batch: Batch, rows: Sequence[int]) -> Iterator[list[int]]:
        """Micro-batches of at most ``microbatch_tokens``, siblings together: what this rank computes of ``rows``."""
        prompts, responses = [batch.prompts[row] for row in rows], [batch.responses[row] for row in rows]
        trees = self.policy.scorer.trees(prompts, responses, self.config.microbatch_tokens)
        for part in self.ranks.microbatches(trees, self.config.microbatch_tokens):
            yield [rows[i] for i in part]

    def _logprobs(
        self, batch: Batch, rows: Sequence[int], collecting: "_Collecting | None" = None
    ) -> tuple[Tensor, Tensor]:
        prompts, responses = [batch.prompts[row] for row in rows], [batch.responses[row] for row in rows]
        if collecting is None:
            return self.policy.logprobs(prompts, responses, self.temperature)
        wanted = [i for i, row in enumerate(rows) if row in collecting.wanted]
        return self.policy.logprobs(prompts, responses, self.temperature, collecting.collector, wanted)

    def _step(
        self,
        batch: Batch,
        rows: Sequence[int],
        trained: Sequence[int],
        advantages_R: grpo.Floats,
        old_of: Mapping[int, Tensor],
        sums: _Sums,
        collecting: "_Collecting | None",
    ) -> None:
        """One optimiser step on ``rows``, of which ``trained`` have a gradient."""
        lengths = [len(batch.responses[row]) for row in rows]
        weights = grpo.token_weights(lengths, self.config.normalise)
        weights_by_row = dict(zip(rows, np.split(weights, np.cumsum(lengths)[:-1]), strict=True))
        own_sums: _Sums = defaultdict(float)
        for part in self._parts(batch, trained):
            logp_ref_N = None
            if self._reference is not None:
                with torch.no_grad(), self.policy.weights_of(self._reference):
                    logp_ref_N, _ = self._logprobs(batch, part)
            logp_N, entropy_N = self._logprobs(batch, part, collecting)
            if not part:  # others have a micro-batch more, and reduce its gradient with everybody
                logp_N.sum().backward()
                continue
            logp_old_N = torch.cat([old_of[row] for row in part]) if part[0] in old_of else logp_N.detach()
            repeated = np.repeat(advantages_R[part], [len(batch.responses[row]) for row in part])
            loss, own = grpo.policy_loss(
                logp_N,
                logp_old_N,
                torch.from_numpy(repeated).to(logp_N),
                torch.from_numpy(np.concatenate([weights_by_row[row] for row in part])).to(logp_N),
                self.config.clip_low,
                self.config.clip_high,
                self.config.kl_coef,
                logp_ref_N,
            )
            loss.backward()
            own |= {"loss": loss.detach(), "entropy": entropy_N.sum(), "computed": torch.tensor(len(logp_N))}
            for name, value in own.items():
                own_sums[name] += float(value)
            if batch.engine_logprobs is not None:
                engine_N = torch.from_numpy(np.concatenate([batch.engine_logprobs[row] for row in part]))
                own_sums["mismatch"] += float(grpo.k3(logp_old_N.double().cpu() - engine_N).sum())
        for name, value in self.ranks.total(own_sums).items():
            sums[name] += value
        lr = self.optimiser.lr()
        norm = self.optimiser.step()
        if math.isfinite(norm):
            self.policy.pristine = False
            sums["grad_norm"] += norm
            sums["steps"] += 1
            sums["lr"] = lr
        else:
            sums["skipped_not_finite"] += 1

    def _metrics(self, batch: Batch, active: Sequence[Sequence[int]], sums: _Sums) -> dict[str, float]:
        computed = sums["computed"]

        def mean(name: str, known: bool = True) -> float:
            return sums[name] / computed if computed and known else math.nan

        return {
            "loss": sums["loss"] / max(sums["steps"] + sums["skipped_not_finite"], 1),
            "grad_norm": sums["grad_norm"] / max(sums["steps"], 1),
            "lr": sums["lr"] if sums["steps"] else self.optimiser.lr(),
            "kl": mean("kl", self._reference is not None),
            "entropy": mean("entropy"),
            "clip_fraction": mean("clipped") if computed else 0.0,
            "mismatch_kl": mean("mismatch", batch.engine_logprobs is not None),
            "tokens": float(sum(len(response) for response in batch.responses)),
            "trained_rollouts": float(sum(len(trained) for trained in active)),
            "skipped_no_advantage": sums["skipped_no_advantage"],
            "skipped_not_finite": sums["skipped_not_finite"],
        }
