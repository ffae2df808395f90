"""Engines that emit the right tokens with the wrong log-probabilities (class B of the faults met in the field)."""

from dataclasses import replace

import msgspec

from paceline.audit.engine import ToyEngine
from paceline.sampling.accept import accept


def zero_for_accepted(logits_NV, rows, run_seed):
    """B1: 0.0 for accepted tokens."""
    verdicts = accept(logits_NV, rows, run_seed)
    for verdict in verdicts:
        verdict.processed_logprobs[: len(verdict.path)] = 0.0
        verdict.raw_logprobs[: len(verdict.path)] = 0.0
    return verdicts


class SilentlyPlain(ToyEngine):
    """B3: a request that asks for raw log-probabilities is decoded without drafts, and nothing says so."""

    def drafts(self):
        asking = {row.request_id for row in self.running if row.request.params.logprobs == "raw"}
        return {name: draft for name, draft in super().drafts().items() if name not in asking}


def processed_in_place(logits_NV, rows, run_seed):
    """B4: the processors changed the logits in place, so that "raw" is read from the processed ones."""
    return [replace(v, raw_logprobs=v.processed_logprobs) for v in accept(logits_NV, rows, run_seed)]


def first_of_run(logits_NV, rows, run_seed):
    """B7: only the first token of an accepted run has a log-probability."""
    return [
        replace(v, processed_logprobs=v.processed_logprobs[:1], raw_logprobs=v.raw_logprobs[:1])
        for v in accept(logits_NV, rows, run_seed)
    ]


class WrongMode(ToyEngine):
    """B8: raw values under the name of processed ones."""

    def rollout(self, row, reason):
        rollout = super().rollout(row, reason)
        return msgspec.structs.replace(rollout, logprobs=rollout.raw_logprobs)


def raw_where_accepted(logits_NV, rows, run_seed):
    """B9: the mode is forgotten in passes that accept a draft, so that it differs with speculation on and off."""
    verdicts = accept(logits_NV, rows, run_seed)
    return [replace(v, processed_logprobs=v.raw_logprobs) if len(v.path) else v for v in verdicts]
