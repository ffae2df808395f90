"""A verifier written in the plainest way, which is right, and whose parts the broken ones replace.

Rejection sampling token by token (Leviathan et al., 2023; Chen et al., 2023), with the children of a node tried one
after the other. No line is shared with `paceline.sampling.accept`; only the processors and the records are.
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.audit.drafting import ToyDrafter
from paceline.audit.engine import ToyEngine
from paceline.audit.reference import softmax
from paceline.sampling.accept import Verdict, accept
from paceline.sampling.processors import Spec, process
from paceline.sampling.rows import VerifyRow
from paceline.schema import as_tokens, derive_seed


def keyed_uniform(*key: object) -> float:
    """A uniform of 53 bits in [0, 1) that is a function of its key."""
    return (derive_seed(*key) >> 11) * 2.0**-53


def laws_of(logits_NV: torch.Tensor):
    """Probabilities (N, V); a law that is the same everywhere is computed once."""
    logits = logits_NV.numpy()
    if len(logits) > 1 and (logits == logits[0]).all():
        return np.broadcast_to(softmax(logits[0].astype(np.float64)), logits.shape)
    return softmax(logits.astype(np.float64))


class PlainRejection:
    """`sampling.accept.accept` over again: (raw logits (N, V), rows, run seed) -> a verdict for each row."""

    def __call__(self, logits_NV: torch.Tensor, rows: Sequence[VerifyRow], run_seed: int) -> list[Verdict]:
        law_NV = self.laws(logits_NV, rows)
        raw_NV = laws_of(logits_NV)
        held = [row.laws for row in rows if row.laws is not None]
        q_LV = laws_of(torch.cat(held)) if held else np.empty((0, logits_NV.shape[1]))
        verdicts, start, above = [], 0, 0
        for row in rows:
            stop = start + 1 + len(row.tokens)
            below = above + (0 if row.laws is None else len(row.laws))
            verdicts.append(self.decide(row, law_NV[start:stop], raw_NV[start:stop], q_LV[above:below], run_seed))
            start, above = stop, below
        return verdicts

    def decide(self, row: VerifyRow, law_TV, raw_TV, q_LV, run_seed: int) -> Verdict:
        """Walk down one row's draft; entry 0 of ``law_TV`` and ``raw_TV`` is the root, entry 1 + i is node i."""
        tokens, nodes, at = [], [0], -1
        while True:
            kept, token = self.next_token(row, at, law_TV[at + 1], q_LV, run_seed, len(row.response) + len(tokens))
            tokens.append(token)
            if kept is None:
                break
            at = kept
            nodes.append(at + 1)
        return Verdict(
            tokens=as_tokens(tokens),
            path=np.array(nodes[1:], dtype=np.int64) - 1,
            processed_logprobs=np.log(law_TV[nodes, tokens]),
            raw_logprobs=np.log(raw_TV[nodes, tokens]),
            margins=np.zeros(len(tokens)),
        )

    def next_token(self, row: VerifyRow, at: int, p_V, q_LV, run_seed: int, position: int) -> tuple[int | None, int]:
        """The child of node ``at`` that is kept (None: none is) and the token that is emitted."""
        tried: list[int] = []
        for child in np.flatnonzero(row.parents == at).tolist():
            token = int(row.tokens[child])
            q_V = self.proposal(row, child, q_LV, tried)
            if self.uniform(run_seed, row, position, "accept", len(tried)) * q_V[token] < p_V[token]:
                return child, token
            p_V = self.residual(p_V, q_V)
            tried.append(child)
        uniform = self.uniform(run_seed, row, position, "draw", 0)
        return None, self.recover(p_V, uniform) if tried else self.draw(p_V, uniform)

    # The parts

    def spec(self, row: VerifyRow) -> Spec:
        """Which processors apply to a row."""
        return row.spec

    def prefix(self, row: VerifyRow, drafted: Sequence[int]):
        """The prompt and response that the processors see at a node; ``drafted`` are the tokens down to it."""
        return row.prompt, np.concatenate([row.response, as_tokens(drafted)])

    def laws(self, logits_NV: torch.Tensor, rows: Sequence[VerifyRow]):
        """The processed law at every root and node, (N, V)."""
        of_N = [(row, node) for row in rows for node in range(-1, len(row.tokens))]
        spec_of = {id(row): self.spec(row) for row in rows}
        specs_N = [spec_of[id(row)] for row, _ in of_N]

        def prefix(n: int):
            row, node = of_N[n]
            drafted: list[int] = []
            while node >= 0:
                drafted.insert(0, int(row.tokens[node]))
                node = int(row.parents[node])
            return self.prefix(row, drafted)

        processed_NV = process(logits_NV, specs_N, prefix)
        return self.greedy(laws_of(processed_NV), [spec.params.temperature == 0 for spec in specs_N])

    def greedy(self, law_NV, is_greedy_N):
        """Point masses on the likeliest token, where they are asked for."""
        greedy = np.flatnonzero(is_greedy_N)
        if len(greedy):
            law_NV = law_NV.copy()
            law_NV[greedy] = np.eye(law_NV.shape[1])[law_NV[greedy].argmax(-1)]
        return law_NV

    def proposal(self, row: VerifyRow, child: int, q_LV, tried: Sequence[int]):
        """What a child was drawn from: its law less the siblings drawn before it, or a point mass."""
        if row.law_of is None or row.law_of[child] < 0:
            point_V = np.zeros(q_LV.shape[1])
            point_V[row.tokens[child]] = 1.0
            return point_V
        q_V = q_LV[row.law_of[child]]
        if tried:
            q_V = q_V.copy()
            q_V[[row.tokens[node] for node in tried if row.law_of[node] == row.law_of[child]]] = 0.0
            q_V /= q_V.sum()
        return q_V

    def residual(self, p_V, q_V):
        """The law after a rejection."""
        rest_V = np.maximum(p_V - q_V, 0.0)
        total = rest_V.sum()
        return rest_V / total if total > 0 else p_V

    def uniform(self, run_seed: int, row: VerifyRow, position: int, purpose: str, index: int) -> float:
        """The noise of one decision."""
        return keyed_uniform(run_seed, row.seed, position, purpose, index)

    def draw(self, p_V, uniform: float) -> int:
        """A token where nothing was drafted."""
        cumulative_V = p_V.cumsum()
        return min(int(cumulative_V.searchsorted(uniform * cumulative_V[-1], side="right")), len(p_V) - 1)

    def recover(self, p_V, uniform: float) -> int:
        """A token where all drafted ones were rejected; ``p_V`` is the residual."""
        return self.draw(p_V, uniform)


class TryInOrder(PlainRejection):
    """Each child is tried as a point mass: kept with its probability, else masked and the law renormalised."""

    def proposal(self, row, child, q_LV, tried):
        point_V = np.zeros(q_LV.shape[1])
        point_V[row.tokens[child]] = 1.0
        return point_V


def builder(verify=lambda: accept, engine=ToyEngine, drafting=ToyDrafter, **drafts):
    """A `build` of the registry: the engine class, a maker of its verifier, the drafter class and how it drafts."""

    def build(policy, drafter=None, *, depth=4, width=1, ragged=False, seed=0, **options):
        how = {"depth": depth, "width": width, "ragged": ragged, **drafts}
        proposer = None if drafter is None else drafting(drafter, seed=seed, **how)
        return engine(policy, drafter=proposer, verify=verify(), seed=seed, **options)

    return build
