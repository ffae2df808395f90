"""Updates the policy from rollouts: GRPO with AdamW, in micro-batches that change nothing but memory."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import RLConfig
from paceline.forward.optimiser import Norm, Optimiser
from paceline.rl import grpo, importance
from paceline.rl.batch import Batch, BatchError
from paceline.rl.passes import Collecting, LocalPasses, Passes
from paceline.rl.policy import Policy
from paceline.rl.ranks import Alone, Ranks

_Sums = defaultdict[str, float]


class Learner:
    """Holds the optimiser. Build it before a checkpoint is loaded: the KL reference is the policy as it is then.

    An update is a function of tokens, rewards and weights alone, and of the log-probabilities with which older weights
    sampled, to ``importance.GRAIN``. Rollouts that add no gradient (advantage 0 and no KL penalty) are not computed;
    the denominators count them all the same, as they do what importance masks. ``ranks`` are those who share the work,
    ``passes`` computes this rank's part of it (None: the whole policy, here), and ``norm`` is that of the gradient.
    """

    def __init__(
        self,
        policy: Policy,
        config: RLConfig,
        temperature: float,
        ranks: Ranks | None = None,
        passes: Passes | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.policy = policy
        self.ranks = ranks or Alone()
        self.passes = passes or LocalPasses(policy, Alone(), config.microbatch_tokens, temperature)
        self.config = config
        self.temperature = temperature
        self._rule = importance.rule(config)
        self._reference: dict[str, Tensor] | None = None
        if config.kl_coef:
            if not policy.pristine:
                raise ValueError(
                    "the KL reference is the initial policy: build the learner before loading a checkpoint"
                )
            self._reference = {name: p.detach().clone() for name, p in policy.trainable()}
        self.optimiser = Optimiser(
            policy.trainable(), config.lr, config.weight_decay, config.max_grad_norm, config.warmup_steps, norm=norm
        )

    def update(self, batch: Batch, collector: Any = None, wanted: Collection[int] = ()) -> dict[str, float]:
        """Move the policy by ``inner_updates`` optimiser steps on the batch; returns the step's metrics.

        The ratio that is clipped is to the policy at the start of the update. Where ``rl.importance`` asks for it, what
        a token of a stale rollout adds, its KL penalty included, is multiplied by its importance weight; rollouts on
        policy have weight 1, whatever rounding says. The weights take no pass of their own. BatchError where the batch
        does not hold what they are made of.

        Means over the computed tokens: ``kl`` (k3, to the reference; NaN without one), ``entropy``, ``clip_fraction``,
        ``mismatch_kl`` (k3 of KL(sampler || policy at the start of the update), which is the drift where the sampler
        was older; NaN where nothing was compared). Over the weighed ones: ``importance.summary``. Means over the
        optimiser steps: ``loss``, ``grad_norm`` (before clipping). Counts: ``tokens`` of all rollouts,
        ``trained_rollouts`` (those with a gradient), optimiser steps ``skipped_no_advantage`` and
        ``skipped_not_finite``. ``lr`` is that of the last step, or of the next one where none was taken. A
        ``collector``, of the kind that the passes take, gets those of the rollouts ``wanted`` that are computed.
        """
        advantages_R = grpo.advantages(batch.rewards, batch.group_ids, self.config.scale_rewards)
        minibatches = self._minibatches(batch)
        computed = set(computed_rows(self.config, batch))
        active = [[row for row in rows if row in computed] for rows in minibatches]
        collecting = None if collector is None else Collecting(collector, frozenset(wanted))
        weighed = self._weighed(batch)
        old_of: dict[int, Tensor] = {}
        for rows in active[1:]:
            # Later steps meet a policy that has moved; their ratio is to the one that sampled.
            parts = self.passes.parts(batch, rows)
            for part, logp_N in zip(parts, self.passes.score(batch, parts), strict=False):
                old_of |= dict(zip(part, logp_N.split([len(batch.responses[row]) for row in part]), strict=True))
        sums: _Sums = defaultdict(float)
        for rows, trained in zip(minibatches, active, strict=True):
            if trained:
                self._step(batch, rows, trained, advantages_R, old_of, weighed, sums, collecting)
            else:
                sums["skipped_no_advantage"] += 1
        return self._metrics(batch, active, sums)

    def read(self, batch: Batch, rows: Sequence[int], collector: Any) -> None:
        """One pass over ``rows`` for the collector alone; the policy stays as it is."""
        self.passes.read(batch, rows, Collecting(collector, frozenset(rows)))

    @property
    def updates(self) -> int:
        """Optimiser steps taken so far, over all batches."""
        return self.optimiser.updates

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state, ``Optimiser.state``."""
        return self.optimiser.state()

    def close(self) -> None:
        """Nothing is to be released."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises ModelError, naming the tensor, where it does not fit."""
        self.optimiser.load_state(tensors)

    def _minibatches(self, batch: Batch) -> list[list[int]]:
        """Rows of each optimiser step: groups in their order of appearance, cut into equal parts."""
        first_seen = {group: i for i, group in reversed(list(enumerate(batch.group_ids)))}
        rows = sorted(range(len(batch.prompts)), key=lambda row: (first_seen[batch.group_ids[row]], row))
        return [part.tolist() for part in np.array_split(rows, self.config.inner_updates) if len(part)]

    def _weighed(self, batch: Batch) -> frozenset[int]:
        """The rollouts that importance weighs; BatchError where it is not known how likely their tokens were."""
        if self._rule is None:
            return frozenset()
        if batch.engine_logprobs is None or batch.versions is None:
            missing = "engine_logprobs" if batch.engine_logprobs is None else "versions"
            raise BatchError(
                f"batch: importance weights by {self._rule.level} are made of {missing}, and there are none; pass the "
                "engine's, or set rl.importance=none"
            )
        stale = batch.stale()
        for row in sorted(stale):
            if not np.isfinite(batch.engine_logprobs[row]).all():
                raise BatchError(
                    f"batch: rollout {row} (group {batch.group_ids[row]}) is of older weights and has tokens without "
                    "an engine_logprob; set rl.importance=none to learn from it unweighed"
                )
        return stale

    def _step(
        self,
        batch: Batch,
        rows: Sequence[int],
        trained: Sequence[int],
        advantages_R: grpo.Floats,
        old_of: Mapping[int, Tensor],
        weighed: frozenset[int],
        sums: _Sums,
        collecting: Collecting | None,
    ) -> None:
        """One optimiser step on ``rows``, of which ``trained`` have a gradient."""
        lengths = [len(batch.responses[row]) for row in rows]
        weights = grpo.token_weights(lengths, self.config.normalise)
        weights_by_row = dict(zip(rows, np.split(weights, np.cumsum(lengths)[:-1]), strict=True))
        own_sums: _Sums = defaultdict(float)
        parts = self.passes.parts(batch, trained)
        references: list[Tensor] = []
        if self._reference is not None:
            with self.policy.weights_of(self._reference):
                references = self.passes.score(batch, parts)

        def loss_of(index: int, logp_N: Tensor, entropy_N: Tensor) -> Tensor:
            part = parts[index]
            logp_old_N = torch.cat([old_of[row] for row in part]) if part[0] in old_of else logp_N.detach()
            token_weights_N = np.concatenate([weights_by_row[row] for row in part])
            if not weighed.isdisjoint(part):
                applied = self._importance(batch, part, weighed, logp_old_N)
                token_weights_N *= applied.weights_N
                own_sums["largest"] = max(own_sums["largest"], applied.largest)
                for name, total in applied.sums.items():
                    own_sums[name] += total
            repeated = np.repeat(advantages_R[part], [len(batch.responses[row]) for row in part])
            loss, own = grpo.policy_loss(
                logp_N,
                logp_old_N,
                torch.from_numpy(repeated).to(logp_N),
                torch.from_numpy(token_weights_N).to(logp_N),
                self.config.clip_low,
                self.config.clip_high,
                self.config.kl_coef,
                references[index] if references else None,
            )
            own |= {"loss": loss.detach(), "entropy": entropy_N.sum(), "computed": torch.tensor(len(logp_N))}
            for name, value in own.items():
                own_sums[name] += float(value)
            if batch.engine_logprobs is not None:
                engine_N = torch.from_numpy(np.concatenate([batch.engine_logprobs[row] for row in part]))
                own_sums["mismatch"] += float(grpo.k3(logp_old_N.double().cpu() - engine_N).sum())
            return loss

        self.passes.learn(batch, parts, loss_of, collecting)
        largest = own_sums.pop("largest", 0.0)
        for name, total in self.ranks.total(own_sums).items():
            sums[name] += total
        if self._rule is not None:
            sums["largest"] = max(sums["largest"], self.ranks.largest(largest))
        lr = self.optimiser.lr()
        norm = self.optimiser.step()
        if math.isfinite(norm):
            self.policy.pristine = False
            sums["grad_norm"] += norm
            sums["steps"] += 1
            sums["lr"] = lr
        else:
            sums["skipped_not_finite"] += 1

    def _importance(
        self, batch: Batch, part: Sequence[int], weighed: frozenset[int], logp_old_N: Tensor
    ) -> importance.Applied:
        """The importance weights of the part's tokens; 1 for rollouts that are not ``weighed``."""
        assert self._rule is not None
        assert batch.engine_logprobs is not None
        return importance.apply(
            self._rule,
            logp_old_N.double().cpu().numpy(),
            importance.settled(np.concatenate([batch.engine_logprobs[row] for row in part])),
            [len(batch.responses[row]) for row in part],
            [row in weighed for row in part],
        )

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
            **importance.summary(sums, sums["largest"]),
            "tokens": float(sum(len(response) for response in batch.responses)),
            "trained_rollouts": float(sum(len(trained) for trained in active)),
            "skipped_no_advantage": sums["skipped_no_advantage"],
            "skipped_not_finite": sums["skipped_not_finite"],
        }


def computed_rows(config: RLConfig, batch: Batch) -> list[int]:
    """The rollouts that an update on ``batch`` computes: those that add a gradient."""
    advantages_R = grpo.advantages(batch.rewards, batch.group_ids, config.scale_rewards)
    return [row for row, text in enumerate(batch.responses) if len(text) and (config.kl_coef or advantages_R[row])]
