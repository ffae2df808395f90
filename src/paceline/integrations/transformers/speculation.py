"""``model.generate(..., custom_generate=Speculation())``: the same law, drafted from what the model said before."""

import inspect
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList

from paceline.config import SentinelConfig
from paceline.drafters import GuardedDrafter, history_of, make_drafter
from paceline.engines.hf import HFEngine
from paceline.files import write_atomically
from paceline.history.snapshot import SnapshotError, encode_snapshot
from paceline.integrations.transformers.asked import (
    Asked,
    SpeculationError,
    check_call,
    check_room,
    prompts_of,
    read_asked,
)
from paceline.integrations.transformers.decoding import decode
from paceline.integrations.transformers.lending import lent, marks
from paceline.integrations.transformers.settings import SpeculationSettings, read_settings
from paceline.rl.layout import history_file
from paceline.schema import EngineStats, Rollout, RolloutRequest, as_tokens, derive_seed


class Speculation:
    """What ``generate`` takes as ``custom_generate``. It remembers, by prompt, what one model said in earlier calls.

    Rows are sampled with noise keyed by the call's seed, the row and the position, so they never depend on what was
    drafted. The seed is drawn from torch's generator, one draw a call that samples, or given as ``seed=`` to
    ``generate``. The model stays the caller's: each call borrows it and uses its weights as they are.

    ``settings`` are the sections ``drafter``, ``budget`` and ``engine``, as a mapping or a YAML file. ``rollouts`` and
    ``stats`` are those of the last call.
    """

    def __init__(self, settings: SpeculationSettings | Mapping[str, Any] | str | Path | None = None) -> None:
        self.settings = read_settings(settings)
        self.rollouts: list[Rollout] = []
        self.stats = EngineStats()
        self._drafter = make_drafter(self.settings.drafter)
        self._warm = self.settings.drafter.history.warm if self.settings.drafter.kind == "history" else None
        self._model: weakref.ref[PreTrainedModel] | None = None
        self._measured: dict[str, Any] | None = None
        self._marks: tuple[tuple[int, int], ...] = ()
        self._version = 0
        self._calls = 0
        self._closed = False

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Called by ``generate`` with rows (B * num_return_sequences, L); returns what it would have returned.

        That is the rows with their responses, padded on the right, or a GenerateDecoderOnlyOutput that holds them
        (``return_dict_in_generate``). SpeculationError, one line, where the call asks for what cannot be honoured.
        """
        self._check_mine(model)
        check_call(model, generation_config, model_kwargs, _unseen())
        prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        vocabulary = int(model.config.get_text_config().vocab_size)
        pads_B = torch.tensor([input_ids.shape[1] - len(prompt) for prompt in prompts])
        do_sample = bool(generation_config.do_sample)
        asked = read_asked(logits_processor, stopping_criteria, do_sample, input_ids.shape[1], vocabulary, pads_B)
        pad = generation_config._pad_token_tensor
        if asked.strings and pad is None and len(prompts) > 1:
            raise SpeculationError("stop strings end rows at different lengths; set pad_token_id")
        if seed is None:
            seed = int(torch.randint(1 << 62, (), device="cpu")) if do_sample else 0
        with lent(model) as parameters:
            engine = self._engine(model, asked, self._moved(parameters))
            try:
                check_room(prompts, asked, engine.context)
                requests = self._requests(prompts, asked, seed)
                self.rollouts = decode(engine, requests, input_ids.cpu(), asked.strings)
            finally:
                self._release(engine)
        sequences: Any = _joined(input_ids, self.rollouts, 0 if pad is None else int(pad))
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def save(self, path: str | Path) -> None:
        """Write what is remembered to ``path``, for the setting ``drafter.history.warm``; needs the kind history."""
        history = history_of(self._drafter)
        if history is None:
            raise SpeculationError(f"{path}: drafter.kind={self.settings.drafter.kind} remembers nothing to write")
        write_atomically(Path(path).expanduser(), encode_snapshot(history.snapshot()))

    def close(self) -> None:
        """Forget everything, and end the drafter's process where it has one; later calls raise."""
        if self._drafter is not None:
            GuardedDrafter(self._drafter, lambda *_: None).end_process()
        self._drafter, self._closed = None, True

    def _check_mine(self, model: PreTrainedModel) -> None:
        if self._closed:
            raise RuntimeError("this Speculation is closed")
        mine = None if self._model is None else self._model()
        if mine is not None and mine is not model:
            raise SpeculationError(
                "custom_generate: this Speculation remembers what another model said; make one for each model"
            )
        self._model = weakref.ref(model)

    def _engine(self, model: PreTrainedModel, asked: Asked, moved: bool) -> HFEngine:
        """An engine over the borrowed model, at its version, that knows what earlier ones measured."""
        engine = HFEngine(
            model,
            drafter=self._drafter,
            budget=self.settings.drafter.budget,
            budget_config=self.settings.budget,
            config=replace(self.settings.engine, sentinel=SentinelConfig(canaries=0, checksums=False)),
            eos_ids=asked.stop_ids,
            refit_names=(),  # the weights are in the model already
        )
        if self._measured is not None and moved:
            engine.load_state(self._measured)  # before the weights move, for it counts less from then on
        engine.load_weights(self._version, {})
        if self._measured is not None and not moved:
            engine.load_state(self._measured)
        if self._warm is not None:
            self._warm_up(engine, self._warm)
        return engine

    def _warm_up(self, engine: HFEngine, warm: str) -> None:
        try:
            engine.restore_history(history_file(Path(warm).expanduser()).read_bytes())
        except (OSError, SnapshotError) as error:
            self._release(engine)
            raise SpeculationError(f"drafter.history.warm={warm}: {error}") from None
        self._warm = None

    def _moved(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the weights were written to since the last call; then they are of another version."""
        found = marks(parameters)
        moved = bool(self._marks) and found != self._marks
        self._marks = found
        self._version += moved
        return moved

    def _requests(self, prompts: list[torch.Tensor], asked: Asked, seed: int) -> list[RolloutRequest]:
        self._calls += 1
        groups: dict[bytes, str] = {}
        requests = []
        for row, prompt in enumerate(prompts):
            tokens = as_tokens(np.asarray(prompt))
            requests.append(
                RolloutRequest(
                    request_id=f"{self._calls}/{row}",
                    prompt=tokens,
                    group=groups.setdefault(tokens.tobytes(), f"{self._calls}/{len(groups)}"),
                    params=replace(asked.params, seed=derive_seed("generate", seed, row)),
                )
            )
        return requests

    def _release(self, engine: HFEngine) -> None:
        """Keep what the engine learned and its drafter, and let go of the model and of the KV memory."""
        self.stats, self._measured = engine.stats(), engine.state()
        if engine.drafter is not None:
            if engine.drafter.lost:
                engine.drafter.revive()
            self._drafter = engine.drafter.inner
            engine.drafter = None  # or closing would end the drafter's process
        engine.close()


def _unseen() -> dict[str, Any]:
    """Arguments that ``generate`` was called with and hands to no ``custom_generate``, where it is what calls.

    They are looked for only to be refused: a streamer that hears nothing, or a model that never drafts, is no answer.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_qualname != "GenerationMixin.generate":
        frame = frame.f_back
    return (
        {}
        if frame is None
        else {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
    )


def _joined(input_BL: torch.Tensor, rollouts: list[Rollout], pad: int) -> torch.Tensor:
    """Prompts and responses (B, L + longest response), ``pad`` after the shorter ones, on the input's device."""
    longest = max(len(rollout.tokens) for rollout in rollouts)
    said_BT = torch.full((len(rollouts), longest), pad, dtype=input_BL.dtype)
    for row, rollout in enumerate(rollouts):
        said_BT[row, : len(rollout.tokens)] = torch.from_numpy(rollout.tokens)
    return torch.cat([input_BL, said_BT.to(input_BL.device)], dim=1)
