"""Drives a drafter through the seam by hand, for the tests of the baselines."""

import numpy as np

from paceline.schema import SOURCES, Outcome, Rollout, RolloutRequest, as_tokens

PROMPT = (90, 91, 92)


def begin(drafter, *names, prompt=PROMPT, group="g"):
    drafter.start([RolloutRequest(request_id=name, prompt=as_tokens(prompt), group=group) for name in names])


def say(drafter, name, tokens, accepted=0, drafted=0):
    drafter.commit([Outcome(request_id=name, tokens=as_tokens(tokens), accepted=accepted, drafted=drafted)])


def end(drafter, name, tokens, reason="stop"):
    empty = np.empty(0)
    drafter.finish(
        [
            Rollout(
                request_id=name, group="", prompt_key="", prompt=as_tokens(PROMPT), tokens=as_tokens(tokens),
                logprobs=empty, raw_logprobs=empty, logprob_mode="processed", margins=empty, versions=as_tokens([]),
                sources=np.empty(0, np.uint8), finish_reason=reason, forwards=1, drafted=0, accepted=0,
                accept_lengths=as_tokens([]),
            )
        ]
    )  # fmt: skip


def visit(drafter, *outputs, prompt=PROMPT, group="g", reason="stop"):
    """One epoch of a prompt: a group whose members say ``outputs``, and end."""
    names = [f"{group}/{number}" for number in range(len(outputs))]
    begin(drafter, *names, prompt=prompt, group=group)
    for name, tokens in zip(names, outputs, strict=True):
        say(drafter, name, tokens)
    for name, tokens in zip(names, outputs, strict=True):
        end(drafter, name, tokens, reason)


def drafted(drafter, name, budget=16):
    drafts = drafter.propose([name], budget)
    return drafts[0].tokens.tolist() if drafts else []


def sources(drafter, name):
    (draft,) = drafter.propose([name], 16)
    return [SOURCES[source] for source in draft.sources]
