"""A drafter that learns inside a TRL run: from the states of the passes that the trainer's own loss computes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config import Config
from paceline.cotrain.documents import Document
from paceline.cotrain.taps import LEAST_RESPONSE, canonical
from paceline.cotrain.trainer import Trainer
from paceline.cotrain.when import Decision, Generation, When
from paceline.drafters.heads import Head
from paceline.forward.taps import FINAL, Taps
from paceline.rl.drafting import drafting_model
from paceline.rl.policy import Policy
from paceline.rl.students import load_trainer
from paceline.schema import Rollout, as_tokens

#: What labels have where nothing is to be predicted.
_NO_LABEL = -100


class Teaching:
    """Watches the trainer's passes that have gradients, and trains the drafter before the optimiser moves the policy.

    A generation decides whether the drafter is trained (``cotrain.when``); it learns from the first optimiser step that
    follows. States are detached copies, so the trainer's loss, gradients and update are those without it.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        model = drafting_model(config, policy)
        self.trainer = Trainer(model, policy.model, config.cotrain, config.sampling.temperature)
        self._when = When(config.cotrain)
        self._decision = Decision(False, "never")
        self._most_tokens = config.cotrain.tokens
        self._taps = Taps(policy.model, (*(model.taps if isinstance(model, Head) else ()), FINAL))
        self._final_size = int(policy.model.get_output_embeddings().weight.shape[-1])
        self._hooks = [
            policy.model.register_forward_pre_hook(self._before, with_kwargs=True),
            policy.model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self._watching: Any = None
        self._documents: list[Document] = []
        self._tokens = self._generations = 0
        self._has_moved = False
        self._figures: dict[str, float] = {}

    def heard(self, rollouts: Sequence[Rollout], seconds: float, state: Any) -> None:
        """The trainer has new rollouts, which took so long: decide whether the drafter learns from them."""
        left = max(int(state.max_steps - state.global_step), 0)
        self._decision = self._when.decide(self._generations, Generation.of(rollouts, seconds), left)
        self._generations += 1
        self._forget()

    def learn(self) -> None:
        """Train on what was collected, if a training is due: before the policy moves away from the states."""
        if not (self._decision.trains and self._documents):
            return

        started = time.perf_counter()
        with torch.random.fork_rng():
            metrics = self.trainer.train(canonical(self._documents))
        seconds = time.perf_counter() - started
        self._decision = Decision(False, "between")
        self._forget()
        self._has_moved = metrics["updates"] > 0
        if self._has_moved:
            self._when.trained(seconds, metrics["expected"])
        self._figures = {"draft_loss": metrics["loss"], "draft_train_seconds": seconds}
        self._figures |= {f"draft_{name}": value for name, value in metrics.items() if name.startswith("overlap_")}

    def moved(self) -> dict[str, Tensor] | None:
        """The drafter's weights where they have moved since the last call."""
        has_moved, self._has_moved = self._has_moved, False
        return self.trainer.weights if has_moved else None

    def figures(self) -> dict[str, float]:
        """What the last training came to; empty where there was none since the last call."""
        figures, self._figures = self._figures, {}
        return figures

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimiser state, for a checkpoint."""
        weights = {f"weights/{name}": tensor for name, tensor in self.trainer.weights.items()}
        return weights | {f"optimiser/{name}": tensor for name, tensor in self.trainer.state().items()}

    def state(self) -> dict[str, Any]:
        """What else a checkpoint holds of it: plain values."""
        return {"generations": self._generations, "when": self._when.state()}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; PacelineError, TypeError or KeyError where it does not fit."""
        parts = [
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            for prefix in ("weights/", "optimiser/")
        ]
        self._when.load_state(state["when"])
        load_trainer(self.trainer, *parts)
        self._generations, self._has_moved = int(state["generations"]), True

    def close(self) -> None:
        """Take the hooks off the policy."""
        self._taps.close()
        for hook in self._hooks:
            hook.remove()

    def _forget(self) -> None:
        self._documents, self._tokens = [], 0

    def _before(self, model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        is_full = bool(self._most_tokens) and self._tokens >= self._most_tokens
        wanted = self._decision.trains and model.training and torch.is_grad_enabled() and not is_full
        if wanted and kwargs.get("labels") is not None:
            self._watching = self._taps.watching()
            self._watching.__enter__()

    def _after(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._watching is None:
            return
        watching, self._watching = self._watching, None
        watching.__exit__(None, None, None)
        if output is not None:
            self._keep(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"], self._taps.take())

    def _keep(self, ids_BL: Tensor, mask_BL: Tensor, labels_BL: Tensor, states_BLS: Tensor) -> None:
        """The rows of a padded pass as documents; their responses are what has labels."""
        for row in range(len(ids_BL)):
            at = mask_BL[row].nonzero().squeeze(1)
            prompt = int((labels_BL[row, at] == _NO_LABEL).sum())
            has_room = not self._most_tokens or self._tokens + len(at) <= self._most_tokens
            if not has_room or not prompt or len(at) - prompt < LEAST_RESPONSE:
                continue
            states_PS = states_BLS[row, at[:-1]]
            taps_PS, final_PH = states_PS.split([states_PS.shape[1] - self._final_size, self._final_size], dim=1)
            tokens = as_tokens(np.asarray(ids_BL[row, at].cpu()))
            self._documents.append(Document(tokens, prompt, taps_PS, final_PH))
            self._tokens += len(at)
