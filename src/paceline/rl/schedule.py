"""Which groups are asked for when, and which of them a training step learns from: bookkeeping without an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.rl.curriculum import Item
from paceline.rl.fleet import Order
from paceline.schema import Rollout, RolloutRequest

#: The step of a group that is not for training, such as an evaluation's.
APART = -1


@dataclass(eq=False)
class Group:
    """One prompt that was visited: what was ordered, what came back, how it was judged (None: not yet)."""

    item: Item
    order: Order
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    rewards: list[float] | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every request has its rollout."""
        return len(self.rollouts) == len(self.order.requests)

    @property
    def in_order(self) -> list[Rollout]:
        """The rollouts of a complete group in the order of its requests."""
        return [self.rollouts[request.request_id] for request in self.order.requests]

    @property
    def oldest(self) -> int | None:
        """The oldest version that may have sampled any of it; None where nothing was begun."""
        seen = [int(rollout.versions.min()) for rollout in self.rollouts.values() if len(rollout.versions)]
        begun = self.order.begun
        return min([*seen, *(() if begun is None or self.is_complete else (begun,))], default=None)


class Schedule:
    """Groups run ahead of training by at most ``max_age`` versions; version s is what step s begins with.

    The groups of curriculum step s are admitted once version s - ``max_age`` is there. With ``exact`` step t learns
    from its own groups. Else it learns from complete ones, those with the oldest tokens first. A group whose oldest
    token is of version v is due at step v + ``max_age``, and a step waits while what it would leave cannot be taken in
    time by the steps to come. It never waits in vain: as many groups are left after a step as the next ``max_age``
    steps take, what is begun later is due later, and the earliest deadline first meets all deadlines.

    ``items_of`` gives the prompts of a step, ``requests_of`` the requests of one of them.
    """

    def __init__(
        self,
        steps: int,
        max_age: int,
        *,
        exact: bool,
        items_of: Callable[[int], Sequence[Item]],
        requests_of: Callable[[int, Item], list[RolloutRequest]],
    ) -> None:
        self.steps, self.max_age, self.exact = steps, max_age, exact
        self._items_of, self._requests_of = items_of, requests_of
        self._next = 0
        self._open: list[Group] = []

    @property
    def admitted(self) -> int:
        """The first step whose groups were not admitted yet."""
        return self._next

    @property
    def waiting(self) -> list[Group]:
        """Admitted groups that no step has learned from, in the order of their admission."""
        return list(self._open)

    def admit(self, version: int) -> list[Group]:
        """The groups that may be begun now that ``version`` is there, and could not before."""
        new = [
            self._group(step, item, version)
            for step in range(self._next, min(version + self.max_age + 1, self.steps))
            for item in self._items_of(step)
        ]
        self._next = max(self._next, min(version + self.max_age + 1, self.steps))
        self._open += new
        return new

    def ripe(self, step: int) -> list[Group] | None:
        """What ``step`` learns from; None while it has to wait. Groups are in the order of their admission."""
        if self.exact:
            own = [group for group in self._open if group.order.step == step]
            return own if all(group.is_complete for group in own) else None
        complete = [group for group in self._open if group.is_complete]
        chosen = sorted(complete, key=lambda group: _oldest(group, step))[: len(self._items_of(step))]
        if len(chosen) < len(self._items_of(step)):
            return None
        left = sorted(_oldest(group, step) for group in self._open if group not in chosen)
        takers = (later for later in range(step + 1, self.steps) for _ in self._items_of(later))
        if any(later > oldest + self.max_age for later, oldest in zip(takers, left, strict=False)):
            return None
        return [group for group in self._open if group in chosen]

    def learned(self, groups: Sequence[Group]) -> None:
        """A step has learned from these: they are gone."""
        self._open = [group for group in self._open if group not in groups]

    def restore(self, admitted: int, waiting: Sequence[tuple[int, str, int]], done: Sequence[Rollout]) -> list[Group]:
        """Go on where a run was: of the steps below ``admitted`` only the groups (step, item's name, version) wait.

        Returns them; ``done`` are rollouts that belong to them. ValueError where there is no such group.
        """
        self._next, self._open = admitted, []
        finished = {rollout.request_id: rollout for rollout in done}
        for step, name, version in waiting:
            item = next((item for item in self._items_of(step) if item.name == name), None)
            if item is None:
                raise ValueError(f"step {step} has no prompt {name}")
            group = self._group(step, item, version)
            names = [request.request_id for request in group.order.requests]
            group.rollouts = {name: finished[name] for name in names if name in finished}
            self._open.append(group)
        return self.waiting

    def _group(self, step: int, item: Item, version: int) -> Group:
        requests = self._requests_of(step, item)
        order = Order(step=step, group=requests[0].group, version=version, requests=requests)
        return Group(item, order)


def _oldest(group: Group, newest: int) -> int:
    """The oldest version of the group; what was not begun will be by ``newest`` or later."""
    return newest if group.oldest is None else group.oldest
