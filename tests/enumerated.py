"""The exact law of what a verifying pass emits: every draft and every decision enumerated, with their probabilities."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.sampling.choose import soft_nodes
from paceline.sampling.processors import Spec, process
from paceline.sampling.rows import Layout, VerifyRow
from paceline.sampling.soft import block_laws, rejection_laws
from paceline.schema import SamplingParams, as_tokens

Path = tuple[int, ...]
Law = Callable[[Path], torch.Tensor]
"""What was emitted or drafted so far -> processed logits of the next token, (V,) float64."""


def processed(law: Callable[[np.ndarray, np.ndarray], torch.Tensor], params: SamplingParams, prompt=(0,), response=()):
    """A toy law behind the processors of ``params``, as a function of what follows ``response``."""
    cache: dict[Path, torch.Tensor] = {}
    prompt_ids = as_tokens(prompt)

    def after(path: Path) -> torch.Tensor:
        if path not in cache:
            so_far = as_tokens([*response, *path])
            cache[path] = process(law(prompt_ids, so_far)[None], [Spec(params)], lambda n: (prompt_ids, so_far))[0]
        return cache[path]

    return after


def emitted_law(
    policy: Law, drafter: Law, parents: Sequence[int], points: dict[int, int], block: bool, last: Sequence[int] = ()
) -> dict[Path, float]:
    """Probability of every sequence of (depth of the tree + 1) tokens: what the pass emits, continued by the policy.

    The draft is a tree with ``parents``; node n is the point mass ``points[n]``, or drawn from the drafter's law,
    without replacement among its siblings. Where the law has no token left, neither the node nor any below is drafted,
    and nothing is drafted after a token of ``last`` (a drafter that stops at the end of a response).
    """
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        depth[node] = 1 + (depth[parent] if parent >= 0 else 0)
    total: defaultdict[Path, float] = defaultdict(float)
    for tokens, weight in _drafts(drafter, parents, points, last):
        kept = [n for n, token in enumerate(tokens) if token >= 0]
        number = {-1: -1} | {n: index for index, n in enumerate(kept)}
        draft = [number[parents[n]] for n in kept], {number[n]: points[n] for n in kept if n in points}
        for path, share in _outcomes(policy, drafter, *draft, [tokens[n] for n in kept], block):
            for whole, rest in _continued(policy, path, max(depth, default=0) + 1):
                total[whole] += weight * share * rest
    return dict(total)


def policy_law(policy: Law, length: int) -> dict[Path, float]:
    """Probability of every sequence of ``length`` tokens under plain decoding."""
    return dict(_continued(policy, (), length))


def _probabilities(law: Law, path: Path) -> list[float]:
    return law(path).softmax(-1).tolist()


def _paths(parents, tokens) -> list[Path]:
    paths: list[Path] = []
    for node, token in enumerate(tokens):
        paths.append((*(paths[parents[node]] if parents[node] >= 0 else ()), token))
    return paths


def _drafts(drafter, parents, points, last):
    """Every assignment of tokens to the nodes, with its probability."""
    found = [((), 1.0)]
    for node, parent in enumerate(parents):
        grown = []
        for tokens, weight in found:
            if parent >= 0 and (tokens[parent] < 0 or tokens[parent] in last):
                grown.append(((*tokens, -1), weight))
                continue
            if node in points:
                grown.append(((*tokens, points[node]), weight))
                continue
            before = [tokens[n] for n in range(node) if parents[n] == parent and n not in points and tokens[n] >= 0]
            probabilities = np.array(_probabilities(drafter, _paths(parents, tokens)[parent] if parent >= 0 else ()))
            probabilities[before] = 0.0
            if probabilities.sum() == 0:
                grown.append(((*tokens, -1), weight))
                continue
            probabilities /= probabilities.sum()
            grown += [((*tokens, v), weight * q) for v, q in enumerate(probabilities) if q > 0]
        found = grown
    return found


def _outcomes(policy, drafter, parents, points, tokens, block):
    """What a pass over one draft emits: (tokens, probability)."""
    paths = _paths(parents, tokens)
    at = {-1: (), **dict(enumerate(paths))}
    drawn = [n for n in range(len(tokens)) if n not in points]
    rows_of = sorted({parents[n] for n in drawn})
    law_of = as_tokens([-1 if n in points else rows_of.index(parents[n]) for n in range(len(tokens))])
    logits = torch.stack([policy(at[n]) for n in range(-1, len(tokens))])
    residual = {n: _probabilities(policy, at[n]) for n in at}
    keep: dict[int, float] = {}
    if drawn:
        laws = torch.stack([drafter(at[n]) for n in rows_of])
        row = VerifyRow("r", Spec(SamplingParams()), 0, as_tokens([0]), as_tokens([]), as_tokens(tokens),
                        as_tokens(parents), laws, law_of)  # fmt: skip
        layout = Layout([row])
        soft = soft_nodes([row], layout, np.array([0]), logits.shape[1], points=block)
        if block:
            found = block_laws(logits, soft, layout.row_N[soft.node_M], layout.depth_N[soft.node_M])
        else:
            found = rejection_laws(logits, soft)
        assert not found.log_accept_M.isnan().any()
        keep = dict(zip((soft.node_M - 1).tolist(), found.log_accept_M.exp().tolist(), strict=True))
        residual |= {
            int(p) - 1: r.exp().tolist() for p, r in zip(found.parent_P, found.residual_PV, strict=True)
        }  # fmt: skip
    if block and drawn:
        outcomes = []
        for last in range(-1, len(tokens)):
            share = float(np.prod([1 - keep[n] for n in range(last + 1, len(tokens))])) * (
                keep[last] if last >= 0 else 1
            )
            outcomes += [((*at[last], v), share * r) for v, r in enumerate(residual[last])]
        return outcomes
    outcomes, reached = [], [(-1, 1.0)]
    while reached:
        node, share = reached.pop()
        children = [n for n in range(len(tokens)) if parents[n] == node]
        for child in children:
            if child not in points:
                reached.append((child, share * keep[child]))
                share *= 1 - keep[child]
        masses = {tokens[n]: n for n in reversed(children) if n in points}
        for v, r in enumerate(residual[node]):
            if v in masses:
                reached.append((masses[v], share * r))
            else:
                outcomes.append(((*at[node], v), share * r))
    return outcomes


def _continued(policy, path: Path, length: int):
    found = [(path, 1.0)]
    while any(len(sofar) < length for sofar, _ in found):
        grown = []
        for sofar, weight in found:
            if len(sofar) >= length:
                grown.append((sofar, weight))
            else:
                grown += [((*sofar, v), weight * p) for v, p in enumerate(_probabilities(policy, sofar)) if p > 0]
        found = grown
    return found
