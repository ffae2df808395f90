"""Watches over a drafter whose engine moves its weights: checksums, versions, and a few canary answers every time.

Whatever it finds, tokens stay what they are: a drafter that is lost, stale or overwritten costs time only, and nobody
would notice. So it is named, and drafting waits until canaries show that drafts are accepted again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.config import SentinelConfig
from paceline.engines.canaries import Canaries
from paceline.forward.checksum import checksums
from paceline.forward.runner import WeightsError
from paceline.schema import PacelineError, Rollout, RolloutRequest

if TYPE_CHECKING:
    import torch

Part = Literal["policy", "drafter"]

Tell = Callable[[str, str], None]
"""Counts a named event and takes one line that says what happened."""

_SHOWN = 3


class Watched(Protocol):
    """What the sentinel asks of an engine, all of it from the engine's thread."""

    def checksums(self, part: Part) -> Mapping[str, int]:
        """The checksum of each weight by name; empty where a drafter has no weights of its own."""

    def versions(self) -> tuple[int, int | None]:
        """Versions of the weights of policy and drafter; None where the drafter has none."""

    def answer(self, requests: Sequence[RolloutRequest]) -> list[Rollout] | None:
        """Decode canaries with drafts, even while drafting is off, and forget them; None where it cannot be done now.

        They count in no metric, and the drafter remembers nothing of them.
        """

    def set_drafting(self, on: bool) -> None:
        """Draft or decode plainly from now on; the drafter hears of every token all the same."""

    def reload_drafter(self) -> bool:
        """Get the drafter's weights, or the drafter itself, from where they came from; False where that is nowhere."""


class Sentinel:
    """Every update of the weights goes through ``refit``, every sleep through ``asleep`` and ``awake``.

    Named events, given to ``tell`` with one line each:

    - ``drafter_overwritten``: the drafter's own weights are not what they were before the update;
    - ``drafter_stale``: they are more than ``config.gap`` versions behind the policy;
    - ``drafter_lost``: canaries accept clearly less than ``config.hold`` times what they did before;
    - ``policy_stale``: new weights were loaded, and the policy's are still the old ones;
    - ``policy_overwritten``: weights of the policy moved that were not to move;
    - ``drafter_not_reloaded``: why its weights could not be had again;
    - ``drafter_reloaded`` and ``drafter_resumed``: it drafts again;
    - ``canary_skipped``, once: requests were in flight, so no canary could be answered.

    A fault of the drafter switches drafting off; it is reloaded once, and where canaries accept again drafting goes on.
    Else the next update tries it with canaries alone. A fault is told once, until it is gone. ``exact`` says that the
    engine keeps the tensors it is given by their names and in their layout, so that they are found again.
    """

    def __init__(self, config: SentinelConfig, watched: Watched, tell: Tell, *, exact: bool = True) -> None:
        self.config = config
        self.is_drafting = True
        self._watched = watched
        self._tell = tell
        self._exact = exact
        self._canaries = Canaries(config)
        self._policy: Mapping[str, int] | None = None
        self._drafter: Mapping[str, int] | None = None
        self._pushed: Mapping[str, int] = {}
        self._told: set[str] = set()
        self._was_skipped = False
        self._is_asleep = False

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """Responses are complete; the prompts of some become canaries."""
        self._canaries.remember(rollouts)

    def refit(self, tensors: "Mapping[str, torch.Tensor]", load: Callable[[], Collection[str]]) -> None:
        """Let ``load`` move the policy to ``tensors``; it returns the names of those that it loaded.

        Raises WeightsError that names the first tensor that it left out, and passes on what ``load`` raises.
        """
        if not self._is_asleep:
            self.asleep()
        loaded = load()
        self._is_asleep = False
        if missed := sorted(set(tensors) - set(loaded)):
            raise WeightsError(f"{_named(missed)} did not reach the policy, whose weights are mixed now; load them all")
        self._conclude(self._policy_faults(tensors) if self.config.checksums else {})

    def asleep(self) -> None:
        """The weights are about to be taken away, or to move: note what they are, and what drafts are worth."""
        self._is_asleep = True
        if self.config.checksums:
            if self._policy is None:
                self._policy = self._watched.checksums("policy")
            if self._drafter is None:
                self._drafter = self._watched.checksums("drafter")
        if not self.is_drafting:
            self._canaries.renew()
        elif new := self._canaries.new():
            self._answer(new, self._canaries.baseline)

    def awake(self) -> None:
        """The weights are back, and should be what they were."""
        self._is_asleep = False
        faults = {}
        if self._policy is not None:
            now = self._watched.checksums("policy")
            if moved := _moved(self._policy, now):
                faults["policy_overwritten"] = f"{_named(moved)} of the policy came back from sleep as something else"
            self._policy = now
        self._conclude(faults)

    def drafter_moved(self) -> None:
        """The drafter's weights were updated on purpose."""
        self._drafter = None

    def versions(self) -> tuple[int, int | None]:
        """Versions of the weights of policy and drafter, as the engine says."""
        return self._watched.versions()

    @property
    def acceptance(self) -> float:
        """Share of the tokens of the last canaries that had been drafted; NaN before the first."""
        return self._canaries.acceptance

    def state(self) -> dict[str, Any]:
        """What canaries are and were worth, for a checkpoint: plain values."""
        return {"drafting": self.is_drafting, "told": sorted(self._told), "canaries": self._canaries.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave; KeyError, TypeError or ValueError for anything else."""
        told = {str(event) for event in state["told"]}
        self._canaries.load_state(state["canaries"])
        self._told = told
        self._switch(bool(state["drafting"]))

    # What is found

    def _policy_faults(self, tensors: "Mapping[str, torch.Tensor]") -> dict[str, str]:
        """What is wrong with the policy's weights, now that ``tensors`` were loaded."""
        before, now = self._policy or {}, self._watched.checksums("policy")
        pushed = checksums(tensors)
        if self._exact:
            stale = [name for name, value in pushed.items() if now.get(name) != value]
            moved = [name for name in _moved(before, now) if name not in pushed]
        else:
            renewed = [name for name, value in pushed.items() if self._pushed.get(name, value) != value]
            stale = [name for name in renewed if name in before and now.get(name) == before[name]]
            stale = stale or (renewed if now == before else [])
            moved = []
        self._policy, self._pushed = now, pushed
        faults = {}
        if stale:
            faults["policy_stale"] = f"{_named(stale)} of the policy did not take the new values"
        if moved:
            faults["policy_overwritten"] = f"{_named(moved)} of the policy moved without new values for them"
        return faults

    def _drafter_faults(self) -> dict[str, str]:
        faults = {}
        if self._drafter is not None and (moved := _moved(self._drafter, self._watched.checksums("drafter"))):
            faults["drafter_overwritten"] = f"{_named(moved)} of the drafter changed; only the policy was to move"
        policy, drafter = self._watched.versions()
        if drafter is not None and policy - drafter > self.config.gap:
            faults["drafter_stale"] = (
                f"the drafter's weights are of version {drafter}, the policy's of {policy}; "
                f"engine.sentinel.gap allows {self.config.gap}"
            )
        return faults

    def _conclude(self, policy_faults: Mapping[str, str]) -> None:
        """Look at the drafter, tell what is new, and decide whether it drafts."""
        faults, holds = self._drafter_faults(), self._hold()
        if holds is False:
            faults["drafter_lost"] = f"{self._canaries.verdict}; decoding goes on without drafts"
        if self._tell_new({**policy_faults, **faults}) & faults.keys():
            self._mend(faults, holds)
        elif not self.is_drafting and self._is_fit(faults, holds):
            self._go_on("drafter_resumed")
        elif not self.is_drafting and holds is False:
            self._canaries.expect_less()

    def _mend(self, faults: Mapping[str, str], holds: bool | None) -> None:
        """No drafts until the drafter was reloaded and canaries have seen it."""
        self._switch(False)
        try:
            is_reloaded = self._watched.reload_drafter()
        except PacelineError as error:
            is_reloaded = False
            self._tell("drafter_not_reloaded", str(error))
        if is_reloaded:
            if "drafter_overwritten" not in faults:
                self._drafter = None  # whatever was loaded is what it shall be
            faults, holds = self._drafter_faults(), self._hold()
        if self._is_fit(faults, holds):
            self._go_on("drafter_reloaded" if is_reloaded else None)

    def _is_fit(self, faults: Mapping[str, str], holds: bool | None) -> bool:
        """Whether it may draft: canaries decide, and its weights where there are none."""
        if holds is not None:
            return holds
        return "drafter_lost" not in self._told and faults.keys() <= {"drafter_stale"}

    def _go_on(self, event: str | None) -> None:
        self._switch(True)
        self._told -= {"drafter_lost", "drafter_overwritten"}
        if self.config.checksums:
            self._drafter = self._watched.checksums("drafter")
        if event is not None:
            self._tell(event, self._canaries.verdict or "the drafter's weights are what they were")

    def _hold(self) -> bool | None:
        """Whether canaries accept enough; None where nobody knows."""
        if not self._canaries or not self._answer(self._canaries.requests(), self._canaries.compare):
            return None
        return self._canaries.holds(lenient=self.is_drafting)

    def _answer(self, requests: Sequence[RolloutRequest], book: Callable[[Sequence[Rollout]], None]) -> bool:
        rollouts = self._watched.answer(requests)
        if rollouts is None:
            if not self._was_skipped:
                self._was_skipped = True
                self._tell("canary_skipped", "requests are in flight while the weights move; no canary was answered")
            return False
        book(rollouts)
        return True

    def _tell_new(self, faults: Mapping[str, str]) -> set[str]:
        """Tell the faults that were not there the last time; returns their names."""
        fresh = faults.keys() - self._told
        for event, message in faults.items():
            if event in fresh:
                self._tell(event, message)
        # Without an answer nobody knows whether a drafter that was lost is back.
        self._told = {*faults, *(self._told & {"drafter_lost"})}
        return fresh

    def _switch(self, on: bool) -> None:
        self.is_drafting = on
        self._watched.set_drafting(on)


def _moved(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Names whose checksums are not what they were, or that are gone or new."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _named(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
