"""The synchronous training loop: prompts, speculative rollouts, rewards, GRPO, refit, checkpoint, step by step."""

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from socket import gethostname
from typing import Any, NoReturn

import torch
from msgspec.structs import replace

from paceline.config import HISTORIES, Config
from paceline.engines.identity import Identity
from paceline.files import FileError
from paceline.history.native import why_not
from paceline.history.snapshot import SnapshotError, read_snapshot
from paceline.report.html import write_report
from paceline.report.live import Event, Plan
from paceline.report.metrics import budget_metrics
from paceline.report.timeline import overlap_metrics
from paceline.report.trace import (
    MetricsWriter,
    PromptRow,
    StepSpans,
    TimelineWriter,
    TraceRow,
    TraceWriter,
    read_metrics,
    truncate_from,
    write_prompts,
)
from paceline.report.trackers import Trackers, check_trackers
from paceline.rl import checkpoint, folder
from paceline.rl.batch import Batch
from paceline.rl.curriculum import Curriculum, Item, load_items
from paceline.rl.drafting import Cotraining
from paceline.rl.engine import drafts
from paceline.rl.fleet import Weights
from paceline.rl.fleets import make_fleet, make_learner
from paceline.rl.generation import Generation
from paceline.rl.grpo import overlong_penalty
from paceline.rl.layout import HISTORY, history_file
from paceline.rl.notices import (
    lossy_run,
    nothing_drafted,
    rewards_unsafe,
    sandbox_incomplete,
    shaped_law,
    warnings_told,
    weights_stale,
)
from paceline.rl.policy import Policy
from paceline.rl.prompts import checked_prompts, shared_prompts
from paceline.rl.records import step_record, trace_rows
from paceline.rl.rewards import Judge
from paceline.rl.sandbox import isolation
from paceline.rl.tasks.registry import make_task
from paceline.rl.timing import Clock
from paceline.schema import PacelineError, Rollout, StepRecord
from paceline.signals import StopRequest, stop_after_step, stop_at_once
from paceline.terminal import printable

OnEvent = Callable[[Event], None]


def train(
    config: Config, resume: bool = False, overwrite: bool = False, on_event: OnEvent | None = None
) -> list[StepRecord]:
    """Run the whole training and return one record a step, those made before a resume included.

    Everything is written into ``config.out``: the effective configuration, ``metrics.jsonl``, ``rollouts.jsonl``,
    ``prompts.jsonl``, ``checkpoints/``, the trained policy under ``policy/`` and ``report.html``. With ``resume`` the
    run goes on from the newest whole checkpoint with the tokens that the unbroken run would have produced; with
    ``overwrite`` a run in the folder is replaced. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 end the run after the step, with a
    checkpoint, by StoppedBySignalError, which is a KeyboardInterrupt; a second one ends it at once. Raises
    PacelineError, one line, for what cannot be honoured, FolderLockedError where another process has the folder.
    """
    tell = on_event or _nobody_listens
    out = Path(config.out).expanduser()
    check_trackers(config.track)
    with stop_at_once(), folder.claimed(out, config, resume, overwrite) as left_by:
        if config.threads:
            torch.set_num_threads(config.threads)
        with warnings_told(tell) if on_event is not None else nullcontext():
            run = Run(config, out, tell)
            try:
                if left_by is not None and left_by.host != gethostname():
                    tell(f"{left_by} had this run and did not release it; make sure that it has ended")
                if resume:
                    run.resume()
                else:
                    run.warm_start()
                with stop_after_step() as stopping:
                    run.steps(stopping)
            finally:
                run.close()
    return run.records


class RunNotWrittenError(PacelineError, OSError):
    """A file of the run cannot be written; the message is one line with its path."""


class Run:
    """A training run in a folder: its tasks, policy, engine, learner and files."""

    def __init__(self, config: Config, out: Path, tell: OnEvent) -> None:
        self.config = config
        self.out = out
        self.tell = tell
        self.records: list[StepRecord] = []
        self._events: Counter[str] = Counter()
        self._next_step = 0
        #: Steps that the newest checkpoint holds.
        self._saved = 0
        self._told_until = time.time()
        tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
        for name, task in tasks.items():  # before the policy is loaded, which takes longer
            shared = shared_prompts(name, checked_prompts(name, task, "train"), checked_prompts(name, task, "eval"))
            self._warn_if("prompts_shared", shared)
        # The judges fork their workers here, while this process is still small.
        self._judges = {
            name: Judge(task, name=name, seconds=config.rl.reward_seconds, unsafe=config.tasks[name].unsafe)
            for name, task in tasks.items()
        }
        self.policy = Policy.load(config.policy, config.seed)
        fit = self.policy.fit(config)
        self._eval_items = load_items(tasks, "eval", self.policy.encode_prompt, fit)
        self.curriculum = Curriculum(load_items(tasks, "train", self.policy.encode_prompt, fit), config.rl, config.seed)
        for event, line in fit.notices().items():
            self._warn(event, line)
        self.learner = make_learner(config, self.policy)
        own = (item.prompt.grammar for item in (*self.curriculum.items, *self._eval_items))
        grammars = [grammar for grammar in (config.sampling.grammar, *own) if grammar is not None]
        #: What shapes the rollouts: a grammar of the configuration, or that of a prompt.
        self._shaping = replace(config.sampling, grammar=grammars[0] if grammars else None)
        self._engine_events: dict[str, int] = {}
        self.trackers = Trackers(config, out, out / folder.TRACKERS, self._warn)
        self.fleet = make_fleet(config, self.policy, out, bool(grammars), self._warn)
        self.generation = Generation(config, self.curriculum, self.fleet, self._judges, self._count)
        self.cotraining = Cotraining(config, self.policy, self.learner, self._warn, tell)

    def close(self) -> None:
        """End the judges' workers and release the engine."""
        self.trackers.close()
        self.generation.close()
        for judge in self._judges.values():
            judge.close()
        self.fleet.close()
        self.learner.close()
        shutil.rmtree(self.out / folder.EXPORT, ignore_errors=True)

    # Steps

    def steps(self, stopping: StopRequest) -> None:
        """Run the steps that are left; after each, the files are complete up to it.

        RunNotWrittenError where the disk refuses a line of a file: each ends with a whole step then, and the report is
        written if it can be. StoppedBySignalError where ``stopping`` was set: the step is finished and saved, or where
        it failed then (a helper process may have been sent the signal too), the files end with the step before it.
        """
        try:
            self._steps(stopping)
        except (PacelineError, OSError, RuntimeError) as error:
            if isinstance(error, FileError):
                if self.records:
                    self._report()
                last = f"after step {self._next_step - 1}" if self._next_step else "before its first step is recorded"
                raise RunNotWrittenError(f"{error}; the run ends {last}: make room and --resume it") from None
            if not stopping.is_set():
                raise
            self._warn("step_not_finished", f"step {self._next_step} failed after the signal: {printable(error)}")
            raise stopping.error() from error

    def _steps(self, stopping: StopRequest) -> None:
        total = self.curriculum.steps
        self.tell(Plan(steps=total, done=self._next_step))
        self.trackers.open(self.records)
        self._warn_if("lossy", lossy_run(self.fleet.stats().lossy))
        self._warn_if("law_shaped", shaped_law(self._shaping))
        self._warn_if("rewards_unsafe", rewards_unsafe(self.config.tasks))
        self._warn_if("sandbox_incomplete", sandbox_incomplete(self.config.tasks, isolation()))
        speculative = getattr(getattr(self.fleet, "engine", None), "speculative", None)
        if speculative is not None:
            self.tell(f"vLLM speculates with {', '.join(f'{key}={value}' for key, value in speculative.items())}")
        if self.config.drafter.kind in HISTORIES and why_not():
            self._warn("history_in_python", f"{why_not()}; drafts are the same, and take longer")
        if self._next_step == 0:
            write_prompts(self.out / folder.PROMPTS, [self._prompt_row(item) for item in self.curriculum.items])
            if self._eval_items and self.config.rl.eval_every:
                reward, _ = self.evaluate("eval/start")
                self.tell(f"held-out reward before training: {reward:.3f} ({len(self._eval_items)} prompts, greedy)")
        if self._next_step < total:
            with MetricsWriter(self.out / folder.METRICS) as metrics, TraceWriter(self.out / folder.ROLLOUTS) as trace:
                for step in range(self._next_step, total):
                    if stopping.is_set():  # within the evaluation before the first step, or a save
                        self._stop(stopping)
                    record, rows = self._step(step)
                    trace.write(rows)
                    try:
                        metrics.write([record])
                    except FileError:
                        trace.undo()
                        raise
                    self.records.append(record)
                    self._next_step = step + 1
                    stop, every = stopping.is_set(), self.config.checkpoint.every
                    if step + 1 == total or stop or (every and (step + 1) % every == 0):
                        self.save()
                    self.tell(record)
                    self.trackers.record(record)
                    if stop and step + 1 < total:
                        self._stop(stopping)
        self._save_policy()
        self.cotraining.write(self.out)
        self._report()

    def _stop(self, stopping: StopRequest) -> NoReturn:
        """End the run between two steps: what is done is saved and reported."""
        if self.records:
            if self._saved != self._next_step:
                self.save()
            self._report()
        raise stopping.error()

    def _step(self, step: int) -> tuple[StepRecord, list[TraceRow]]:
        config, clock = self.config, Clock()
        self.generation.admit()
        before = self.fleet.stats()
        groups = self.generation.take(step)
        clock.lap("generation")
        after = self.fleet.stats()
        # Workers decode while the learner does other things: what they took for it is the time of their passes.
        decoding = after.pass_seconds - before.pass_seconds
        decisions = budget_metrics(before, after, decoding if self.fleet.is_remote else clock.seconds["generation"])
        if drafts(config) and after.forwards > before.forwards:
            self._warn_if("nothing_drafted", nothing_drafted(step, before, after))

        taken = self.generation.judged(groups)
        self._tell_errors(taken.errors, len(taken.rollouts))
        rollouts, of_rollout = taken.rollouts, taken.items
        lengths = [len(rollout.tokens) for rollout in rollouts]
        shaping = overlong_penalty(
            lengths, config.sampling.max_tokens, config.rl.overlong_buffer, config.rl.overlong_penalty
        )
        rewards = taken.rewards + shaping
        clock.lap("reward")

        identity = None
        if config.check.every and step % config.check.every == 0:
            identity = self.fleet.check(taken.requests, rollouts)
            self._tell_identity(step, identity)
        clock.lap("check")

        batch = Batch(
            prompts=[item.tokens for item in of_rollout],
            responses=[rollout.tokens for rollout in rollouts],
            rewards=rewards,
            group_ids=[request.group for request in taken.requests],
            engine_logprobs=[rollout.logprobs for rollout in rollouts],
            versions=[rollout.versions for rollout in rollouts],
            version=step,
        )
        self.cotraining.decide(step, rollouts, clock.seconds["generation"], self.curriculum.steps - step - 1)
        with self.fleet.resting():
            collected = self.cotraining.collecting(batch)
            clock.lap("drafter")
            learned = self.learner.update(batch, *collected)
            clock.lap("train")
            self.cotraining.train()
        clock.lap("drafter")
        for skipped in ("skipped_no_advantage", "skipped_not_finite"):
            self._events[f"update_{skipped}"] += int(learned[skipped])
        if not config.rl.max_age_steps:  # else the rollouts may be of older weights, and mismatch_kl is how far behind
            stale = weights_stale(step, learned["mismatch_kl"], self._shaping, config.policy.dtype)
            self._warn_if("weights_stale", stale)

        drafter, drafter_version = self.cotraining.moved(step + 1)
        weights = Weights(step + 1, self.policy.refit_tensors(), drafter, drafter_version)
        self.cotraining.published(self.generation.publish(weights))
        clock.lap("refit")

        eval_reward = math.nan
        every, last = config.rl.eval_every, step + 1 == self.curriculum.steps
        if every and self._eval_items and (last or (step + 1) % every == 0):
            eval_reward, _ = self.evaluate(f"eval/{step}")
        clock.lap("eval")

        clock.lap("other")
        record = step_record(
            config,
            step,
            self.curriculum.epoch(step),
            taken,
            rewards,
            learned=learned,
            seconds=clock.seconds,
            plain_seconds=self.fleet.projected_plain_seconds(lengths),
            identity=identity,
            lossy=after.lossy,
            eval_reward=eval_reward,
            events=self._take_events(),
            **decisions,
            **self.cotraining.metrics(),
            **self._overlap(step, clock),
        )
        return record, trace_rows(config, step, record.epoch, taken, rewards, after.lossy)

    def _overlap(self, step: int, clock: Clock) -> dict[str, Any]:
        """What learner and workers did since the last step, into the timeline; the metrics that follow."""
        if not self.fleet.is_remote:
            return {}
        spans = [*clock.spans("learner", step, since=self._told_until), *self.fleet.spans()]
        start, self._told_until = self._told_until, clock.now
        seconds = self._told_until - start
        with TimelineWriter(self.out / folder.TIMELINE) as timeline:
            timeline.write([StepSpans(step=step, start=start, seconds=seconds, spans=spans)])
        return {
            "groups_waiting": self.generation.ready,
            "workers_up": self.fleet.workers_up,
            **overlap_metrics(spans, start, seconds),
        }

    def evaluate(self, visit: str) -> tuple[float, list[Rollout]]:
        """Mean reward of the policy on the held-out prompts, greedy, and its answers."""
        params = replace(self.config.sampling, temperature=0.0)
        taken = self.generation.evaluate(self._eval_items, params, visit)
        self._tell_errors(taken.errors, len(taken.rollouts))
        return float(taken.rewards.mean()), taken.rollouts

    def _tell_errors(self, errors: Sequence[str], rollouts: int) -> None:
        """Say each kind of error of a reward once."""
        for error, count in Counter(errors).items():
            self._events["reward_error"] += count
            self.tell(f"reward_error: {error} ({count} of {rollouts} rollouts have reward 0)")

    def _tell_identity(self, step: int, identity: Identity) -> None:
        if identity.verdict == "violation":
            self._events["identity_violation"] += 1
        for difference in identity.differences:
            self.tell(f"identity check, step {step}: {difference}")

    def _take_events(self) -> dict[str, int]:
        """The named events since the last step: our own and the fleet's."""
        now = self.fleet.stats().events
        fresh = Counter(now)
        fresh.subtract(self._engine_events)
        self._engine_events = now
        events = {name: count for name, count in (fresh + self._events).items() if count}
        self._events.clear()
        return events

    # Files

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on, and drop the old ones."""
        history = self.fleet.history_snapshot()
        under_way, done, behind = self.generation.state()
        saved = checkpoint.save(
            self.out / folder.CHECKPOINTS,
            self._next_step,
            {"policy": self.policy.state(), "optimiser": self.learner.state(), **self.cotraining.tensors(), **behind},
            {
                "seed": self.config.seed,
                "weight_version": self._next_step,
                **under_way,
                **self.fleet.state(),
                **self.cotraining.meta(),
            },
            done | ({} if history is None else {HISTORY: history}),
            warn=self._warn,
        )
        if saved is not None:
            self._saved = self._next_step
            checkpoint.prune(self.out / folder.CHECKPOINTS, self.config.checkpoint.keep)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint; lines of steps after it are taken out of the files."""
        found = checkpoint.load_latest(self.out / folder.CHECKPOINTS, warn=self._warn)
        self._next_step = self._saved = 0 if found is None else found.step
        for name in (folder.METRICS, folder.ROLLOUTS, folder.TIMELINE):
            if (self.out / name).is_file():
                truncate_from(self.out / name, self._next_step)
        if found is None:
            self.tell("there is no checkpoint yet; the run starts from its beginning")
            self.warm_start()
            return
        if (self.out / folder.METRICS).is_file():
            self.records = read_metrics(self.out / folder.METRICS)
        self.policy.load_state(found.tensors["policy"])
        self.learner.load_state(found.tensors["optimiser"])
        newest = Weights(int(found.meta["weight_version"]), self.policy.refit_tensors(), *self.cotraining.load(found))
        self.generation.load_state(found, newest)
        try:
            self.fleet.load_state(found.meta)
        except (KeyError, TypeError, ValueError, PacelineError) as error:
            self._warn("budget_lost", f"the checkpoint's record of what drafting brought is of no use ({error!r})")
        if HISTORY in found.blobs:
            try:
                self.fleet.restore_history(found.blobs[HISTORY])
            except SnapshotError as error:
                self._warn("history_lost", f"{error}; history starts cold")
        self.tell(f"resumed after step {self._next_step - 1}")

    def warm_start(self) -> None:
        """Start from the history that ``drafter.history.warm`` names, where it names one that can be used."""
        self.generation.begin(Weights(0, self.policy.refit_tensors(), *self.cotraining.held()))
        warm = self.config.drafter.history.warm
        if warm is None or self.config.drafter.kind not in HISTORIES:
            return
        try:
            file = history_file(Path(warm).expanduser())
            held = read_snapshot(file)
            self.fleet.restore_history(file.read_bytes())
        except SnapshotError as error:
            self._warn("history_lost", f"drafter.history.warm: {error}; history starts cold")
        else:
            self.tell(f"history starts warm, from {file}: {held.prompts} prompts, {len(held.tokens)} tokens")

    def _warn_if(self, event: str, message: str | None) -> None:
        if message is not None:
            self._warn(event, message)

    def _warn(self, event: str, message: str) -> None:
        self._count(event)
        self.tell(f"{event}: {message}")

    def _count(self, event: str, times: int = 1) -> None:
        self._events[event] += times

    def _save_policy(self) -> None:
        target = self.out / folder.POLICY
        try:
            if self.policy.adapter is not None:
                self.policy.save_adapter(target)
            else:
                self.policy.save_pretrained(target)
        except OSError as error:
            self._warn("policy_not_saved", f"{target}: {error}; the last checkpoint holds the weights")

    def _report(self) -> None:
        try:
            write_report(self.out, lambda ids: [str(self.policy.tokenizer.decode([token])) for token in ids])
        except (PacelineError, OSError) as error:
            self._warn("report_not_written", str(error))

    def _prompt_row(self, item: Item) -> PromptRow:
        return PromptRow(
            prompt_id=item.prompt.prompt_id, task=item.task, tokens=item.tokens.tolist(), text=item.prompt.text
        )


def _nobody_listens(event: Event) -> None:
    """Takes the events of a run that nobody watches."""
