"""The reference engine: continuous batching over KV slots, speculative or plain, one policy forward a step."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.budget.controller import BudgetController, Plan
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import history_of, learned_of
from paceline.drafters.base import Drafter
from paceline.drafters.guarded import GuardedDrafter
from paceline.engines.drive import generate
from paceline.engines.guard import check_lossless, verification
from paceline.engines.hf.faults import CacheLostError, RowError, failures_of, line
from paceline.engines.hf.observed import Observed
from paceline.engines.hf.queue import Queue
from paceline.engines.hf.row import Row
from paceline.engines.hf.schedule import Scheduler, Share
from paceline.engines.hf.verifying import Verifier, verify
from paceline.engines.hf.watch import Watch
from paceline.engines.intake import Limits, default_eos_ids, expand, start_grammar
from paceline.engines.sentinel import Sentinel
from paceline.files import named
from paceline.forward.model_files import load_tokenizer, model_source
from paceline.forward.pretrained import load_pretrained
from paceline.forward.runner import Runner, WeightsError
from paceline.history.snapshot import decode_snapshot, encode_snapshot
from paceline.sampling.accept import Verdict, accept
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.processors import Spec
from paceline.sampling.stops import Decode
from paceline.schema import (
    CANARY,
    CUT_SHORT,
    DraftLawError,
    EngineStats,
    FinishReason,
    Outcome,
    Rollout,
    RolloutRequest,
    as_tokens,
)

_LOG = logging.getLogger(__name__)


class HFEngine:
    """Decodes with a causal language model of transformers; implements ``engines.base.Engine``.

    The model becomes the engine's own: it is put into evaluation mode and its attention is replaced. Tokens are a pure
    function of weights, prompt, sampling parameters and seeds on equal logits; the drafter only decides how many a
    pass emits. ``seed`` is the run's noise key, ``eos_ids`` end a response (default: the model's generation config),
    ``decode`` turns token ids into text (needed for stop strings), ``tokenizer`` (a fast one of transformers, or a
    ``Vocabulary``) says what ids stand for (needed for grammars), ``budget`` is the most tokens drafted a request and
    pass, ``budget_config`` says how much of that is verified, ``refit_names`` names the parameters that every
    ``load_weights`` must hold (default: all). ``verifier`` decides what is kept in the place of paceline's own
    acceptance; LossyError refuses one unless ``allow_lossy`` is True, and ``stats().lossy`` names it.

    A request that cannot be decoded, whatever of a pass it fails in, ends with the finish reason ``error`` and a line
    that names it, and is counted as ``request_failed``; all others go on as if it had not been there. A drafter that is
    caught out by its own distributions is lost, as one that raises is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        drafter: Drafter | None = None,
        budget: int = 16,
        budget_config: BudgetConfig | None = None,
        config: EngineConfig | None = None,
        seed: int = 0,
        eos_ids: Iterable[int] | None = None,
        decode: Decode | None = None,
        tokenizer: PreTrainedTokenizerBase | Vocabulary | None = None,
        refit_names: Iterable[str] | None = None,
        verifier: Verifier | None = None,
        allow_lossy: bool = False,
    ) -> None:
        self.config = config or EngineConfig()
        lossy = check_lossless("paceline", verification(self.config, verifier), allow_lossy=allow_lossy)
        self._accept = verifier or partial(accept, acceptance=self.config.acceptance)
        self.seed = seed
        self.decode = decode
        self._grammars = None if tokenizer is None else Vocabulary.of(tokenizer)
        self.table = StepTimeTable()
        self._runner = Runner(model, invariant=self.config.invariant)
        own_limit = self._runner.context
        self.context = min(self.config.context or own_limit, own_limit)
        self._limits = Limits(self.context, self._runner.vocabulary, self.config.kv_tokens, decode is not None)
        self._eos_ids = tuple(default_eos_ids(model) if eos_ids is None else eos_ids)
        self._refit_names = None if refit_names is None else frozenset(refit_names)
        self._stats = EngineStats(lossy=lossy, events={})
        #: What drafts, guarded: whatever it raises is an event, and the engine goes on without.
        self.drafter = None if drafter is None else GuardedDrafter(drafter, partial(_tell, self._stats))
        self._queue = Queue(self.config, self._runner.kv, self._stats)
        self._observed = Observed(self._runner, self._queue)
        self.controller = BudgetController(budget_config or BudgetConfig(), self.table, self._stats)
        self._scheduler = Scheduler(
            self._queue,
            self.controller,
            self._stats,
            self._observed,
            budget=budget,
            context=self.context,
            vocabulary=self._runner.vocabulary,
            coupled=self.config.acceptance == "coupled",
        )
        self.is_drafting = True
        watched = self.config.sentinel if drafter is not None else replace(self.config.sentinel, canaries=0)
        self.sentinel = Sentinel(watched, Watch(self, model, self._observed), partial(_tell, self._stats))
        self._done: list[Rollout] = []
        self._closed = False
        if self.drafter is not None:
            self._observed.attach(self.drafter)
            self.drafter.on_weights(0)  # it may come from another engine, whose weights had moved on

    @classmethod
    def from_pretrained(cls, path: str, *, dtype: str = "float32", device: str = "cpu", **options: Any) -> "HFEngine":
        """Load a model directory or hub id with its tokenizer; ``options`` are those of the constructor.

        ``dtype`` is ``float32``, ``float64`` or ``bfloat16``. Weights are read from safetensors alone. ModelError, one
        line, where model or tokenizer cannot be loaded.
        """
        source, key = model_source(str(path), "path"), "path"
        model: Any = load_pretrained(source, key, str(path), dtype)
        model.to(device)
        tokenizer = load_tokenizer(source, f"{key}={named(path)}")
        options.setdefault("decode", lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
        options.setdefault("tokenizer", tokenizer)
        return cls(model, **options)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; all of them are checked before any is queued.

        Raises RequestError for an id that is in flight, a prompt that leaves no room in the context, a token of the
        prompt or of a parameter outside the vocabulary, stop strings without ``decode``, a grammar that does not
        compile, or without a tokenizer or a stop id, a request that could never fit in ``kv_tokens``, and a ``begun``
        that is another request's, or complete. What was begun goes on as it would have where it was cut, if
        ``params.seed`` is what it was.
        """
        self._check_open()
        samples = [sample for request in requests for sample in expand(request)]
        in_flight = {row.request_id for row in self._queue.rows()} | {rollout.request_id for rollout in self._done}
        self._limits.check([request for request, _ in samples], in_flight)
        self._queue.add([(request, index, self._spec(request)) for request, index in samples], self.decode)
        self._scheduler.lengths.start([request for request, _ in samples])
        if self.drafter is not None:
            self.drafter.start([request for request, _ in samples])
            begun = [request.begun for request, _ in samples if request.begun is not None and len(request.begun.tokens)]
            said = [Outcome(request_id=r.request_id, tokens=r.tokens, accepted=0, drafted=0) for r in begun]
            if said:
                self.drafter.commit(said)

    def step(self) -> list[Rollout]:
        """One forward pass over the running requests; returns the rollouts that finished, or failed, in it."""
        self._check_open()
        try:
            self._queue.admit()
            if self._queue.running:
                self._pass()
        except CacheLostError as error:
            _tell(self._stats, "kv_memory_capped", f"{error}; going on with {self._queue.cap} positions at most")
        except RowError as error:
            self._fail(error.row, str(error))
        done, self._done = self._done, []
        self._scheduler.lengths.finish(done)
        if done and self.drafter is not None:
            self.drafter.finish(done)
        self.sentinel.remember(done)
        return done

    def generate(
        self, requests: Sequence[RolloutRequest], on_finish: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """Submit and step until all are done; rollouts in the order of the requests and their samples.

        Raises FailedRequestError, once all others are done, where one of them failed. Whatever is raised, none of the
        requests is left in flight.
        """
        return generate(self, requests, on_finish)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it the engine drafts nothing, and the drafter hears of nothing. Only while no request is in flight."""
        if self.busy:
            raise RuntimeError("the drafter cannot be taken away while requests are in flight")
        drafter, self.drafter = self.drafter, None
        try:
            yield
        finally:
            self.drafter = drafter

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it drafts are verified whole, and the engine neither counts passes nor learns from them."""
        if self.busy:
            raise RuntimeError("nothing can be decoded aside while requests are in flight")
        kept = self._stats, self.controller, self._scheduler, self.is_drafting
        self._stats = self._queue.stats = replace(self._stats, events=self._stats.events)
        self.controller = BudgetController(BudgetConfig(mode="fixed"), StepTimeTable(), self._stats)
        self._scheduler, self.is_drafting = self._scheduler.like(self.controller, self._stats), True
        try:
            yield
        finally:
            self._stats, self.controller, self._scheduler, self.is_drafting = kept
            self._queue.stats = self._stats

    def abort(self, request_id: str) -> None:
        """End a request now; the next ``step`` returns what it has, finish reason ``abort``. KeyError if unknown."""
        for row in self._queue.rows():
            if row.request_id == request_id:
                self._queue.remove(row)
                self._finish(row, "abort")
                return
        raise KeyError(f"request {request_id} is not in flight")

    @property
    def busy(self) -> bool:
        """Whether a ``step`` has work to do or rollouts to hand out."""
        return bool(self._queue.running or self._queue.waiting or self._done)

    @property
    def keeps_law_only(self) -> bool:
        """Whether drafts were verified by the laws they were drawn from: tokens then depend on the drafter."""
        return self._scheduler.used_laws

    @property
    def version(self) -> int:
        """The version of the weights that decode now."""
        return self._stats.weight_version

    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise the ``WeightsError`` with which ``load_weights`` would refuse them; nothing else happens."""
        self._runner.check_weights(tensors, self._refit_names)

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The policy moves to ``version``, also in the middle of requests: their later tokens carry it.

        With ``refit_kv`` "recompute" the cache of running requests is rebuilt by the new weights, so that later tokens
        are exactly the new policy's; "keep" goes on from the old keys and values. The sentinel looks at policy and
        drafter then. Raises ``WeightsError`` with the first tensor that is missing, unknown or of another shape;
        nothing is loaded then.
        """
        self._check_open()
        tensors = {name: tensor.to(self._runner.dtype) for name, tensor in tensors.items()}
        self.sentinel.refit(tensors, lambda: self._load(version, tensors))

    def _load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Collection[str]:
        self._runner.load_weights(tensors, self._refit_names)
        self._stats.weight_version = version
        self._queue.forget(recompute=self.config.refit_kv == "recompute")
        self.controller.refit()
        if self.drafter is not None:
            self.drafter.on_weights(version)
        return tensors

    def load_drafter_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The model that drafts moves to ``tensors``, made for the policy's ``version``, at any time.

        Raises ``WeightsError``, with nothing loaded, where no model drafts and where they do not fit.
        """
        self._check_open()
        learned = learned_of(self.drafter)
        if learned is None:
            raise WeightsError("no model drafts, so there is none to load weights into; set drafter.kind")
        learned.load_weights(version, tensors)
        self._observed.again()
        self._queue.show_again()
        self.controller.refit()
        self.sentinel.drafter_moved()

    def stats(self) -> EngineStats:
        """A copy of the counters since the engine was built."""
        watched = {"drafter_version": self.sentinel.versions()[1], "canary_acceptance": self.sentinel.acceptance}
        return replace(self._stats, events=dict(self._stats.events), **watched)

    def state(self) -> dict[str, Any]:
        """What was measured of passes and drafts, for a checkpoint: plain values."""
        return {
            "step_times": self.table.state(),
            "budget": self.controller.state(),
            "sentinel": self.sentinel.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave; KeyError, TypeError or ValueError for anything else."""
        self.table.load_state(state["step_times"])
        self.controller.load_state(state["budget"])
        if "sentinel" in state:
            self.sentinel.load_state(state["sentinel"])

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that others decoded become history, at any time; a drafter without a history ignores them."""
        self._check_open()
        if self.drafter is not None:
            self.drafter.absorb([rollout for rollout in rollouts if rollout.finish_reason not in CUT_SHORT])

    def history_snapshot(self) -> bytes | None:
        """The drafter's history as ``encode_snapshot`` writes it, None without one. No request in flight."""
        history = history_of(self.drafter)
        if self.drafter is None or history is None:
            return None
        return self.drafter.attempt(lambda: encode_snapshot(history.snapshot()))

    def restore_history(self, data: bytes) -> None:
        """Take over what ``history_snapshot`` gave, where the drafter keeps a history. SnapshotError if it cannot."""
        history = history_of(self.drafter)
        if self.drafter is not None and history is not None:
            self.drafter.attempt(lambda: history.restore(decode_snapshot(data)))

    def close(self) -> None:
        """Release the KV memory, give the model back, end the process of a drafter that has one; later calls raise."""
        if not self._closed:
            if self.drafter is not None:
                self.drafter.end_process()
            self._runner.close()
            self._closed = True

    # One pass

    def _pass(self) -> None:
        """Plan, verify and book one pass; what goes wrong in it costs the requests that it is about."""
        started = time.perf_counter()
        shares: Sequence[Share] = ()
        try:
            shares, plan = self._scheduler.schedule(self.drafter if self.is_drafting else None, self.version)
            verdicts, prefilled = verify(self._runner, self._accept, shares, self.seed, self._stats)
        except (CacheLostError, RowError):
            raise
        except Exception as error:  # noqa: BLE001  whose fault it is is found out, and that one is named
            self._stats.count("pass_failed")
            _LOG.debug("a pass failed", exc_info=error)
            self._recover(error, shares)
            return
        paths, emitted = self._commit(shares, verdicts)
        self._close(plan, paths, emitted, time.perf_counter() - started, prefilled)

    def _recover(self, error: Exception, shares: Sequence[Share]) -> None:
        """Nothing of the pass was booked. End the requests that ``error`` is about; the others are passed again."""
        running = {row.request_id: row for row in self._queue.running}
        failures = {name: why for name, why in failures_of(error).items() if name in running}
        for name, why in failures.items():
            self._fail(running[name], why)
        if failures:
            return
        if isinstance(error, DraftLawError) and self.drafter is not None and not self.drafter.lost:
            self.drafter.lose(error)
            return
        # Nobody is named. Each row is passed alone, without a draft: what fails then fails by its own fault.
        sound: list[tuple[Share, list[Verdict]]] = []
        failed: list[tuple[Row, Exception]] = []
        for share in shares or [self._alone(slot, row) for slot, row in enumerate(self._queue.running)]:
            share.draft = None
            try:
                verdicts, _ = verify(self._runner, self._accept, [share], self.seed, self._stats)
                sound.append((share, verdicts))
            except Exception as own:  # noqa: BLE001
                failed.append((share.row, own))
        if sound:
            self._commit([share for share, _ in sound], [verdict for _, found in sound for verdict in found])
        for row, cause in failed:
            if row in self._queue.running:
                self._fail(row, line(row, failures_of(cause).get(row.request_id, cause)))

    def _alone(self, slot: int, row: Row) -> Share:
        """What a row brings to a pass of its own where no pass could be planned."""
        count = min(row.missing, self.config.max_batched_tokens)
        self._queue.make_room(row.cached + count)
        return Share(row, slot, count, count == row.missing)

    def _commit(
        self, shares: Sequence[Share], verdicts: Sequence[Verdict]
    ) -> tuple[dict[str, tuple[npt.NDArray[np.int64], bool]], int]:
        """Book the pass: KV paths, tokens, stops; tell the drafter; finish what is finished.

        Returns, by request, the drafted nodes that were emitted and whether the response ended on the last of them; and
        the number of emitted tokens. Of a row that cannot be booked, as its text cannot be decoded, nothing is.
        """
        outcomes, ended, paths, tested = [], [], {}, []
        failed: list[tuple[Row, Exception]] = []
        waiting_verdicts = iter(verdicts)
        for share in shares:
            row = share.row
            if not share.decodes:
                row.cached += share.count
                continue
            verdict = next(waiting_verdicts)
            paths[row.request_id] = verdict.path[:0], False
            try:
                end = row.ending.cut(verdict.tokens, row.room(self.context))
            except Exception as error:  # noqa: BLE001  ``decode`` is anybody's
                failed.append((row, error))
                continue
            row.cached += share.count
            if not np.array_equal(verdict.path, np.arange(len(verdict.path))):
                self._runner.kv.move_positions(share.slot, row.cached + verdict.path, row.cached)
            row.cached += len(verdict.path)
            accepted = row.commit(verdict, end, share.draft, self.version)
            paths[row.request_id] = verdict.path[:accepted], accepted == end.count
            tested.append(share.tested(verdict.path, accepted, accepted == end.count))
            outcomes.append(
                Outcome(
                    request_id=row.request_id,
                    tokens=as_tokens(verdict.tokens[: end.count]),
                    accepted=accepted,
                    drafted=share.drafted,
                    finished=end.reason is not None,
                )
            )
            self._stats.row_forwards += 1
            self._stats.tokens_emitted += end.count
            self._stats.tokens_drafted += share.drafted
            self._stats.tokens_accepted += accepted
            if end.reason is not None:
                ended.append((row, end.reason))
        self._stats.count_depths(tested, [outcome.accepted for outcome in outcomes])
        if self.drafter is not None and outcomes:
            started = time.perf_counter()
            self.drafter.commit(outcomes)
            self._stats.draft_seconds += time.perf_counter() - started
        for row, reason in ended:
            self._queue.remove(row)
            self._finish(row, reason)
        for row, cause in failed:
            self._fail(row, line(row, cause))
        return paths, sum(len(outcome.tokens) for outcome in outcomes)

    def _close(
        self,
        plan: Plan,
        paths: Mapping[str, tuple[npt.NDArray[np.int64], bool]],
        emitted: int,
        seconds: float,
        prefilled: int,
    ) -> None:
        """Tell the budget what became of the pass and what it cost."""
        found = [paths[draft.request_id] for draft in plan.drafts]
        self.controller.close(
            plan,
            [path for path, _ in found],
            [cut for _, cut in found],
            emitted=emitted,
            seconds=seconds - plan.propose_seconds,
            is_clean=not prefilled,
        )

    def _finish(self, row: Row, reason: FinishReason) -> None:
        """Hand out a row that is out of flight; as failed where its text cannot be decoded."""
        text = row.text
        if text is None and self.decode is not None:
            try:
                text = self.decode([int(token) for token in row.response])
            except Exception as error:  # noqa: BLE001  ``decode`` is anybody's
                self._end(row, line(row, error))
                return
        is_canary = row.request_id.startswith(CANARY)
        self._done.append(row.rollout("abort" if is_canary else reason, text))

    def _fail(self, row: Row, why: str) -> None:
        """Take a row out of flight that cannot go on; what its slot holds is for nobody."""
        row.forget()
        self._queue.remove(row)
        self._end(row, why)

    def _end(self, row: Row, why: str) -> None:
        _tell(self._stats, "request_failed", why)
        self._done.append(row.rollout("error", None, why))

    def _spec(self, request: RolloutRequest) -> Spec:
        params = request.params
        stop_ids = params.stop_token_ids + (() if params.ignore_eos else self._eos_ids)
        return Spec(params, stop_ids, start_grammar(request, stop_ids, self._grammars))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


def _tell(stats: EngineStats, event: str, message: str) -> None:
    stats.count(event)
    _LOG.warning("%s: %s", event, message)
