"""Transformers' own ``generate`` behind the engine seam: batched sampling, and its assisted generation.

It shares no sampling code with the reference engine, so each can be audited against the other.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from paceline.engines.generate_checks import ASSISTANT, LOOKUP, check_honoured, check_reach
from paceline.engines.guard import check_lossless
from paceline.engines.intake import Limits, default_eos_ids, expand
from paceline.forward.runner import copy_weights
from paceline.sampling.accept import LogitsError
from paceline.sampling.stops import Decode, cut
from paceline.schema import SOURCES, EngineStats, Rollout, RolloutRequest, as_tokens, derive_seed

_LOG = logging.getLogger(__name__)
_OTHER = SOURCES.index("other")


@dataclass(frozen=True)
class _Waiting:
    request: RolloutRequest
    index: int
    stop_ids: tuple[int, ...]
    room: int
    assisted: bool

    def runs_with(self, other: "_Waiting") -> bool:
        """Whether one call can serve both."""
        ours, theirs = (msgspec.structs.replace(each.request.params, seed=None) for each in (self, other))
        assisted = self.assisted or other.assisted  # assisted generation takes one request at a time
        return not assisted and ours == theirs and (self.stop_ids, self.room) == (other.stop_ids, other.room)


class GenerateEngine:
    """Decodes by ``model.generate``; implements ``engines.base.Engine``. A ``step`` is one call, run to its end.

    ``settings`` are generate's own for assisted generation: ``prompt_lookup_num_tokens`` (with
    ``max_matching_ngram_size``), or ``assistant_model`` (with ``num_assistant_tokens`` and its like); without any it
    samples plainly, ``slots`` requests at a time. Settings not known to be lossless raise LossyError unless
    ``allow_lossy`` is True, and ``stats().lossy`` names them. Parameters that generate does not honour as paceline
    means them are refused with a RequestError.

    A call draws from torch's generator, seeded by ``seed`` and the seeds of its requests: it can be repeated, but a
    token depends on who shares its batch, and only the law is that of the reference engine. ``margins`` are NaN: there
    are no keyed scores. The model's own generation configuration is set aside until ``close``, as it would add
    processors that nobody asked for; ``eos_ids`` are taken from it by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: Mapping[str, Any] | None = None,
        allow_lossy: bool = False,
        slots: int = 8,
        seed: int = 0,
        eos_ids: Iterable[int] | None = None,
        decode: Decode | None = None,
    ) -> None:
        self.settings = {name: value for name, value in (settings or {}).items() if value is not None}
        lossy = check_lossless("transformers", self.settings, allow_lossy=allow_lossy)
        self.model = model.eval()
        check_reach(model, self.settings)
        self.slots = slots
        self.seed = seed
        self.decode = decode
        config = model.config.get_text_config()
        self.context = int(config.max_position_embeddings)
        self._limits = Limits(self.context, int(config.vocab_size), 0, has_decode=True)
        self._eos_ids = tuple(default_eos_ids(model) if eos_ids is None else eos_ids)
        self._stats = EngineStats(lossy=lossy, events={})
        self._waiting: list[_Waiting] = []
        self._closed = False
        self._set_aside = [(model, model.generation_config)]
        model.generation_config = GenerationConfig()
        assistant = self.settings.get("assistant_model")
        if assistant is not None:
            self._set_aside.append((assistant, assistant.generation_config))
            # Generate reads these from the assistant, not from what it is called with.
            own = {name: value for name, value in self.settings.items() if name in ASSISTANT}
            assistant.generation_config = GenerationConfig(**own)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; all of them are checked before any is queued.

        Raises RequestError for an id in flight, a prompt without room in the context, a token outside the vocabulary,
        and a parameter that cannot be honoured.
        """
        self._check_open()
        samples = [sample for request in requests for sample in expand(request)]
        self._limits.check([request for request, _ in samples], {row.request.request_id for row in self._waiting})
        for request, _ in samples:
            check_honoured(request)
        for request, index in samples:
            params = request.params
            self._waiting.append(
                _Waiting(
                    request,
                    index,
                    params.stop_token_ids + (() if params.ignore_eos else self._eos_ids),
                    min(params.max_tokens, self.context - len(request.prompt)),
                    bool(self.settings) and request.speculate,
                )
            )

    @property
    def busy(self) -> bool:
        """Whether a ``step`` has work to do."""
        return bool(self._waiting)

    def step(self) -> list[Rollout]:
        """One call of ``generate``, for the oldest request and those that can share its call; returns them finished.

        Where a call fails, each of its requests gets one of its own; what fails alone ends as ``error``.
        """
        self._check_open()
        if not self._waiting:
            return []
        batch = [row for row in self._waiting if row is self._waiting[0] or row.runs_with(self._waiting[0])]
        batch = batch[: self.slots]
        started = time.perf_counter()
        rollouts = self._attempt(batch)
        taken = {row.request.request_id for row in batch}
        self._waiting = [row for row in self._waiting if row.request.request_id not in taken]
        seconds = time.perf_counter() - started
        self._stats.forward_seconds += seconds
        self._stats.pass_seconds += seconds
        return rollouts

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The policy moves to ``version``. Raises ``WeightsError``, with nothing loaded, unless the set is complete."""
        self._check_open()
        copy_weights(self.model, tensors)
        self._stats.weight_version = version

    def stats(self) -> EngineStats:
        """A copy of the counters since the engine was built."""
        return msgspec.structs.replace(self._stats, events=dict(self._stats.events))

    def close(self) -> None:
        """Give the models their generation configurations back; later calls raise."""
        for model, config in self._set_aside:
            model.generation_config = config
        self._set_aside = []
        self._closed = True

    # One call

    def _attempt(self, batch: Sequence[_Waiting]) -> list[Rollout]:
        try:
            return self._run(batch)
        except Exception as error:  # noqa: BLE001  what fails is a model's, a decoder's or transformers'
            if len(batch) > 1:
                return [rollout for row in batch for rollout in self._attempt([row])]
            return [self._failed(batch[0], error)]

    def _failed(self, row: _Waiting, error: Exception) -> Rollout:
        request, none, no_tokens = row.request, np.empty(0), as_tokens([])
        why = " ".join(f"{type(error).__name__}: {error}".split())
        why = str(error) if isinstance(error, LogitsError) else f"request {request.request_id}: {why}"
        self._stats.count("request_failed")
        _LOG.warning("request_failed: %s", why)
        return Rollout(
            request_id=request.request_id,
            group=request.group,
            prompt_key=request.prompt_key,
            prompt=request.prompt,
            tokens=no_tokens,
            logprobs=none,
            raw_logprobs=none,
            logprob_mode=request.params.logprobs,
            margins=none,
            versions=no_tokens,
            sources=np.empty(0, dtype=np.uint8),
            finish_reason="error",
            forwards=0,
            drafted=0,
            accepted=0,
            accept_lengths=no_tokens,
            sample_index=row.index,
            error=why,
        )

    def _run(self, batch: Sequence[_Waiting]) -> list[Rollout]:
        row, device = batch[0], self.model.device
        longest = max(len(row.request.prompt) for row in batch)
        input_BS = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask_BS = torch.zeros_like(input_BS)
        for index, prompt in enumerate(each.request.prompt for each in batch):
            input_BS[index, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask_BS[index, longest - len(prompt) :] = 1
        passes = _Passes(self.model, longest)
        options: dict[str, Any] = {}
        if row.assisted and "assistant_model" in self.settings:
            options["assistant_model"] = self.settings["assistant_model"]
        seeds = [each.request.seed for each in batch]
        with torch.random.fork_rng([device] if device.type == "cuda" else []), passes:
            torch.manual_seed(derive_seed("generate", self.seed, *seeds))
            try:
                output = self.model.generate(
                    input_BS.to(device),
                    attention_mask=mask_BS.to(device),
                    generation_config=self._generation_config(row),
                    streamer=passes if row.assisted else None,
                    **options,
                )
            except RuntimeError as error:
                if "probability tensor" in str(error):
                    raise _unsound(batch) from error
                raise
        tokens_BT = output.sequences[:, longest:].cpu()
        raw_BT = _chosen(output.logits, tokens_BT)
        greedy = row.request.params.temperature == 0
        # The law of a greedy position is a point mass.
        processed_BT = np.zeros_like(raw_BT) if greedy else _chosen(output.scores, tokens_BT)
        self._stats.forwards += passes.count
        self._stats.tokens_prefilled += int(mask_BS.sum()) - len(batch)
        return [
            self._rollout(each, tokens_BT[index].numpy(), processed_BT[index], raw_BT[index], passes)
            for index, each in enumerate(batch)
        ]

    def _generation_config(self, row: _Waiting) -> GenerationConfig:
        """Every setting that generate acts on, so that nothing is left to its defaults."""
        params = row.request.params
        law: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            law = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
        names = (*LOOKUP, "assistant_ensemble_weight") if row.assisted else ()
        return GenerationConfig(
            repetition_penalty=params.repetition_penalty,
            max_new_tokens=row.room,
            min_new_tokens=min(params.min_tokens, row.room) or None,
            eos_token_id=list(row.stop_ids) or None,
            pad_token_id=0,
            use_cache=True,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **law,
            **{name: self.settings[name] for name in names if name in self.settings},
        )

    def _rollout(
        self,
        row: _Waiting,
        tokens: npt.NDArray[np.int64],
        processed: npt.NDArray[np.float64],
        raw: npt.NDArray[np.float64],
        passes: "_Passes",
    ) -> Rollout:
        request = row.request
        end = cut(as_tokens(tokens), as_tokens([]), request.params, row.stop_ids, row.room)
        count = end.count
        if not np.isfinite(raw[:count]).all():
            raise _unsound([row])
        lengths, drafted = passes.accepted() if row.assisted else ([0] * count, 0)
        sources = np.zeros(count, dtype=np.uint8)
        start = 0
        for length, emitted in zip(lengths, passes.emitted, strict=False):
            sources[start : start + length] = _OTHER
            start += len(emitted)
        self._stats.row_forwards += len(lengths)
        self._stats.tokens_emitted += count
        self._stats.tokens_drafted += drafted
        self._stats.nodes_offered += drafted
        self._stats.tokens_accepted += sum(lengths)
        response = as_tokens(tokens[:count])
        return Rollout(
            request_id=request.request_id,
            group=request.group,
            prompt_key=request.prompt_key,
            prompt=request.prompt,
            tokens=response,
            logprobs=(raw if request.params.logprobs == "raw" else processed)[:count],
            raw_logprobs=raw[:count],
            logprob_mode=request.params.logprobs,
            margins=np.full(count, np.nan),
            versions=np.full(count, self._stats.weight_version, dtype=np.int32),
            sources=sources,
            finish_reason=end.reason or "abort",
            forwards=len(lengths),
            drafted=drafted,
            accepted=sum(lengths),
            accept_lengths=as_tokens(lengths),
            text=None if self.decode is None else self.decode(response.tolist()),
            sample_index=row.index,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


class _Passes(BaseStreamer):
    """Watches a call: how many passes the policy makes, what each was given to verify, and what it emitted."""

    def __init__(self, model: PreTrainedModel, prompt_length: int) -> None:
        self.count = 0
        self.drafts: list[list[int]] = []
        self.emitted: list[list[int]] = []
        self._model = model
        self._prompt_length = prompt_length
        self._puts = 0

    def __enter__(self) -> "_Passes":
        self._hook = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        # The first pass brings the prompt, later ones the last committed token; a draft follows.
        committed = 1 if self.count else self._prompt_length
        self.drafts.append(kwargs["input_ids"][0, committed:].tolist())
        self.count += 1

    def put(self, value: torch.Tensor) -> None:
        """Generate's prompt, then what each pass emitted."""
        if self._puts:
            self.emitted.append(value.flatten().tolist())
        self._puts += 1

    def end(self) -> None:
        """Nothing is left to do."""

    def accepted(self) -> tuple[list[int], int]:
        """How many drafted tokens each pass kept, and how many were drafted in all."""
        lengths = []
        for draft, emitted in zip(self.drafts, self.emitted, strict=True):
            equal = [a == b for a, b in zip(draft, emitted, strict=False)]
            lengths.append(equal.index(False) if False in equal else len(equal))
        return lengths, sum(len(draft) for draft in self.drafts)


def _chosen(logits: Sequence[torch.Tensor], tokens_BT: torch.Tensor) -> npt.NDArray[np.float64]:
    """Log-probabilities (B, T) of the tokens under T tensors (B, V) of logits."""
    columns = [
        step_BV.double().log_softmax(-1).gather(1, tokens_BT[:, at, None].to(step_BV.device))[:, 0]
        for at, step_BV in enumerate(logits)
    ]
    return torch.stack(columns, dim=1).cpu().numpy()


def _unsound(batch: Sequence[_Waiting]) -> LogitsError:
    names = [row.request.request_id for row in batch]
    line = f"request {', '.join(names)}: the policy's logits are NaN or infinite; check the weights and the parameters"
    return LogitsError(dict.fromkeys(names, line))
