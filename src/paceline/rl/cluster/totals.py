"""Counters of several engines as those of one."""

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from paceline.schema import EngineStats, added

#: Fields that are not sums.
_APART = (
    "weight_version",
    "drafter_version",
    "canary_acceptance",
    "depths_tested",
    "depths_accepted",
    "lossy",
    "events",
)


def total(parts: Iterable[EngineStats]) -> EngineStats:
    """Sums of counters and seconds, the newest versions, the mean acceptance of canaries, all that is lossy."""
    parts = list(parts)
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in EngineStats.__struct_fields__
        if name not in _APART
    }  # fmt: skip
    whole: EngineStats = msgspec.structs.replace(EngineStats(events={}), **sums)
    canaries = [part.canary_acceptance for part in parts if not math.isnan(part.canary_acceptance)]
    whole.canary_acceptance = sum(canaries) / len(canaries) if canaries else math.nan
    whole.drafter_version = max((p.drafter_version for p in parts if p.drafter_version is not None), default=None)
    whole.weight_version = max((part.weight_version for part in parts), default=0)
    whole.lossy = tuple(dict.fromkeys(setting for part in parts for setting in part.lossy))
    events: Counter[str] = Counter()
    for part in parts:
        whole.depths_tested = added(whole.depths_tested, part.depths_tested)
        whole.depths_accepted = added(whole.depths_accepted, part.depths_accepted)
        events.update(part.events)
    whole.events = dict(events)
    return whole
