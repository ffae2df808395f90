"""What drafters have in common that draft with a head, from the hidden states that the policy had at a text."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Self, cast

import torch
from transformers import PreTrainedModel

from paceline.config import HeadConfig
from paceline.drafters.base import PolicyTraits, Seen
from paceline.drafters.growth import Live
from paceline.drafters.heads import Head, HeadKind, make_head
from paceline.drafters.slots import Slots
from paceline.drafters.soft import SoftDrafter
from paceline.forward.attention import NAME
from paceline.forward.kv import KVSlots
from paceline.forward.pretrained import ModelError
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.processors import Spec
from paceline.schema import PacelineError, RolloutRequest


class Observed(Live):
    """A request in flight and the policy's states of its positions from ``first`` on, as far as they are needed."""

    def __init__(self, request: RolloutRequest, spec: Spec) -> None:
        super().__init__(request, spec)
        self.first = 0
        self.states_NS: torch.Tensor | None = None
        self.carried_H: torch.Tensor | None = None

    @property
    def seen(self) -> int:
        """Positions of which the states were seen, whether they are still there or were used."""
        return self.first + (0 if self.states_NS is None else len(self.states_NS))

    @property
    def may_go(self) -> bool:
        """Whether all states are still there; those that were used are not given again."""
        return self.first == 0

    def see(self, start: int, states_NS: torch.Tensor) -> None:
        """States from position ``start`` on; those that were seen of these positions and behind them are void."""
        if start > self.seen:
            raise PacelineError(
                f"request {self.request.request_id}: states from position {start} on, where those of the first "
                f"{self.seen} were seen; give them without gaps"
            )
        self.held = min(self.held, start)
        if self.states_NS is None or start <= self.first:
            self.first, self.states_NS = start, states_NS
        else:
            self.states_NS = torch.cat([self.states_NS[: start - self.first], states_NS])

    def states(self, start: int, count: int) -> torch.Tensor:
        """The states of ``count`` positions, (count, S)."""
        assert self.states_NS is not None
        return self.states_NS[start - self.first : start - self.first + count]

    def let_go(self, before: int) -> None:
        """States of positions before ``before`` have been used."""
        self.states_NS = self.states(before, self.seen - before).clone()
        self.first = before

    def forget(self) -> None:
        """Nothing was seen."""
        self.first, self.states_NS, self.held = 0, None, 0


class ObservingDrafter(SoftDrafter[Observed]):
    """Implements ``drafters.base.Observer`` and ``Renewable`` over a head; a subclass says what its passes are.

    The head is given, or made when the drafter meets the engine's model: ``make`` takes that model. Where weights are
    loaded, what was computed with others is void, and nothing is drafted for requests in flight until their states are
    given from the first position on. Raises ModelError where the head does not fit the policy.
    """

    def __init__(
        self,
        head: Head | None,
        policy: PolicyTraits,
        *,
        name: str = "the head",
        width: int = 1,
        grammars: Vocabulary | None = None,
        clock: Callable[[], float] = perf_counter,
        make: Callable[[PreTrainedModel], Head] | None = None,
    ) -> None:
        super().__init__(policy, KVSlots(0), name=name, width=width, grammars=grammars, clock=clock)
        self._head = head
        self._make = make
        self._ids_D: torch.Tensor | None = None

    @classmethod
    def from_config(
        cls, kind: str, config: HeadConfig, policy: PolicyTraits, grammars: Vocabulary | None = None
    ) -> Self:
        """The drafter that a configuration asks for; its head is made for the engine's model, when they meet."""

        def make(model: PreTrainedModel) -> Head:
            return make_head(cast(HeadKind, kind), config, model, policy.run_seed)

        name = f"drafter.head.path={config.path}" if config.path else f"the {kind} head"
        return cls(None, policy, name=name, width=config.width, grammars=grammars, make=make)

    @property
    def head(self) -> Head:
        """The head that drafts. RuntimeError while it is yet to be made."""
        if self._head is None:
            raise RuntimeError("the head is made when the drafter meets the engine's model: call attach first")
        return self._head

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The head's weights by their names in a checkpoint; none while the head is yet to be made."""
        return {} if self._head is None else self._head.checkpoint()

    # The seam

    def attach(self, policy: PreTrainedModel) -> tuple[int, ...]:
        """Meet the engine's model; returns the layers that the head reads."""
        if self._head is None:
            assert self._make is not None
            self._head = self._make(policy)
        head = self._head
        head.bind(policy)
        head.eval().requires_grad_(False)
        head.config._attn_implementation = NAME
        if self._loaded is None:
            # What the head is made from may have moved by the time that it is wanted again.
            self._loaded = {name: tensor.detach().to("cpu", copy=True) for name, tensor in head.checkpoint().items()}
        self._slots = Slots(KVSlots(int(head.config.num_hidden_layers)))
        self._renew()
        self._warn_of_context(head.context)
        return head.taps

    def observe(self, seen: Sequence[Seen]) -> None:
        """States of committed tokens. PacelineError where some are left out."""
        for part in seen:
            self._live[part.request_id].see(part.start, part.states)

    def fresh(self) -> Self:
        """Another with the same head, at the weights that were loaded last, and with nothing in flight."""
        other = type(self)(
            self._head,
            self.policy,
            name=self.name,
            width=self.width,
            grammars=self._grammars,
            clock=self._clock,
            make=self._make,
        )
        other.weights_version, other._loaded = self.weights_version, self._loaded
        if self._head is not None:
            other.reload()
        return other

    # For subclasses

    @abstractmethod
    def _trunk(self, row: Observed) -> int:
        """How many positions of the committed text a draft for the row stands on."""

    def _row(self, request: RolloutRequest, spec: Spec) -> Observed:
        return Observed(request, spec)

    def _is_ready(self, row: Observed) -> bool:
        """Whether all states are there that a draft for the row needs."""
        needed = self._trunk(row)
        return self._head is not None and needed > 0 and row.seen >= needed and row.held >= row.first

    def _logits(self, read_NH: torch.Tensor) -> torch.Tensor:
        """The head's logits over the policy's vocabulary, (N, V); what it cannot draft has -inf."""
        weight_DH = self.head.output_weight()
        logits_ND = torch.nn.functional.linear(read_NH.to(weight_DH.dtype), weight_DH)
        if self._ids_D is None:
            return logits_ND
        whole_NV = logits_ND.new_full((len(logits_ND), self.policy.vocabulary_size), -torch.inf)
        return whole_NV.index_copy_(1, self._ids_D, logits_ND)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.head.load_checkpoint(tensors)
        self._renew()

    def _forget(self) -> None:
        super()._forget()
        for row in self._live.values():
            row.forget()

    def _renew(self) -> None:
        """Which of the policy's tokens the head drafts follows from its weights."""
        ids_D, size = self.head.policy_ids(), self.policy.vocabulary_size
        drafted = len(self.head.output_weight()) if ids_D is None else int(ids_D.max()) + 1
        if drafted != size if ids_D is None else drafted > size:
            raise ModelError(f"{self.name}: it drafts tokens up to {drafted - 1}, the policy's vocabulary is {size}")
        self._ids_D = ids_D
