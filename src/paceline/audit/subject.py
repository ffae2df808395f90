"""What is audited: something that builds engines with speculation on and off, and a witness that knows the laws."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from paceline.audit.cases import Case, toy_cases
from paceline.audit.certificate import Check
from paceline.audit.conduct import Terms
from paceline.audit.drafting import ToyDrafter
from paceline.audit.engine import ToyEngine
from paceline.audit.reference import reference_law
from paceline.audit.tails import Floats
from paceline.audit.toys import ToyPolicy, last_two
from paceline.engines.base import Engine
from paceline.sampling.accept import Acceptance, accept
from paceline.schema import Rollout, RolloutRequest, SamplingParams

#: (raw logits, probabilities of the processed law) of a response's T positions, (T, V) each.
Laws = tuple[Floats, Floats]


class AnyCase(Protocol):
    """One batch of requests. ``cells`` and ``drafted`` are those of ``cases.Case``."""

    name: str
    params: dict[str, Any]
    cells: tuple[int, ...]
    drafted: bool

    def make_requests(self, params: SamplingParams, seed: int) -> list[RolloutRequest]:
        """The requests, a function of the audit's seed."""


class Subject(Protocol):
    """An engine under audit. ``keyed`` claims that tokens are a function of the seeds, whoever drafts.

    ``tolerance`` is how far, in nats, a log-probability may be from the witness's. ``bitwise`` claims that runs which
    promise equal tokens agree in every bit of log-probabilities and margins too. Without a witness ``laws`` is not
    called. ``compared`` is how many responses of a case are decoded again, in a second engine and in other company.
    ``knows_both_modes`` says that it reports raw log-probabilities also where processed ones were asked for.
    """

    name: str
    engine_name: str
    settings: dict[str, str]
    keyed: bool
    bitwise: bool
    has_witness: bool
    compared: int
    tolerance: float
    knows_both_modes: bool

    def cases(self, scale: float) -> Sequence[Any]:
        """What is asked; ``scale`` multiplies the number of requests."""

    def engine(self, case: Any, speculate: bool, *, slots: int | None = None) -> Engine:
        """A fresh engine; ``slots`` asks for another number of rows in a pass."""

    def terms(self, case: Any, params: SamplingParams) -> Terms:
        """What the case's responses are held to."""

    def laws(self, case: Any, rollout: Rollout, params: SamplingParams) -> Laws:
        """The witness's account of a response, by teacher forcing."""

    def make_params(self, **fields: Any) -> SamplingParams:
        """How sampling parameters are made for the engine."""

    def close(self) -> None:
        """Let go of what was kept between cases."""

    def known_fault(self, check: Check) -> str | None:
        """The known fault of the engine that explains a check which failed or was refused."""

    def at_edge(self, case: Any, rollout: Rollout, position: int, params: SamplingParams) -> bool:
        """Whether rounding of the logits decides if the token at a position is allowed at all."""


class Joined:
    """Implements ``Subject``: several that make the same promises, each with its own cases, audited as one.

    Name and settings are those of the first; cases need names of their own.
    """

    def __init__(self, *subjects: Subject) -> None:
        first = self._first = subjects[0]
        self._subjects = subjects
        self._owners: dict[str, Subject] = {}
        self.name = first.name
        self.engine_name = ", ".join(subject.engine_name for subject in subjects)
        self.settings = first.settings
        self.keyed = all(subject.keyed for subject in subjects)
        self.bitwise = all(subject.bitwise for subject in subjects)
        self.has_witness = all(subject.has_witness for subject in subjects)
        self.compared = min(subject.compared for subject in subjects)
        self.tolerance = max(subject.tolerance for subject in subjects)
        self.knows_both_modes = all(subject.knows_both_modes for subject in subjects)

    def cases(self, scale: float) -> list[Any]:
        """The cases of all, one subject after the other."""
        cases = [(case, subject) for subject in self._subjects for case in subject.cases(scale)]
        self._owners = {case.name: subject for case, subject in cases}
        return [case for case, _ in cases]

    def engine(self, case: Any, speculate: bool, *, slots: int | None = None) -> Engine:
        """An engine of the subject whose case it is."""
        return self._owners[case.name].engine(case, speculate, slots=slots)

    def terms(self, case: Any, params: SamplingParams) -> Terms:
        """What that subject holds its responses to."""
        return self._owners[case.name].terms(case, params)

    def laws(self, case: Any, rollout: Rollout, params: SamplingParams) -> Laws:
        """The account of that subject's witness."""
        return self._owners[case.name].laws(case, rollout, params)

    def make_params(self, **fields: Any) -> SamplingParams:
        """As the first makes them."""
        return self._first.make_params(**fields)

    def close(self) -> None:
        """Close all."""
        for subject in self._subjects:
            subject.close()

    def known_fault(self, check: Check) -> str | None:
        """What any of them knows about it."""
        return next((fault for subject in self._subjects if (fault := subject.known_fault(check))), None)

    def at_edge(self, case: Any, rollout: Rollout, position: int, params: SamplingParams) -> bool:
        """Whether rounding decides, by that subject's witness."""
        return self._owners[case.name].at_edge(case, rollout, position, params)


Build = Callable[..., ToyEngine]
"""(policy, drafter's law or None, **options) -> engine."""


class ToySubject:
    """A verifier on toy policies with analytic laws. ``build`` makes its engines; paceline's own by default."""

    keyed: bool

    def __init__(
        self,
        build: Build | None = None,
        *,
        name: str = "toy",
        acceptance: Acceptance = "coupled",
        keyed: bool | None = None,
        make_params: Callable[..., SamplingParams] = SamplingParams,
    ) -> None:
        self.name = name
        self.engine_name = "toy engine"
        self.settings: dict[str, str] = {"acceptance": acceptance} if build is None else {}
        self.keyed = acceptance == "coupled" if keyed is None else keyed
        self.bitwise = False
        self.has_witness = True
        self.compared = 64
        self.tolerance = 1e-6
        self.knows_both_modes = True
        self.make_params = make_params
        self._build = build or builder(acceptance)
        self._known: dict[tuple[str, int, int, bool], Floats] = {}

    def cases(self, scale: float) -> list[Case]:
        """The toy cases."""
        return toy_cases(scale)

    def engine(self, case: Case, speculate: bool, *, slots: int | None = None) -> ToyEngine:
        """A toy engine on the case's policy."""
        options = dict(case.options)
        if slots is not None:
            options["slots"] = slots
        return self._build(case.policy, case.drafter if speculate else None, seed=17, **options)

    def terms(self, case: Case, params: SamplingParams) -> Terms:
        """The policy's stops; nothing is decoded."""
        return Terms(case.policy.ends(params), case.options.get("context", 1 << 20), case.policy.vocabulary)

    def laws(self, case: Case, rollout: Rollout, params: SamplingParams) -> Laws:
        """Looked up in the policy's table and processed by the reference, which shares no code with the engine."""
        policy, response = case.policy, rollout.tokens
        raw_TV = policy.logits_along(rollout.prompt, response).double().numpy()
        stops, looks_far = policy.ends(params), _looks_far(params)
        law_TV = np.empty_like(raw_TV)
        for t in range(len(response)):
            if looks_far:
                law_TV[t] = reference_law(raw_TV[t], params, rollout.prompt, response[:t], stops)
                continue
            a, b = last_two(rollout.prompt, response[:t])
            key = (case.name, a, b, t < params.min_tokens)
            if key not in self._known:
                self._known[key] = reference_law(raw_TV[t], params, rollout.prompt, response[:t], stops)
            law_TV[t] = self._known[key]
        return raw_TV, law_TV

    def at_edge(self, case: Case, rollout: Rollout, position: int, params: SamplingParams) -> bool:  # noqa: ARG002
        """Never: witness and engine have the same logits."""
        return False

    def close(self) -> None:
        """Nothing is kept."""

    def known_fault(self, check: Check) -> str | None:  # noqa: ARG002
        """None is known."""
        return None


def builder(acceptance: Acceptance) -> Build:
    """Toy engines with paceline's own acceptance and a drafter that draws from a law of its own."""

    def verify(logits_NV: Any, rows: Any, run_seed: int) -> Any:
        return accept(logits_NV, rows, run_seed, acceptance)

    def build(
        policy: ToyPolicy,
        drafter: ToyPolicy | None = None,
        *,
        depth: int = 4,
        width: int = 1,
        ragged: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> ToyEngine:
        proposer = ToyDrafter(drafter, depth=depth, width=width, ragged=ragged, seed=seed) if drafter else None
        return ToyEngine(policy, drafter=proposer, verify=verify, seed=seed, **options)

    return build


def _looks_far(params: SamplingParams) -> bool:
    """Whether the law depends on more than the last two tokens and the length."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or any(len(word) > 2 for word in params.bad_words)
    )
