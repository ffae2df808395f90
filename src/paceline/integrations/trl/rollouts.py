"""TRL's ``rollout_func``: the trainer's prompts decoded by an engine that drafts, at the trainer's weights."""

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from paceline.config import HISTORIES, Config, PolicyConfig
from paceline.engines.hf import HFEngine
from paceline.engines.identity import check_identity
from paceline.forward.modes import keeping_modes
from paceline.integrations.trl.keeping import Keeper
from paceline.integrations.trl.settings import TrlSettings, read_settings
from paceline.integrations.trl.teaching import Teaching
from paceline.report.metrics import acceptance, speedup, tokens_per_forward
from paceline.rl.drafting import learns, sentinel
from paceline.rl.engine import RunEngine, make_engine
from paceline.rl.policy import Policy
from paceline.schema import EngineStats, PacelineError, Rollout, RolloutRequest, SamplingParams, as_tokens

_DTYPES = ("float32", "float64", "bfloat16")


class TrlError(PacelineError):
    """A TRL trainer whose rollouts paceline cannot decode; the message says what to set."""


class Rollouts:
    """``GRPOTrainer(..., rollout_func=Rollouts(settings))``: called with prompts and the trainer, returns rollouts.

    The engine is built on the first call, from the trainer's own model; after that the weights follow the trainer's
    ``global_step``, which is the version that rollouts carry. What is sampled follows from the trainer's weights,
    prompts, ``GRPOConfig`` and seed, never from what was drafted. A callback that is added to the trainer keeps history
    and the drafter in its checkpoints, and trains a drafter that learns on the trainer's own passes (``cotrain``).

    ``rollouts`` are those of the last call, ``events`` counts what went otherwise than it should.
    """

    def __init__(self, settings: TrlSettings) -> None:
        self.settings = settings
        self.rollouts: list[Rollout] = []
        self._engine: RunEngine | None = None
        self._policy: Policy | None = None
        self._config = Config()
        self._teaching: Teaching | None = None
        self._place = ""
        self._calls = 0
        self._checked = 0
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One response to each prompt, siblings being prompts that are equal, as TRL repeats them.

        Returns ``prompt_ids``, ``completion_ids`` (the token that ended a response included) and ``logprobs``, natural
        logarithms under the law that was sampled. Raises TrlError or ConfigError, one line, on the first call where the
        trainer asks for what cannot be honoured.
        """
        # What the trainer draws later, such as the order of its batches, must not depend on how a drafter starts.
        with torch.random.fork_rng():
            engine, policy = self._ready(trainer, len(prompts))
            self._follow(engine, policy, trainer)
            requests = self._requests(tokenized(prompts, trainer), trainer)
            before, started = engine.stats(), time.perf_counter()
            self.rollouts = engine.generate(requests)
            seconds = time.perf_counter() - started
        figures = figures_of(self.rollouts, before, engine.stats(), seconds)
        if self._teaching is not None and trainer.model.training:
            self._teaching.heard(self.rollouts, seconds, trainer.state)
            figures |= self._teaching.figures()
        figures |= self._checks(engine, requests)
        log(trainer, figures)
        return {
            "prompt_ids": [rollout.prompt.tolist() for rollout in self.rollouts],
            "completion_ids": [rollout.tokens.tolist() for rollout in self.rollouts],
            "logprobs": [rollout.logprobs.tolist() for rollout in self.rollouts],
        }

    @property
    def engine(self) -> RunEngine:
        """The engine; RuntimeError before the first call."""
        if self._engine is None:
            raise RuntimeError("the engine is built when the trainer asks for the first rollouts")
        return self._engine

    def stats(self) -> EngineStats:
        """The engine's counters since it was built."""
        return self.engine.stats()

    def close(self) -> None:
        """Release the engine; the next call builds another, with nothing remembered."""
        if self._teaching is not None:
            self._teaching.close()
        if self._engine is not None:
            self._engine.close()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._engine = self._policy = self._teaching = self._scratch = None

    def _ready(self, trainer: Any, prompts: int) -> tuple[RunEngine, Policy]:
        if self._engine is None or self._policy is None:
            check_trainer(trainer)
            self._policy = policy_of(trainer)
            self._config = self.settings.run(trainer.args, self._policy.config)
            engine, watched = self._config.engine, sentinel(self._config)
            own = replace(self._config, engine=replace(engine, slots=min(engine.slots, prompts), sentinel=watched))
            self._scratch = tempfile.TemporaryDirectory(prefix="paceline-")
            self._engine = make_engine(own, self._policy, Path(self._scratch.name) / "policy", has_grammars=False)
            if learns(self._config):
                self._teaching = Teaching(self._config, self._policy)
            keeper = Keeper(self._engine, self._teaching, trainer.accelerator.process_index)
            if trainer.state.global_step:
                keeper.restore(trainer.args, trainer.state)
            elif (warm := self._config.drafter.history.warm) is not None and self._config.drafter.kind in HISTORIES:
                keeper.warm_start(warm)
            trainer.add_callback(keeper)
        return self._engine, self._policy

    def _follow(self, engine: RunEngine, policy: Policy, trainer: Any) -> None:
        """The engine's weights become those of the trainer's step, where they are not yet."""
        version = int(trainer.state.global_step)
        if version != engine.stats().weight_version:
            engine.load_weights(version, policy.refit_tensors())
        if self._teaching is not None and (weights := self._teaching.moved()) is not None:
            engine.load_drafter_weights(version, weights)

    def _requests(self, prompts: Sequence[Sequence[int]], trainer: Any) -> list[RolloutRequest]:
        """A request a prompt; its seed follows from the step, the call and the place in it, so it survives a resume."""
        mode = "train" if trainer.model.training else "eval"
        place = f"{mode}/{trainer.state.global_step}"
        self._calls = self._calls + 1 if place == self._place else 0
        self._place = place
        prefix = f"{place}/{self._calls}/{trainer.accelerator.process_index}"
        params = self._config.sampling
        if not self._config.sampling.ignore_eos:
            params = with_stops(params, trainer.eos_token_ids)
        groups: dict[tuple[int, ...], str] = {}
        return [
            RolloutRequest(
                request_id=f"{prefix}/{index}",
                prompt=as_tokens(prompt),
                group=groups.setdefault(tuple(prompt), f"{prefix}/{len(groups)}"),
                params=params,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _checks(self, engine: RunEngine, requests: Sequence[RolloutRequest]) -> dict[str, float]:
        """Every so many calls the same requests decoded plainly: how many of the rollouts differ."""
        every = self.settings.check.every
        self._checked += 1
        if not every or (self._checked - 1) % every or not isinstance(engine, HFEngine):
            return {}
        found = check_identity(engine, requests, self.rollouts)
        return {
            "differ_from_plain": float(len(found.differences)),
            "violations": float(found.verdict == "violation"),
        }


def rollout_func(
    settings: TrlSettings | Mapping[str, Any] | str | Path | None = None, overrides: Sequence[str] = ()
) -> Rollouts:
    """What ``GRPOTrainer`` takes as ``rollout_func``; ``settings`` is a YAML file, a mapping, or None for the defaults.

    ``overrides`` are of the form ``section.key=value``. Raises ConfigError, one line, for unknown keys and values that
    cannot be honoured; what follows from the trainer alone is checked at its first rollouts.
    """
    return Rollouts(read_settings(settings, overrides))


def tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Prompts as TRL's own generation reads them: texts as they are, conversations by the trainer's chat template."""
    processing = trainer.processing_class
    if isinstance(prompts[0], str):
        found: list[list[int]] = processing(text=list(prompts))["input_ids"]
        return found
    conversations: list[list[int]] = processing.apply_chat_template(
        conversation=list(prompts),
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]
    return conversations


def check_trainer(trainer: Any) -> None:
    """TrlError, one line, for a trainer whose rollouts would not be its own policy's."""
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        raise TrlError("rollout_func: the trainer has a processor, and images are nothing that is decoded here")
    if trainer.use_vllm:
        raise TrlError(
            "GRPOConfig.use_vllm=True: this rollout_func decodes by itself; set it to False, or leave rollout_func out "
            "and draft inside vLLM (paceline.integrations.trl.speculate)"
        )
    zero = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or (zero is not None and zero.zero_stage == 3):
        raise TrlError(
            "rollout_func: FSDP and ZeRO-3 leave no process with the whole policy; train with DDP, or draft inside "
            "vLLM (paceline.integrations.trl.speculate)"
        )


def policy_of(trainer: Any) -> Policy:
    """The trainer's model, which stays its own, as what an engine is built from and follows."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapter = model if isinstance(model, PeftModel) else None
    base = model.get_base_model() if adapter is not None else model
    dtype: Any = str(base.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TrlError(f"rollout_func: the trainer's model is in {dtype}; load it in one of {', '.join(_DTYPES)}")
    config = PolicyConfig(path=base.name_or_path or "policy", dtype=dtype)
    with keeping_modes(list(model.modules())):
        return Policy(base, trainer.processing_class, config, adapter)


def with_stops(params: SamplingParams, stop_ids: Sequence[int]) -> SamplingParams:
    """The parameters with the trainer's ends of a response among their own."""
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *map(int, stop_ids)))))


def figures_of(
    rollouts: Sequence[Rollout], before: EngineStats, after: EngineStats, seconds: float
) -> dict[str, float]:
    """A call in figures, by the names of ``paceline.report.definitions``, and what it had of each event."""
    emitted, forwards = sum(len(one.tokens) for one in rollouts), sum(one.forwards for one in rollouts)
    drafted, accepted = sum(one.drafted for one in rollouts), sum(one.accepted for one in rollouts)
    return figures_from(emitted, forwards, drafted, accepted, before, after, seconds)


def figures_from(
    emitted: int, forwards: int, drafted: int, accepted: int, before: EngineStats, after: EngineStats, seconds: float
) -> dict[str, float]:
    """The same from tokens and row-forwards, with times and events of the engine's counters."""
    passes, plain = after.pass_seconds - before.pass_seconds, after.plain_seconds - before.plain_seconds
    figures = {
        "tokens_per_forward": tokens_per_forward(emitted, forwards),
        "acceptance": acceptance(accepted, drafted),
        "drafted_per_forward": drafted / forwards if forwards else math.nan,
        "generation_seconds": seconds,
        "speedup_projected": speedup(plain, passes),
    }
    events = {name: float(count - before.events.get(name, 0)) for name, count in after.events.items()}
    return figures | {f"events/{name}": count for name, count in events.items() if count}


def log(trainer: Any, figures: Mapping[str, float]) -> None:
    """Add figures to what the trainer logs next, under ``paceline/``; what was never measured is left out."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in figures.items():
        if math.isfinite(value):
            metrics[f"paceline/{name}"].append(value)
