"""How generation scales with engines: the requests of a recorded step dealt out to one, two, and more of them."""

import math

from paceline.simulate.batching import Limits
from paceline.simulate.drafting import Acceptance, Drafting, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.lengths import Requests
from paceline.simulate.metered import Account
from paceline.simulate.rollout import RolloutTimeline, rollout
from paceline.simulate.steptime import StepTime


def decoding_seconds(timeline: RolloutTimeline) -> float:
    """Seconds until the slowest engine is done, but for reading prompts."""
    return max(engine.seconds - engine.reading_seconds for engine in timeline.engines)


def scaling(
    requests: Requests, account: Account, step_time: StepTime, batch: int | None, engines: int
) -> tuple[float, ...]:
    """Seconds of generation on 1 to ``engines`` engines over those on one: simulated, with drafts like ``account``'s.

    Drafts are taken as equally long, with the constant acceptance that gives as many tokens a forward; proposing them
    scales as the passes do. ``batch`` is the slots of an engine (None: as many as there are requests).
    """
    drafted = max(round(account.drafted / account.row_forwards), math.ceil(account.tokens_per_forward - 1))
    draft = None
    if drafted:
        rate = Acceptance.tokens_per_forward(account.tokens_per_forward, drafted)
        draft = Drafting(rate, LinearDraftCost(step_time.mode, "in the seconds of one engine"))
    limits = Limits(slots=batch or len(requests))
    seconds = [
        decoding_seconds(rollout(requests, step_time, draft, Fixed(drafted), limits=limits, engines=count))
        for count in range(1, engines + 1)
    ]
    return tuple(each / seconds[0] for each in seconds)
