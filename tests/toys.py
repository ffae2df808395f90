"""Toy policies with analytic laws, and a plain decoding loop over the lossless core, for all tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.sampling.accept import VerifyRow, accept, chain_parents, limit_depth
from paceline.sampling.grammar import Matcher
from paceline.sampling.processors import Spec
from paceline.sampling.stops import Decode, cut
from paceline.schema import SamplingParams, as_tokens

#: The fixture of the field's reported faults: a policy and a drafter over three tokens, whatever the context.
P = (0.5, 0.3, 0.2)
Q = (0.2, 0.2, 0.6)

Law = Callable[[np.ndarray, np.ndarray], torch.Tensor]
"""(prompt, response so far) -> logits of the next token, (V,)."""


def constant(probabilities: Sequence[float], dtype: torch.dtype = torch.float64) -> Law:
    """The same law after every prefix."""
    logits = torch.tensor(probabilities, dtype=dtype).log()
    return lambda prompt, response: logits


def markov(vocabulary: int, seed: int = 0, sharpness: float = 1.5) -> Law:
    """A random law of the last two tokens: different after every different context, so a wrong prefix shows."""
    generator = torch.Generator().manual_seed(seed)
    table = sharpness * torch.randn(vocabulary, vocabulary, vocabulary, generator=generator, dtype=torch.float64)

    def law(prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
        context = np.concatenate([np.zeros(2, np.int64), prompt, response])
        return table[int(context[-2]) % vocabulary, int(context[-1]) % vocabulary]

    return law


@dataclass
class Generated:
    """What the toy loop decoded."""

    tokens: list[int] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    reason: str | None = None
    text: str | None = None
    forwards: int = 0
    accepted: int = 0


Propose = Callable[[list[int]], "tuple[list[int], list[int]] | list[int]"]
"""response so far -> drafted tokens, or (tokens, parents)."""


def generate(
    law: Law,
    params: SamplingParams,
    *,
    seed: int = 0,
    run_seed: int = 0,
    prompt: Sequence[int] = (0,),
    propose: Propose | None = None,
    stop_ids: tuple[int, ...] = (),
    decode: Decode | None = None,
    matcher: Matcher | None = None,
    request_id: str = "toy",
) -> Generated:
    """Decode one request with the law as the policy; ``propose`` drafts, None is plain decoding."""
    out = Generated()
    prompt_ids = as_tokens(prompt)
    while out.reason is None:
        drafted = propose(out.tokens) if propose else []
        tokens, parents = drafted if isinstance(drafted, tuple) else (drafted, chain_parents(len(drafted)))
        room = params.max_tokens - len(out.tokens)
        tokens, parents = as_tokens(tokens), as_tokens(parents)
        kept, parents = limit_depth(parents, room - 1)
        row = VerifyRow(
            request_id, Spec(params, stop_ids, matcher), seed, prompt_ids, as_tokens(out.tokens), tokens[kept], parents
        )
        (verdict,) = accept(logits_of(law, row), [row], run_seed)
        end = cut(verdict.tokens, row.response, params, stop_ids, room, decode)
        out.tokens += [int(t) for t in verdict.tokens[: end.count]]
        out.processed += list(verdict.processed_logprobs[: end.count])
        out.raw += list(verdict.raw_logprobs[: end.count])
        out.margins += list(verdict.margins[: end.count])
        out.accepted += min(len(verdict.path), end.count)
        out.reason, out.text = end.reason, end.text
        out.forwards += 1
    return out


def logits_of(law: Law, row: VerifyRow) -> torch.Tensor:
    """Logits at the root and at every drafted node, (1 + T, V), each after its own path."""
    rows = [law(row.prompt, row.response)]
    for node in range(len(row.tokens)):
        path: list[int] = []
        at = node
        while at >= 0:
            path.append(int(row.tokens[at]))
            at = int(row.parents[at])
        rows.append(law(row.prompt, np.concatenate([row.response, as_tokens(path[::-1])])))
    return torch.stack(rows)


def verify_once(
    logits_TV: torch.Tensor,
    tokens: Sequence[int] = (),
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    parents: Sequence[int] | None = None,
    prompt: Sequence[int] = (0,),
    response: Sequence[int] = (),
    stop_ids: tuple[int, ...] = (),
    request_id: str = "toy",
    run_seed: int = 0,
):
    """One verifying pass over given logits; the verdict."""
    row = VerifyRow(
        request_id,
        Spec(params or SamplingParams(), stop_ids),
        seed,
        as_tokens(prompt),
        as_tokens(response),
        as_tokens(tokens),
        as_tokens(parents) if parents is not None else chain_parents(len(tokens)),
    )
    return accept(logits_TV, [row], run_seed)[0]


def draws(probabilities: Sequence[float], drafts: Sequence, params: SamplingParams | None = None):
    """Many independent requests of the constant law in one pass; request i drafts ``drafts[i]``.

    A draft is None, a token, a chain of tokens or (tokens, parents). Returns the first emitted tokens and the verdicts.
    """
    logits_V = torch.tensor(probabilities, dtype=torch.float64).log()
    spec, empty = Spec(params or SamplingParams()), as_tokens([])
    rows = []
    for seed, draft in enumerate(drafts):
        chain = [] if draft is None else [draft] if np.isscalar(draft) else draft
        tokens, parents = chain if isinstance(chain, tuple) else (chain, chain_parents(len(chain)))
        rows.append(VerifyRow(str(seed), spec, seed, as_tokens([0]), empty, as_tokens(tokens), as_tokens(parents)))
    positions = sum(1 + len(row.tokens) for row in rows)
    verdicts = accept(logits_V.expand(positions, -1), rows, run_seed=1)
    return np.array([v.tokens[0] for v in verdicts]), verdicts


def total_variation(tokens: np.ndarray, probabilities: Sequence[float]) -> float:
    """Total variation between the empirical law of ``tokens`` and ``probabilities``."""
    empirical = np.bincount(tokens, minlength=len(probabilities)) / len(tokens)
    return 0.5 * float(np.abs(empirical - np.asarray(probabilities)).sum())
