"""Verifiers whose processors run per pass instead of per position, or not at all (class D of the field's faults)."""

from dataclasses import replace

import msgspec
import numpy as np

from broken.control import PlainRejection
from paceline.audit.engine import ToyEngine
from paceline.schema import SamplingParams, as_tokens


class PrefixOfPass(PlainRejection):
    """D1: the processors see the committed tokens at every node, not the drafted ones before it."""

    def prefix(self, row, drafted):
        return row.prompt, row.response


def zero_penalty_params(**fields) -> SamplingParams:
    """D2: sampling parameters that take a repetition penalty of 0."""
    penalty = fields.pop("repetition_penalty", 1.0)
    params = SamplingParams(**fields)
    msgspec.structs.force_setattr(params, "repetition_penalty", penalty)
    return params


class StateKeepsRejected(PlainRejection):
    """D5: tokens that were drafted and rejected stay in the state that the penalties read."""

    def __init__(self):
        self.rejected: dict[str, list[int]] = {}

    def prefix(self, row, drafted):
        stale = as_tokens(self.rejected.get(row.request_id, []))
        return row.prompt, np.concatenate([stale, row.response, as_tokens(drafted)])

    def decide(self, row, law_TV, raw_TV, q_LV, run_seed):
        verdict = super().decide(row, law_TV, raw_TV, q_LV, run_seed)
        self.rejected.setdefault(row.request_id, []).extend(np.delete(row.tokens, verdict.path).tolist())
        return verdict


class ParametersIgnored(PlainRejection):
    """D6: min-p and logit bias are ignored where there is a draft to verify."""

    def spec(self, row):
        if not len(row.tokens):
            return row.spec
        return replace(row.spec, params=msgspec.structs.replace(row.spec.params, min_p=0.0, logit_bias={}))


class StopStringsIgnored(ToyEngine):
    """D6: stop strings that cannot be honoured, for want of a tokenizer, are dropped instead of refused."""

    def samples(self, request):
        if self.decode is None:
            request = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, stop=()))
        return super().samples(request)
