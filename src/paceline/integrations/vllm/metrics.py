"""The plug-in's counters as Prometheus metrics, which vLLM shows under ``/metrics`` beside its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import msgspec
import prometheus_client

from paceline.schema import EngineStats

_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Counted:
    """A counter: ``name`` without its prefix and ``_total``, what it counts, and where its value comes from."""

    name: str
    says: str
    value: Callable[[EngineStats], float]


COUNTERS = (
    Counted("tokens_emitted", "Tokens that the policy's passes emitted.", lambda stats: stats.tokens_emitted),
    Counted("tokens_drafted", "Drafted tokens that were verified.", lambda stats: stats.tokens_drafted),
    Counted("tokens_accepted", "Drafted tokens that were accepted.", lambda stats: stats.tokens_accepted),
    Counted("nodes_offered", "Tokens that the drafter offered.", lambda stats: stats.nodes_offered),
    Counted("drafts_asked", "Drafts that the drafter was asked for.", lambda stats: stats.drafts_asked),
    Counted("passes", "Passes of the policy in which requests decoded.", lambda stats: stats.forwards),
    Counted("passes_plain", "Of those, the passes that verified no draft.", lambda stats: stats.passes_plain),
    Counted("passes_probed", "Of those, the passes that probed whether drafting pays.", lambda s: s.passes_probed),
    Counted("draft_seconds", "Seconds spent on drafting.", lambda stats: stats.draft_seconds),
    Counted("pass_seconds", "Seconds that the passes took, drafting included.", lambda stats: stats.pass_seconds),
    Counted(
        "plain_seconds",
        "Seconds that plain passes would have taken for the same tokens, as projected.",
        lambda stats: stats.plain_seconds,
    ),
)
_EVENTS = "events"


@cache
def _metrics() -> tuple[dict[str, prometheus_client.Counter], dict[str, prometheus_client.Gauge]]:
    """The metrics of this process; a name can be registered once."""
    counters = {each.name: prometheus_client.Counter(f"paceline_{each.name}", each.says) for each in COUNTERS}
    counters[_EVENTS] = prometheus_client.Counter(
        "paceline_events", "Named events: fallbacks and faults.", labelnames=["event"]
    )
    gauges = {
        name: prometheus_client.Gauge(f"paceline_{name}", says, multiprocess_mode="mostrecent")
        for name, says in (
            ("weight_version", "Version of the policy's weights, as the drafter was told."),
            ("history_bytes", "Bytes that the memory of responses takes."),
        )
    }
    return counters, gauges


class Exporter:
    """Adds what an ``EngineStats`` gained to this process's metrics, at most twice a second."""

    def __init__(self) -> None:
        self._before = EngineStats(events={})
        self._due = 0.0

    def update(self, stats: EngineStats, history_bytes: int = 0, *, now: bool = False) -> None:
        """Take over what was counted since the last time; with ``now``, whenever that was."""
        moment = time.monotonic()
        if moment < self._due and not now:
            return
        self._due = moment + _EVERY_SECONDS
        counters, gauges = _metrics()
        for each in COUNTERS:
            counters[each.name].inc(max(each.value(stats) - each.value(self._before), 0))
        for event, count in stats.events.items():
            counters[_EVENTS].labels(event=event).inc(max(count - self._before.events.get(event, 0), 0))
        gauges["weight_version"].set(stats.weight_version)
        gauges["history_bytes"].set(history_bytes)
        self._before = msgspec.structs.replace(stats, events=dict(stats.events))
