"""Verifiers that bend the sampled distribution, each by one fault (class A of the faults met in the field)."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import torch

from broken.control import PlainRejection, keyed_uniform
from paceline.audit.drafting import ToyDrafter
from paceline.audit.engine import ToyEngine
from paceline.audit.reference import softmax
from paceline.sampling.accept import accept
from paceline.schema import derive_seed


class ArgmaxOfSoftLaw(ToyDrafter):
    """A1: drafts the argmax of its law, and reports the law as if it had been drawn from it."""

    def draw(self, request_ids, at, last_R2):
        laws_RV = self.law.logits(last_R2)
        return laws_RV, laws_RV.topk(self.width, dim=-1).indices.numpy()


class LawBeforeTopK(ToyDrafter):
    """A2: draws after the request's top-k, and reports its law from before."""

    def draw(self, request_ids, at, last_R2):
        laws_RV = self.law.logits(last_R2)
        scores_RV = laws_RV + self.noise(request_ids, at)
        for row, name in enumerate(request_ids):
            top_k = self._requests[name].params.top_k
            if top_k:
                scores_RV[row, laws_RV[row] < laws_RV[row].topk(min(top_k, laws_RV.shape[1])).values[-1]] = -torch.inf
        return laws_RV, scores_RV.topk(self.width, dim=-1).indices.numpy()


class FreshSample(PlainRejection):
    """A3: after a rejection the token is drawn from the policy's law instead of the residual."""

    def residual(self, p_V, q_V):
        return p_V


class OneStream(PlainRejection):
    """A4: one uniform a position, whatever it is for."""

    def uniform(self, run_seed, row, position, purpose, index):
        return keyed_uniform(run_seed, row.seed, position)


class OneStreamDrafter(ToyDrafter):
    """A4: draws with the uniform that the verifier will accept and recover with."""

    def draw(self, request_ids, at, last_R2):
        laws_RV = self.law.logits(last_R2)
        tokens_R1 = np.empty((len(request_ids), 1), dtype=np.int64)
        for row, (name, q_V) in enumerate(zip(request_ids, softmax(laws_RV.numpy()), strict=True)):
            request = self._requests[name]
            position = self._lengths[name] - len(request.prompt) + at
            tokens_R1[row] = PlainRejection().draw(q_V, keyed_uniform(self.seed, request.seed, position))
        return laws_RV, tokens_R1


class ZeroedInPlace(PlainRejection):
    """A6: the drafted token's probability is zeroed, in the caller's tensor, before it is read."""

    def laws(self, logits_NV, rows):
        start = 0
        for row in rows:
            logits_NV[start + 1 + row.parents.astype(np.int64), row.tokens.astype(np.int64)] = -torch.inf
            start += 1 + len(row.tokens)
        return super().laws(logits_NV, rows)


class TemperatureIgnored(PlainRejection):
    """A7: the temperature is not applied on the verify path."""

    def spec(self, row):
        return replace(row.spec, params=msgspec.structs.replace(row.spec.params, temperature=1.0))


class TemperatureTwice(PlainRejection):
    """A7: the temperature is applied by the caller and again by the verifier."""

    def spec(self, row):
        params = row.spec.params
        return replace(row.spec, params=msgspec.structs.replace(params, temperature=params.temperature**2))


class ProbabilitiesAsLogits(PlainRejection):
    """A7: probabilities are passed where logits are expected."""

    def laws(self, logits_NV, rows):
        return super().laws(logits_NV.softmax(-1), rows)


class ArgmaxOfResidual(PlainRejection):
    """A8: after a rejection the argmax of the residual instead of a draw."""

    def recover(self, p_V, uniform):
        return int(p_V.argmax())


class NoTruncation(PlainRejection):
    """A9: top-k, top-p and min-p are skipped where there is a draft to verify."""

    def spec(self, row):
        if not len(row.tokens):
            return row.spec
        return replace(row.spec, params=msgspec.structs.replace(row.spec.params, top_k=0, top_p=1.0, min_p=0.0))


class OwnNoise:
    """A10: each rank draws its own noise. Every engine that is built is the next rank."""

    ranks = itertools.count()

    def __init__(self):
        self.rank = next(self.ranks)

    def __call__(self, logits_NV, rows, run_seed):
        return accept(logits_NV, rows, derive_seed(run_seed, self.rank))


class SharedStream(ToyEngine):
    """A11: requests without a seed share one stream."""

    def samples(self, request):
        if request.params.seed is not None:
            return super().samples(request)
        return [
            (msgspec.structs.replace(sample, params=msgspec.structs.replace(sample.params, seed=0)), index)
            for sample, index in super().samples(request)
        ]


class BatchKeyedNoise(ToyEngine):
    """A12: a row's noise depends on where it stands in the batch and on how many share it."""

    def verify_rows(self, drafts):
        rows = super().verify_rows(drafts)
        return [replace(row, seed=derive_seed(row.seed, at, len(rows))) for at, row in enumerate(rows)]


class Uniforms24(PlainRejection):
    """A13: uniforms of 24 bits."""

    def uniform(self, run_seed, row, position, purpose, index):
        return int(super().uniform(run_seed, row, position, purpose, index) * 2**24) * 2.0**-24


class GreedyAcceptance(PlainRejection):
    """A15: where there is a draft, only the policy's argmax is accepted or emitted, at any temperature."""

    def laws(self, logits_NV, rows):
        is_drafted = [len(row.tokens) > 0 for row in rows]
        return self.greedy(super().laws(logits_NV, rows), np.repeat(is_drafted, [1 + len(row.tokens) for row in rows]))
