"""A verifier that bends the law, for tests: whatever the temperature, it keeps what the policy finds likeliest."""

from dataclasses import replace

import msgspec

from paceline.sampling.accept import accept


def greedy(logits_NV, rows, run_seed):
    """``sampling.accept.accept`` at temperature 0."""
    cold = [
        replace(row, spec=replace(row.spec, params=msgspec.structs.replace(row.spec.params, temperature=0.0)))
        for row in rows
    ]
    return accept(logits_NV, cold, run_seed)
