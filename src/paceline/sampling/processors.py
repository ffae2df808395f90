"""Logit processors as pure functions of (parameters, prefix), evaluated at every drafted position.

A position's prefix is its request's prompt and response so far plus the drafted tokens on the way to it, so a verified
position sees exactly what plain decoding would have seen, and a rejection has no state to roll back. The order is that
of ``SamplingParams``. Masked entries become -inf. The caller's logits are never written to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.sampling.grammar import Matcher
from paceline.schema import SamplingParams, Tokens

Prefix = tuple[Tokens, Tokens]
"""A position's prefix: the prompt's tokens, the response's tokens."""


@dataclass(frozen=True)
class Spec:
    """What the processors need to know of one request; ``matcher`` follows the grammar of one that has a grammar."""

    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None

    def __post_init__(self) -> None:
        if self.params.grammar is not None and self.matcher is None:
            raise ValueError("the parameters have a grammar, and there is no matcher that follows it")

    @property
    def needs_prefix(self) -> bool:
        """Whether any processor of this request reads the prefix."""
        p = self.params
        return bool(
            p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty or p.bad_words
            or (p.min_tokens and self.stop_ids) or self.matcher is not None
        )  # fmt: skip

    @property
    def is_identity(self) -> bool:
        """Whether the processed logits are the raw ones."""
        p = self.params
        return p.temperature == 1 and not (self.needs_prefix or self.edits or self.truncates)

    @property
    def edits(self) -> bool:
        """Whether single entries are moved or masked regardless of the prefix."""
        return bool(self.params.logit_bias) or self.params.allowed_token_ids is not None

    @property
    def truncates(self) -> bool:
        """Whether the tail of the distribution is cut."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


def process(logits_NV: torch.Tensor, specs_N: Sequence[Spec], prefix: Callable[[int], Prefix]) -> torch.Tensor:
    """The logits of the law that is sampled, (N, V), at least float32; the input itself if nothing applies.

    ``prefix(n)`` gives the prefix of position n and is called only where a processor reads it. At temperature 0 the
    result is the penalised logits, whose argmax is the sample.
    """
    logits_NV = logits_NV if logits_NV.dtype in (torch.float32, torch.float64) else logits_NV.float()
    if all(spec.is_identity for spec in specs_N):
        return logits_NV
    edited = [n for n, spec in enumerate(specs_N) if spec.needs_prefix or spec.edits]
    if edited:
        logits_NV = logits_NV.clone()
        for n in edited:
            _edit(logits_NV[n], specs_N[n], prefix(n) if specs_N[n].needs_prefix else None)
    if any(spec.params.temperature not in (0, 1) for spec in specs_N):
        temperatures = [spec.params.temperature or 1.0 for spec in specs_N]
        logits_NV = logits_NV / torch.tensor(temperatures, dtype=logits_NV.dtype, device=logits_NV.device)[:, None]
    cut = [n for n, spec in enumerate(specs_N) if spec.truncates and spec.params.temperature > 0]
    if len(cut) == len(specs_N):
        return _truncate(logits_NV, specs_N)
    if cut:
        rows = torch.tensor(cut, device=logits_NV.device)
        logits_NV = logits_NV.index_copy(0, rows, _truncate(logits_NV[rows], [specs_N[n] for n in cut]))
    return logits_NV


def _edit(logits_V: torch.Tensor, spec: Spec, prefix: Prefix | None) -> None:
    """Masks, biases and penalties of one position, in place on our own copy."""
    params, device, vocabulary = spec.params, logits_V.device, logits_V.shape[0]
    if params.allowed_token_ids is not None:
        keep = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        keep[_ids(params.allowed_token_ids, vocabulary, "allowed_token_ids", device)] = True
        logits_V.masked_fill_(~keep, -torch.inf)
    if prefix is not None:
        if spec.matcher is not None:
            _keep_to_grammar(logits_V, spec.matcher, spec.stop_ids, prefix[1])
        for word in params.bad_words:
            *start, last = word
            if _ends_with(prefix, start):
                logits_V[_ids((last,), vocabulary, "bad_words", device)] = -torch.inf
        if len(prefix[1]) < params.min_tokens and spec.stop_ids:
            logits_V[_ids(spec.stop_ids, vocabulary, "stop_token_ids", device)] = -torch.inf
    if params.logit_bias:
        ids = _ids(tuple(params.logit_bias), vocabulary, "logit_bias", device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=device)
    if prefix is not None:
        _penalise(logits_V, params, prefix)


def _keep_to_grammar(logits_V: torch.Tensor, matcher: Matcher, stop_ids: tuple[int, ...], response: Tokens) -> None:
    """Mask what the grammar does not allow; every stop id is allowed exactly where the response may end."""
    allowed = matcher.allowed(response)
    if allowed is None:
        return
    vocabulary = logits_V.shape[0]
    is_kept_V = np.zeros(vocabulary, dtype=bool)
    known = allowed.is_allowed_V[:vocabulary]
    is_kept_V[: len(known)] = known
    is_kept_V[list(stop_ids)] = allowed.may_end
    # Moving the smaller side is far cheaper than a mask over the whole vocabulary.
    if 2 * np.count_nonzero(is_kept_V) < vocabulary:
        kept_K = torch.from_numpy(np.flatnonzero(is_kept_V)).to(logits_V.device)
        values_K = logits_V[kept_K]
        logits_V.fill_(-torch.inf)
        logits_V[kept_K] = values_K
    else:
        masked_K = torch.from_numpy(np.flatnonzero(~is_kept_V)).to(logits_V.device)
        logits_V[masked_K] = -torch.inf


def _penalise(logits_V: torch.Tensor, params: SamplingParams, prefix: Prefix) -> None:
    """Repetition (prompt and response: positive logits divided, negative multiplied), presence and frequency."""
    prompt, response = prefix
    device = logits_V.device
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, response]))).to(device).long()
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(response):
        unique, counts = np.unique(response, return_counts=True)
        loss = params.presence_penalty + params.frequency_penalty * counts
        logits_V[torch.from_numpy(unique).to(device).long()] -= torch.from_numpy(loss).to(device, logits_V.dtype)


def _truncate(logits_NV: torch.Tensor, specs_N: Sequence[Spec]) -> torch.Tensor:
    """min_p, then top_k, then top_p; entries equal to the last one kept by min_p or top_k are kept too."""
    out_NV = logits_NV
    dtype, device = logits_NV.dtype, logits_NV.device
    if any(spec.params.min_p > 0 for spec in specs_N):
        floor = [math.log(spec.params.min_p) if spec.params.min_p > 0 else -math.inf for spec in specs_N]
        least_N1 = out_NV.amax(-1, keepdim=True) + torch.tensor(floor, dtype=dtype, device=device)[:, None]
        out_NV = out_NV.masked_fill(out_NV < least_N1, -torch.inf)
    if any(spec.params.top_k > 0 for spec in specs_N):
        vocabulary = out_NV.shape[1]
        ks = [min(spec.params.top_k or vocabulary, vocabulary) for spec in specs_N]
        widest = max((k for k in ks if k < vocabulary), default=0)
        if widest:
            best_NK = out_NV.topk(widest, dim=-1).values
            index_N1 = torch.tensor([min(k, widest) - 1 for k in ks], device=device)[:, None]
            off_N1 = torch.tensor([k >= vocabulary for k in ks], device=device)[:, None]
            least_N1 = best_NK.gather(1, index_N1).masked_fill(off_N1, -torch.inf)
            out_NV = out_NV.masked_fill(out_NV < least_N1, -torch.inf)
    if any(spec.params.top_p < 1 for spec in specs_N):
        sorted_NV, order_NV = out_NV.sort(dim=-1, descending=True, stable=True)
        probability_NV = sorted_NV.softmax(-1)
        before_NV = probability_NV.cumsum(-1) - probability_NV
        tops = torch.tensor([spec.params.top_p if spec.params.top_p < 1 else 2.0 for spec in specs_N], device=device)
        drop_NV = before_NV >= tops.to(dtype)[:, None]
        drop_NV[:, 0] = False
        out_NV = out_NV.masked_fill(drop_NV.gather(1, order_NV.argsort(-1)), -torch.inf)
    return out_NV


def _ends_with(prefix: Prefix, start: Sequence[int]) -> bool:
    """Whether prompt and response together end with ``start``."""
    if not start:
        return True
    prompt, response = prefix
    tail = np.concatenate([prompt[-len(start) :], response])[-len(start) :]
    return len(tail) == len(start) and bool((tail == np.asarray(start)).all())


def _ids(ids: tuple[int, ...], vocabulary: int, name: str, device: torch.device) -> torch.Tensor:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} names token {token}, outside the policy's vocabulary of {vocabulary}")
    return torch.tensor(ids, dtype=torch.int64, device=device)
