"""The production engine: vLLM verifies and samples; paceline, or a drafter of vLLM's own, drafts inside it."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig
from paceline.drafters.isolated_wire import Absorb
from paceline.engines.drive import generate
from paceline.engines.intake import Limits, expand
from paceline.engines.sentinel import Sentinel
from paceline.engines.vllm import params as vllm_params
from paceline.engines.vllm.counts import PassCounts
from paceline.engines.vllm.failures import refusals
from paceline.engines.vllm.front import Delta, Front, Launch, VllmError
from paceline.engines.vllm.launch import PLUGIN_KINDS, Plan, plan
from paceline.engines.vllm.model_files import default_eos_ids, text_of
from paceline.engines.vllm.outputs import Answer
from paceline.engines.vllm.versions import require_vllm
from paceline.engines.vllm.watch import Watch
from paceline.engines.vllm.weights import Weights
from paceline.engines.vllm.workarounds import refusal, standing
from paceline.history.snapshot import decode_snapshot
from paceline.sampling.stops import Decode
from paceline.schema import CUT_SHORT, EngineStats, FinishReason, PacelineError, Rollout, RolloutRequest

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("paceline.vllm")
_POLL_S = 1.0


class VllmEngine:
    """Decodes with vLLM; implements ``engines.base.Engine``.

    It keeps the law, not the tokens: what is sampled depends on the drafter and on who shares the batch, its
    distribution does not. ``model`` is a directory or hub id, ``eos_ids`` end a response (default: the model's own),
    ``decode`` turns token ids into text (needed for stop strings; default: that of ``tokenizer``), ``tokenizer`` is a
    directory or hub id that vLLM loads (needed for grammars), ``refit_names`` names the parameters that every
    ``load_weights`` must hold (default: all), ``logprobs`` is the mode of all requests. ``speculative`` is the
    effective configuration of speculation, None where nothing is drafted.

    Raises VllmMissingError or VllmVersionError without a supported vLLM, LaunchError for a configuration that it cannot
    be started with, LossyError for a lossy one unless ``allow_lossy`` is True, and VllmError where it does not start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig,
        drafter: DrafterConfig,
        budget: BudgetConfig | None = None,
        dtype: str = "float32",
        seed: int = 0,
        eos_ids: Iterable[int] | None = None,
        decode: Decode | None = None,
        tokenizer: str | Path | None = None,
        refit_names: Iterable[str] | None = None,
        allow_lossy: bool = False,
        logprobs: Literal["processed", "raw"] = "processed",
    ) -> None:
        require_vllm("engine")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        self.config = config
        self.drafter = drafter
        self.logprobs: Literal["processed", "raw"] = logprobs
        made: Plan = plan(
            model,
            config=config,
            drafter=drafter,
            budget=budget or BudgetConfig(),
            dtype=dtype,
            seed=seed,
            tokenizer=tokenizer,
            logprobs=logprobs,
            allow_lossy=allow_lossy,
            on_cpu=current_platform.is_cpu(),
            known=frozenset(field.name for field in dataclasses.fields(EngineArgs)),
        )
        self.speculative = made.speculative
        self._eos_ids = tuple(default_eos_ids(model) if eos_ids is None else eos_ids)
        grammar_end = None
        if tokenizer is not None:
            own, grammar_end = text_of(tokenizer)
            decode = decode or own
        self.decode = decode
        self._front: Front = _front(config.vllm.front)(made.launch)
        self.context = self._front.context
        self._limits = Limits(self.context, self._front.vocabulary, made.kv_tokens, decode is not None)
        speculates, mend = made.speculative is not None, config.vllm.mend
        self._terms = vllm_params.Terms(
            logprobs=logprobs,
            has_tokenizer=tokenizer is not None,
            grammar_end=grammar_end,
            seed=seed,
            refusal=partial(refusal, speculates=speculates, mend=mend, allow_lossy=allow_lossy),
        )
        faults = standing(speculates=speculates, mend=mend) if allow_lossy else ()
        self._stats = EngineStats(lossy=(*made.lossy, *faults), events={})
        self._answers: dict[str, Answer] = {}
        self._done: list[Rollout] = []
        self._closed = False
        self._uncounted = PassCounts()
        try:
            drafts = _files_of_drafter(made.speculative)
            self._weights = Weights(self._front, model, refit_names, drafter=drafts, mend=mend, allow_lossy=allow_lossy)
            for name in self._front.rpc("paceline_mend", mend)[0]:
                self._stats.count(f"mended/{name}")
        except PacelineError:
            self.close()
            raise
        watched = config.sentinel if speculates else msgspec.structs.replace(config.sentinel, canaries=0)
        self.sentinel = Sentinel(watched, Watch(self, self._front, self._weights), self._tell, exact=False)
        _LOG.info("vLLM speculates with %s", self.speculative)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; all of them are checked before any is queued.

        Raises RequestError for what ``HFEngine.submit`` refuses and for every parameter that vLLM would not honour.
        What was begun goes on by the law of its policy, with other noise than it would have had.
        """
        self._check_open()
        if self._weights.void:
            raise VllmError("the policy has no weights since it slept at level 2; call load_weights first")
        samples = [sample for request in requests for sample in expand(request)]
        self._limits.check([request for request, _ in samples], set(self._answers))
        prepared = []
        for request, index in samples:
            stop_ids, rest = self._stop_ids(request), vllm_params.rest_of(request)
            vllm_params.check(rest, stop_ids, self._terms)
            prepared.append((request, index, stop_ids, rest, vllm_params.to_vllm(rest, stop_ids, self._terms)))
        added: list[str] = []
        for request, index, stop_ids, rest, params in prepared:
            try:
                self._front.add(request.request_id, rest.prompt.tolist(), params)
            except refusals() as error:
                self._front.abort(added)
                for name in added:
                    del self._answers[name]
                raise vllm_params.refused(request, error) from None
            added.append(request.request_id)
            room = min(rest.params.max_tokens, self.context - len(rest.prompt))
            self._answers[request.request_id] = Answer(request, index, stop_ids, room, self.decode)

    def step(self) -> list[Rollout]:
        """One forward pass, or what vLLM's own process emitted since; returns the rollouts that finished."""
        self._check_open()
        if self._answers:
            self._take(self._front.poll(_POLL_S))
        done, self._done = self._done, []
        self.sentinel.remember(done)
        return done

    def generate(
        self, requests: Sequence[RolloutRequest], on_finish: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """Submit and step until all are done; rollouts in the order of the requests and their samples."""
        return generate(self, requests, on_finish)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it the plug-in drafts for all it is worth, and nothing is counted. No request may be in flight."""
        stats, before = self._stats, self._counts()
        self._stats = msgspec.structs.replace(stats)
        self._plugin("aside", True)
        try:
            yield
        finally:
            self._plugin("aside", False)
            self._stats, self._uncounted = stats, self._front.counts().less(before)

    def abort(self, request_id: str) -> None:
        """End a request now; the next ``step`` returns what it has, finish reason ``abort``. KeyError if unknown."""
        if request_id not in self._answers:
            raise KeyError(f"request {request_id} is not in flight")
        self._front.abort([request_id])
        self._finish(request_id, "abort")

    @property
    def busy(self) -> bool:
        """Whether a ``step`` has work to do or rollouts to hand out."""
        return bool(self._answers or self._done)

    @property
    def keeps_law_only(self) -> bool:
        """vLLM samples by itself: tokens depend on the drafter and the batch, their law does not."""
        return True

    @property
    def version(self) -> int:
        """The version of the weights that decode now."""
        return self._stats.weight_version

    def stats(self) -> EngineStats:
        """The counters since the engine was built.

        Passes, their seconds, preemptions and drafted tokens are those of vLLM's scheduler, emitted and accepted tokens
        are counted here, one by one. What a budget decided, times of drafting and the plain seconds come from the
        plug-in where it drafts, and are 0 where vLLM's own drafters do.
        """
        stats = msgspec.structs.replace(self._stats, events=dict(self._stats.events))
        stats.drafter_version, stats.canary_acceptance = self.sentinel.versions()[1], self.sentinel.acceptance
        counts = self._counts()
        stats.forwards = counts.passes
        stats.passes_plain = counts.passes_plain
        stats.preemptions = counts.preemptions
        stats.depths_tested, stats.depths_accepted = counts.depths_tested, counts.depths_accepted
        stats.tokens_drafted = stats.nodes_offered = counts.tokens_drafted
        stats.forward_seconds = stats.pass_seconds = counts.seconds
        report = self._plugin("report") or {}
        for name in _FROM_PLUGIN:
            if name in report:
                setattr(stats, name, report[name])
        stats.events.update(report.get("events", {}))
        return stats

    def check_weights(self, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Raise the WeightsError with which ``load_weights`` would refuse them; nothing else happens."""
        self._weights.check(tensors)

    def load_weights(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """The policy moves to ``version``. ``engine.vllm.pause`` says what becomes of requests in flight.

        They are kept, and their later tokens carry the new version (``refit_kv`` as in ``HFEngine``), or end before the
        weights move: by themselves (``wait``), or as ``abort``. The sentinel looks at policy and drafter then. Raises
        WeightsError with the first tensor that is missing, unknown or of another shape; nothing is loaded then, and
        nothing ended.
        """
        self._check_open()
        self._weights.check(tensors)
        if self.config.vllm.pause == "wait":
            while self._answers:
                self._take(self._front.poll(_POLL_S))
        elif self.config.vllm.pause == "abort":
            for request_id in list(self._answers):
                self.abort(request_id)
        self.sentinel.refit(tensors, lambda: self._load(version, tensors))

    def _load(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> Collection[str]:
        self._take(self._front.pause())
        try:
            loaded = self._weights.load(version, tensors)
            self._stats.weight_version = version
            self._front.reset_prefix_cache(running=self.config.refit_kv == "recompute")
            self._plugin("on_weights", version)
        finally:
            self._front.resume()
        return loaded

    def load_drafter_weights(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """A model that drafts moves to ``tensors``, made for the policy's ``version``; WeightsError where none does."""
        self._check_open()
        self._take(self._front.pause())
        try:
            self._weights.load_drafter(version, tensors)
        finally:
            self._front.resume()
        self.sentinel.drafter_moved()

    def sleep(self) -> None:
        """Give memory back between generations, at the level ``engine.vllm.sleep``. No request may be in flight."""
        self._check_open()
        if self._answers:
            raise RuntimeError("the engine cannot sleep while requests are in flight")
        self.sentinel.asleep()
        self._weights.sleep(self.config.vllm.sleep or 1)

    def wake(self) -> None:
        """Take the memory again. After a sleep of level 2 the weights are void until ``load_weights``."""
        self._check_open()
        self._weights.wake()
        if not self._weights.void:
            self.sentinel.awake()

    def state(self) -> dict[str, Any]:
        """What was measured of passes and drafts, for a checkpoint: plain values."""
        found: dict[str, Any] | None = self._plugin("state")
        return {**(found or {}), "sentinel": self.sentinel.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave, other keys left aside; KeyError or VllmError for anything else."""
        if "sentinel" in state:
            self.sentinel.load_state(state["sentinel"])
        if self.speculative is not None and self.drafter.kind in PLUGIN_KINDS:
            self._plugin("load_state", {key: state[key] for key in ("step_times", "budget")})

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that others decoded become history of the plug-in; any other drafter ignores them."""
        self._check_open()
        said = Absorb.of([rollout for rollout in rollouts if rollout.finish_reason not in CUT_SHORT])
        self._plugin("absorb", msgspec.msgpack.encode(said))

    def history_snapshot(self) -> bytes | None:
        """The history that drafts, as ``history.snapshot`` writes it; None where there is none."""
        found: bytes | None = self._plugin("snapshot")
        return found or None

    def restore_history(self, data: bytes) -> None:
        """Take over what ``history_snapshot`` gave. SnapshotError where it is none."""
        decode_snapshot(data)
        self._plugin("restore", data)

    def close(self) -> None:
        """End vLLM and free the process for another engine; later calls raise."""
        if not self._closed:
            self._closed = True
            self._answers.clear()
            self._front.close()

    def _plugin(self, method: str, *args: Any) -> Any:
        """Call the drafter inside vLLM; None where it is not ours."""
        if self.speculative is None or self.drafter.kind not in PLUGIN_KINDS or self._closed:
            return None
        return next((found for found in self._front.rpc("paceline_plugin", method, *args) if found is not None), None)

    def _counts(self) -> PassCounts:
        """What the scheduler counted, canaries aside."""
        return self._front.counts().less(self._uncounted)

    def _tell(self, event: str, message: str) -> None:
        self._stats.count(event)
        _LOG.warning("%s: %s", event, message)

    def _take(self, found: Sequence[Delta]) -> None:
        """Book what was emitted by the weights of now, and finish what ended."""
        early = []
        for delta in found:
            answer = self._answers.get(delta.request_id)
            if answer is None:
                continue
            if not answer.passes and delta.passes:
                self._stats.prompts_shared += delta.cached > 0
                self._stats.tokens_prefilled += answer.prefilled - delta.cached
            emitted, passes, accepted = answer.emitted, answer.passes, answer.accepted
            try:
                reason = answer.take(delta, self.version)
            except Exception as error:  # noqa: BLE001  ``decode`` is anybody's, and the others go on
                self._fail(delta.request_id, error)
                early.append(delta.request_id)
                continue
            self._stats.tokens_emitted += answer.emitted - emitted
            self._stats.row_forwards += answer.passes - passes
            self._stats.tokens_accepted += answer.accepted - accepted
            if reason is not None:
                if delta.finish is None:
                    early.append(delta.request_id)
                self._finish(delta.request_id, reason)
        if early:
            self._front.abort(early)

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        answer = self._answers.pop(request_id)
        accepted = self._stats.tokens_accepted
        per_accepted = self._counts().tokens_drafted / accepted if accepted else 0.0
        source = "model" if self.drafter.model_kind else "history" if self.drafter.kind == "history" else "other"
        try:
            self._done.append(answer.rollout(reason, self.logprobs, source, per_accepted))
        except Exception as error:  # noqa: BLE001  ``decode`` is anybody's
            self._answers[request_id] = answer
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a request whose text cannot be decoded."""
        answer = self._answers.pop(request_id)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        why = f"request {request_id}, response position {answer.emitted}: {text}"
        self._tell("request_failed", why)
        self._done.append(answer.failed(why, self.logprobs))

    def _stop_ids(self, request: RolloutRequest) -> tuple[int, ...]:
        params = request.params
        return params.stop_token_ids + (() if params.ignore_eos else self._eos_ids)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


#: What the plug-in counts better than the scheduler, or alone.
_FROM_PLUGIN = (
    "draft_seconds",
    "passes_plain",
    "passes_probed",
    "nodes_offered",
    "tokens_expected",
    "drafts_asked",
    "drafts_prefetched",
    "pass_seconds",
    "plain_seconds",
)


def _files_of_drafter(speculative: Mapping[str, Any] | None) -> str | None:
    """Where the files of a model that drafts are, if it has files of its own."""
    settings = speculative or {}
    return settings.get("model") if settings.get("method") in ("draft_model", "eagle3") else None


def _front(kind: str) -> Callable[[Launch], Front]:
    """The front of that kind."""
    if kind == "async":
        from paceline.engines.vllm.asynchronous import AsyncFront  # type: ignore[import-not-found, unused-ignore]

        return AsyncFront  # type: ignore[no-any-return, unused-ignore]
    from paceline.engines.vllm.offline import OfflineFront

    return OfflineFront
