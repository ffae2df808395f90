"""Toy policies whose laws are known exactly: what an audit compares an engine's tokens with.

A toy policy is a table of logits over the last two tokens. The laws of whole responses follow from it by dynamic
programming over those two tokens, with every sampling parameter that does not look further back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.audit.reference import Floats, reference_law
from paceline.schema import PacelineError, SamplingParams, Tokens

#: The fixture of the faults that users reported: a policy and a drafter over three tokens, whatever the context.
FIXTURE_POLICY = (0.5, 0.3, 0.2)
FIXTURE_DRAFTER = (0.2, 0.2, 0.6)

Pairs = npt.NDArray[np.int64]
"""The last two tokens of N texts, (N, 2), 0 before their beginning."""


@dataclass(frozen=True)
class ToyPolicy:
    """Logits of the next token by the last two: ``table`` is (C, C, V), looked up with both tokens modulo C.

    C is 1 where the law does not depend on the context. ``stop_ids`` end a response unless ``ignore_eos`` is set.
    """

    name: str
    table: torch.Tensor
    stop_ids: tuple[int, ...] = ()

    @property
    def vocabulary(self) -> int:
        """Tokens are 0 .. vocabulary - 1."""
        return self.table.shape[2]

    def logits(self, last_N2: Pairs) -> torch.Tensor:
        """Logits after N texts, (N, V), in memory of their own."""
        contexts = self.table.shape[0]
        index_N = (last_N2[:, 0] % contexts) * contexts + last_N2[:, 1] % contexts
        return self.table.flatten(0, 1)[torch.from_numpy(index_N)]

    def logits_along(self, prompt: Tokens, response: Tokens) -> torch.Tensor:
        """Logits of each of the response's T positions, (T, V), given the tokens before it (teacher forcing)."""
        text = np.concatenate([np.zeros(2, dtype=np.int64), prompt, response])[-len(response) - 2 :]
        return self.logits(np.stack([text[:-2], text[1:-1]], axis=1))

    def ends(self, params: SamplingParams) -> tuple[int, ...]:
        """The ids that end a response."""
        return params.stop_token_ids + (() if params.ignore_eos else self.stop_ids)


def last_two(prompt: Tokens, response: Tokens) -> tuple[int, int]:
    """The last two tokens of a prompt and its response, 0 before their beginning."""
    if len(response) >= 2:
        return int(response[-2]), int(response[-1])
    text = [0, 0, *prompt[-2:].tolist(), *response.tolist()]
    return text[-2], text[-1]


def constant(name: str, probabilities: npt.ArrayLike, dtype: torch.dtype = torch.float64) -> ToyPolicy:
    """The same law after every prefix."""
    return ToyPolicy(name, torch.tensor(np.asarray(probabilities), dtype=torch.float64).log().to(dtype)[None, None])


def markov(vocabulary: int = 8, seed: int = 0, sharpness: float = 1.0) -> ToyPolicy:
    """A random law after every two tokens, so that a wrong prefix shows; the last token stops, about once in ten."""
    generator = torch.Generator().manual_seed(seed)
    table = sharpness * torch.randn(vocabulary, vocabulary, vocabulary, generator=generator, dtype=torch.float64)
    others = torch.logsumexp(table[:, :, :-1], dim=-1)
    table[:, :, -1] = others - math.log(9) + 0.5 * table[:, :, -1]
    return ToyPolicy("markov", table, (vocabulary - 1,))


def fixture() -> ToyPolicy:
    """The fixture's policy P, (.5, .3, .2)."""
    return constant("fixture", FIXTURE_POLICY)


def wide() -> ToyPolicy:
    """A thousand equally probable tokens: two responses that share their noise are equal, others are not."""
    return constant("wide", np.full(1000, 1e-3))


def tail() -> ToyPolicy:
    """One heavy token, then 8192 of probability 2**-25 each, in float32.

    Uniforms of 24 bits that are looked up in the cumulative law hit every second tail token and never the others.
    """
    return constant("tail", [1 - 2.0**-12, *[2.0**-25] * 8192], torch.float32)


POLICIES: dict[str, Callable[[], ToyPolicy]] = {"fixture": fixture, "markov": markov, "wide": wide, "tail": tail}


def toy_policy(name: str) -> ToyPolicy:
    """The policy of that name; PacelineError for one that does not exist."""
    if name not in POLICIES:
        raise PacelineError(f"no toy policy is named {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()


def blurred(policy: ToyPolicy, amount: float = 0.7, seed: int = 1) -> ToyPolicy:
    """A drafter's law for a policy: its table with normal noise of standard deviation ``amount`` on each logit."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(policy.table.shape, generator=generator, dtype=torch.float64)
    return ToyPolicy(f"{policy.name}, blurred", (policy.table + amount * noise).to(policy.table.dtype), policy.stop_ids)


def toy_drafter(policy: ToyPolicy) -> ToyPolicy:
    """The law that drafts are drawn from for a policy: the fixture's Q, otherwise the policy's own table, blurred."""
    return constant("fixture, drafter", FIXTURE_DRAFTER) if policy.name == "fixture" else blurred(policy)


@dataclass(frozen=True)
class ResponseLaw:
    """The exact law of responses to one prompt, at most T tokens long.

    ``tokens_TV[t, v]`` is the probability that a response reaches position t and has token v there; a row sums to the
    probability of reaching t. ``lengths_T[n]`` is the probability of n tokens, stop token included, n = 0 .. T.
    ``pairs(t)`` is (V, V): of the tokens at positions t and t + 1, where the response reaches both.
    """

    tokens_TV: Floats
    lengths_T: Floats
    pairs: Callable[[int], Floats]


def response_law(policy: ToyPolicy, params: SamplingParams, prompt: Tokens) -> ResponseLaw:
    """The law of responses of up to ``max_tokens`` tokens; cost and memory grow with T C**2 V.

    Raises PacelineError for parameters that look further back than two tokens: penalties, words of several tokens
    in ``bad_words``, ``stop`` strings.
    """
    far = {
        "repetition_penalty": params.repetition_penalty != 1,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "bad_words": any(len(word) > 1 for word in params.bad_words),
        "stop": bool(params.stop),
    }
    if any(far.values()):
        name = next(name for name, looks in far.items() if looks)
        raise PacelineError(f"{name} looks at a whole response, whose law is not enumerated; leave it out")
    stops = list(policy.ends(params))
    early_CCV = _processed(policy, params, np.zeros(0, dtype=np.int32))
    late_CCV = (
        _processed(policy, params, np.zeros(params.min_tokens, dtype=np.int32)) if params.min_tokens else early_CCV
    )
    contexts, steps = policy.table.shape[0], params.max_tokens
    folded_V = np.arange(policy.vocabulary) % contexts
    states_TCC = np.zeros((steps, contexts, contexts))
    first, second = last_two(prompt, prompt[:0])
    states_TCC[0, first % contexts, second % contexts] = 1.0
    tokens_TV, lengths_T = np.zeros((steps, policy.vocabulary)), np.zeros(steps + 1)

    def law(t: int) -> Floats:
        return early_CCV if t < params.min_tokens else late_CCV

    def going_on(t: int) -> Floats:
        """P(last token before t, token at t) of responses that do not end there, (C, V)."""
        joint_CV = np.einsum("ab,abv->bv", states_TCC[t], law(t))
        if t >= params.min_tokens:
            joint_CV[:, stops] = 0.0
        return joint_CV

    for t in range(steps):
        tokens_TV[t] = np.einsum("ab,abv->v", states_TCC[t], law(t))
        joint_CV = going_on(t)
        lengths_T[t + 1] = tokens_TV[t].sum() - (joint_CV.sum() if t + 1 < steps else 0.0)
        if t + 1 < steps:
            for context in range(contexts):
                states_TCC[t + 1, :, context] = joint_CV[:, folded_V == context].sum(-1)

    def pairs(t: int) -> Floats:
        if not 0 <= t < steps - 1:
            raise PacelineError(f"no pair of tokens begins at position {t} of at most {steps}")
        return np.einsum("bv,bvw->vw", going_on(t), law(t + 1)[:, folded_V])

    return ResponseLaw(tokens_TV, lengths_T, pairs)


def _processed(policy: ToyPolicy, params: SamplingParams, response: Tokens) -> Floats:
    """The processed law of every context, (C, C, V), once a response is as long as ``response``."""
    contexts, vocabulary = policy.table.shape[0], policy.vocabulary
    prompt, stops = np.zeros(1, dtype=np.int32), policy.ends(params)
    rows = policy.table.flatten(0, 1).double().numpy()
    laws = [reference_law(logits_V, params, prompt, response, stops) for logits_V in rows]
    return np.stack(laws).reshape(contexts, contexts, vocabulary)
