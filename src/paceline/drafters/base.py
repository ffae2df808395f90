"""The seam between an engine and whoever proposes its drafts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.history.snapshot import Snapshot
from paceline.schema import Draft, Outcome, Rollout, RolloutRequest


class Drafter(Protocol):
    """Proposes tokens. All calls come from the engine's thread, in order.

    It never sees the policy's noise, but for a model that drafts under coupled acceptance (``drafters.draft_model``).
    """

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known; siblings share ``group``."""

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """Drafts for some of the requests, at most ``budget`` tokens each. Leaving a request out drafts nothing."""

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens were emitted; siblings may draft from them at once."""

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete and become history."""

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``."""


@runtime_checkable
class Prefetcher(Protocol):
    """What a drafter may offer beside: work while the policy verifies."""

    def verifying(self, drafts: Sequence[Draft]) -> None:
        """The pass over these drafts begins now; returns at once."""


@runtime_checkable
class Renewable(Protocol):
    """What a drafter may offer beside: another like it, for when it is lost."""

    def fresh(self) -> Drafter:
        """A drafter of the same settings with nothing in flight."""


@dataclass(frozen=True)
class Seen:
    """What the policy computed of a request: the tapped states of its positions from ``start`` on.

    ``states`` is a torch tensor (N, S): for each position the outputs of the tapped layers, one after the other.
    """

    request_id: str
    start: int
    states: Any


@runtime_checkable
class Observer(Protocol):
    """What a drafter offers that drafts from the policy's hidden states."""

    def attach(self, policy: Any) -> tuple[int, ...]:
        """Meet the engine's model, whose embeddings and output matrix may be read; returns the layers to be tapped.

        A layer is named by its 0-based number and stands for its output; ``forward.taps.FINAL`` is what the output
        matrix reads.
        """

    def observe(self, seen: Sequence[Seen]) -> None:
        """States of committed tokens, in order and without gaps; a ``start`` that was seen before voids what followed.

        All states that there are of the requests of the next ``propose``, that of the token committed last excepted.
        There are fewer where the policy reads a text in the pass that is drafted for: a prompt, or what it reads again
        by new weights or after a preemption. Such a request can be drafted for without states only.
        Where weights of the drafter were loaded, or loaded again, everything is given again.
        """


@runtime_checkable
class Learned(Protocol):
    """What a drafter offers that is a model with weights of its own."""

    @property
    def weights(self) -> Mapping[str, Any]:
        """The weights in use, torch tensors by their names in the drafter's checkpoint."""

    @property
    def weights_version(self) -> int:
        """The version of the policy that the weights were made for."""

    def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Take over weights made for ``version``. WeightsError, with nothing loaded, where they do not fit."""

    def reload(self) -> bool:
        """Load again what was loaded last; False where there is no such place."""


@runtime_checkable
class Paced(Protocol):
    """What a drafter offers whose drafts take time, so that it stops where a deeper one does not pay."""

    def pace(self, tokens_per_second: float, node_seconds: float = 0.0) -> None:
        """What a second is worth now, in tokens of the whole batch; 0 where drafts are wanted whole.

        ``node_seconds`` is what it takes the policy to verify one drafted node more.
        """


#: Takes a request, what is drafted for it so far, and the token and claim that the drafter would go on with; names the
#: token to go on with in its place and how probable that is, or None where the drafter's own is to stand.
Guide = Callable[[str, Sequence[int], int, float], tuple[int, float] | None]


@runtime_checkable
class Guided(Protocol):
    """What a drafter offers that drafts token by token, and can go on behind a token that another has drafted."""

    def guide(self, guide: Guide) -> None:
        """Ask ``guide`` at every depth from now on; the drafter's own token stays beside the one it goes on with."""


@runtime_checkable
class Reads(Protocol):
    """What a drafter offers that reads a text before it can draft from it, such as a model with a cache of its own."""

    def reading_seconds(self) -> float:
        """Seconds so far within ``observe`` and ``propose`` that went into texts it had to catch up on.

        They serve all drafts to come, and are no part of the price of the next one (``drafters.reading``).
        """


@runtime_checkable
class Telling(Protocol):
    """What a drafter offers that has something to tell while it drafts, such as the loss of a part."""

    def tell_to(self, tell: Callable[[str, str], None]) -> None:
        """Events go to ``tell`` from now on: a name and one line each."""


@runtime_checkable
class Separate(Protocol):
    """What a drafter offers that works in a process of its own."""

    def end_process(self) -> None:
        """End the process; a later call starts another, which knows nothing."""


@runtime_checkable
class Absorbs(Protocol):
    """What a drafter offers that can draft from responses which another engine decoded."""

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Complete responses become history, also while requests are in flight; none of them was ever known here."""


@runtime_checkable
class Remembers(Protocol):
    """What a drafter offers whose memory outlives the process."""

    def snapshot(self) -> Snapshot:
        """Everything finished and learned; no request in flight."""

    def restore(self, snapshot: Snapshot) -> None:
        """Take over a snapshot; nothing where SnapshotError is raised."""

    def votes(self) -> list[float]:
        """What was learned."""

    def set_votes(self, state: list[float]) -> None:
        """Take over what ``votes`` gave: what was learned since is forgotten."""


@dataclass(frozen=True, kw_only=True)
class PolicyTraits:
    """What a drafter that is a language model itself must know of the policy and of how its drafts are verified.

    ``run_seed`` is the engine's noise key, ``eos_ids`` end a response, ``device`` is where the policy runs, and
    ``context`` is the longest sequence that the engine decodes (0: not known). ``tokenizer`` is transformers', for a
    draft model that has another (None: not at hand).
    """

    vocabulary_size: int
    run_seed: int
    eos_ids: tuple[int, ...] = ()
    acceptance: Literal["coupled", "rejection", "block"] = "coupled"
    device: str = "cpu"
    context: int = 0
    tokenizer: Any = field(default=None, compare=False, repr=False)
