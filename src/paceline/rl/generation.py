"""Where a training step's rollouts come from: groups admitted in time, decoded by a fleet, judged as they finish."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.config import Config
from paceline.rl.checkpoint import Checkpoint
from paceline.rl.cluster import codec
from paceline.rl.curriculum import Curriculum, Item, rollout_requests
from paceline.rl.fleet import Order, Weights
from paceline.rl.fleets import RunFleet
from paceline.rl.rewards import Judge
from paceline.rl.schedule import APART, Group, Schedule
from paceline.schema import PacelineError, Rollout, RolloutRequest, SamplingParams

#: Seconds for which the fleet is asked in one go, and the learner waits before it looks for failures.
_PATIENCE = 0.5

#: In a checkpoint: the key of what is under way, the blob of finished rollouts, and groups of older weights.
_STATE, _DONE, _BEHIND = "generation", "rollouts", "behind-"


@dataclass(frozen=True)
class Taken:
    """What a step learns from, siblings next to each other: entry i of all lists is of rollout i.

    ``errors`` are those of rewards, whose value is 0 then.
    """

    items: list[Item]
    requests: list[RolloutRequest]
    rollouts: list[Rollout]
    rewards: npt.NDArray[np.float64]
    errors: list[str]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "Taken":
        """The rollouts of judged groups."""
        return cls(
            items=[group.item for group in groups for _ in group.order.requests],
            requests=[request for group in groups for request in group.order.requests],
            rollouts=[rollout for group in groups for rollout in group.in_order],
            rewards=np.array([reward for group in groups for reward in group.rewards or ()], dtype=np.float64),
            errors=[error for group in groups for error in group.errors],
        )


class Generation:
    """Orders groups of a fleet as their time comes, books and judges what returns, and says what a step learns from.

    Of a remote fleet a thread takes the rollouts and judges them, so that this goes on while the policy is trained; an
    error of the fleet is raised where the next step asks. A rollout that comes twice, or that nobody ordered, is
    dropped and counted as ``rollouts_unknown``.
    """

    def __init__(
        self,
        config: Config,
        curriculum: Curriculum,
        fleet: RunFleet,
        judges: Mapping[str, Judge],
        count: Callable[[str], None],
    ) -> None:
        self.fleet = fleet
        self._config, self._judges, self._count = config, judges, count
        self.schedule = Schedule(
            curriculum.steps,
            config.rl.max_age_steps,
            exact=config.rl.in_flight == "wait",
            items_of=curriculum.step_items,
            requests_of=self._requests,
        )
        self._group_of: dict[str, Group] = {}
        self._version = 0
        self._pending: list[Group] = []
        #: Weights of versions that admitted groups may still need after a resume (``state``).
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._news, self._judging = threading.Condition(), threading.Lock()
        self._failure: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None
        if fleet.is_remote:
            self._thread = threading.Thread(target=self._serve, name="paceline-generation", daemon=True)
            self._thread.start()

    # A step, in this order

    def begin(self, weights: Weights) -> None:
        """The weights that a run starts from."""
        self._version = weights.version
        self.fleet.begin(weights)

    def admit(self) -> None:
        """Order what may be begun with the weights that were published last."""
        pending, self._pending = self._pending, []
        self._order(pending + self.schedule.admit(self._version))

    def take(self, step: int) -> list[Group]:
        """The groups that ``step`` learns from, complete; waits for them. A fleet's error, one line, is raised here."""
        return self._until(lambda: self.schedule.ripe(step))

    def judged(self, groups: Sequence[Group]) -> Taken:
        """The groups with their rewards; they are learned from now, and gone."""
        self._until_judged(groups)
        with self._news:
            self.schedule.learned(groups)
        return Taken.of(groups)

    def publish(self, weights: Weights) -> float:
        """The policy moved; see ``Fleet.publish``."""
        self._version = weights.version
        if self._config.rl.max_age_steps and self._config.rl.in_flight == "wait" and self._thread is not None:
            self._kept[weights.version] = {name: t.detach().cpu().clone() for name, t in weights.policy.items()}
            needed = min((g.order.version for g in self.schedule.waiting), default=weights.version)
            self._kept = {version: kept for version, kept in self._kept.items() if version >= needed}
        return self.fleet.publish(weights)

    def evaluate(self, items: Sequence[Item], params: SamplingParams, visit: str) -> Taken:
        """Answers of the newest weights to prompts that are not trained on, one each, and their rewards."""
        requests = rollout_requests(items, 1, params, self._config.seed, visit)
        groups = [
            Group(item, Order(step=APART, group=request.group, version=self._version, requests=[request]))
            for item, request in zip(items, requests, strict=True)
        ]
        self._order(groups)
        self._until(lambda: all(group.is_complete for group in groups))
        self._until_judged(groups)
        return Taken.of(groups)

    @property
    def ready(self) -> int:
        """Complete groups that no step has learned from."""
        return sum(group.is_complete for group in self.schedule.waiting)

    def close(self) -> None:
        """End the thread; the fleet stays."""
        self._ends = True
        if self._thread is not None:
            self._thread.join()

    # Checkpoints

    def state(self) -> tuple[dict[str, Any], dict[str, bytes], dict[str, dict[str, Tensor]]]:
        """For a checkpoint: what is under way as plain values, finished rollouts as a blob, and older weights by name.

        Those are the weights that must sample again, with ``wait``, what is not finished.
        """
        if self._thread is None:
            self._book(self.fleet.collect(0))
        with self._news:
            waiting = self.schedule.waiting
            done = [rollout for group in waiting for rollout in group.rollouts.values()]
            under_way = {
                "admitted": self.schedule.admitted,
                "waiting": [(group.order.step, group.item.name, group.order.version) for group in waiting],
            }
            needed = {group.order.version for group in waiting if not group.is_complete} - {self._version}
        behind = {f"{_BEHIND}{version:06d}": self._kept[version] for version in sorted(needed) if version in self._kept}
        return {_STATE: under_way}, {_DONE: codec.encode(done)} if done else {}, behind

    def load_state(self, found: Checkpoint, newest: Weights) -> None:
        """Go on from a checkpoint, whose own weights are ``newest``; they and older ones that are needed are published.

        What the newest weights may sample is ordered with the next step's groups. PacelineError, one line, for what
        ``state`` cannot have given.
        """
        try:
            under_way = found.meta.get(_STATE, {"admitted": found.step, "waiting": []})
            waiting = [(int(step), str(name), int(version)) for step, name, version in under_way["waiting"]]
            done = codec.decode(list[Rollout], found.blobs[_DONE]) if _DONE in found.blobs else []
            groups = self.schedule.restore(int(under_way["admitted"]), waiting, done)
        except (KeyError, TypeError, ValueError, PacelineError) as error:
            raise PacelineError(f"{found.path}: what was under way cannot be read ({error}); delete it") from None
        older = {
            int(name.removeprefix(_BEHIND)): tensors
            for name, tensors in found.tensors.items()
            if name.startswith(_BEHIND)
        }
        exact = self.schedule.exact
        for version in sorted(older):
            self.publish(Weights(version, older[version]))
            self._order([group for group in groups if exact and group.order.version == version])
        self.publish(newest)
        self._pending = [group for group in groups if not exact or group.order.version not in older]
        self._judge([group for group in groups if group.is_complete])

    # Inside

    def _requests(self, step: int, item: Item) -> list[RolloutRequest]:
        config = self._config
        return rollout_requests([item], config.rl.group_size, config.sampling, config.seed, str(step))

    def _order(self, groups: Sequence[Group]) -> None:
        """Hand on what is still to be done of groups."""
        orders = []
        for group in groups:
            lacking = [r for r in group.order.requests if r.request_id not in group.rollouts]
            if lacking:
                # The fleet marks the order that it is given.
                order = group.order if len(lacking) == len(group.order.requests) else _part(group.order, lacking)
                orders.append(order)
                with self._news:
                    self._group_of |= {request.request_id: group for request in lacking}
        self.fleet.submit(orders)

    def _until(self, said: Callable[[], Any]) -> Any:
        """What ``said`` gives once that is something, taking rollouts until then."""
        while True:
            with self._news:
                if self._failure is not None:
                    raise self._failure
                found = said()
                if found:
                    return found
                if self._thread is not None:
                    self._news.wait(_PATIENCE)
            if self._thread is None:
                finished = self.fleet.collect(_PATIENCE)
                if not finished and not said():
                    raise PacelineError("nothing is in flight and rollouts are missing; resume the run")
                self._book(finished)

    def _until_judged(self, groups: Sequence[Group]) -> None:
        if self._thread is None:
            self._judge(groups)
        self._until(lambda: all(group.rewards is not None for group in groups))

    def _serve(self) -> None:
        """The thread of a remote fleet."""
        try:
            while not self._ends:
                complete = self._book(self.fleet.collect(_PATIENCE))
                self._judge(complete)
                with self._news:
                    self._news.notify_all()
        except BaseException as error:  # noqa: BLE001  whatever it is, the run's own thread raises it
            with self._news:
                self._failure = error
                self._news.notify_all()

    def _book(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Put rollouts into their groups; returns the groups that became complete."""
        complete = []
        with self._news:
            for rollout in rollouts:
                group = self._group_of.pop(rollout.request_id, None)
                if group is None:
                    self._count("rollouts_unknown")
                    continue
                group.rollouts[rollout.request_id] = rollout
                if group.is_complete:
                    complete.append(group)
        return complete

    def _judge(self, groups: Sequence[Group]) -> None:
        """Judge complete groups that were not yet, those of a task in one go."""
        for name, judge in self._judges.items():
            with self._judging:
                own = [group for group in groups if group.item.task == name and group.rewards is None]
                pairs = [(group.item.prompt, rollout.text or "") for group in own for rollout in group.in_order]
                scored = iter(judge.score_all(pairs))
                for group in own:
                    mine = [next(scored) for _ in group.order.requests]
                    group.errors = [one.error for one in mine if one.error is not None]
                    group.rewards = [one.reward for one in mine]


def _part(order: Order, requests: list[RolloutRequest]) -> Order:
    return Order(step=order.step, group=order.group, version=order.version, requests=requests)
