"""A page that Prometheus reads: the last step as gauges, events as counters."""

import hmac
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from paceline.report.definitions import METRICS
from paceline.report.trackers.base import Tracked, TrackerError, numbers
from paceline.schema import StepRecord


class PrometheusTracker:
    """Serves ``/metrics`` as long as the run lasts; nothing of it outlives the process.

    Where ``PACELINE_TOKEN`` is set, a reader sends it as bearer token. Listens at ``url``.
    """

    def __init__(self, run: Tracked) -> None:
        self.id, self.told = "", -1
        host, port = run.config.track.prometheus.host, run.config.track.prometheus.port
        self._page = _Page({"project": run.config.track.project, "name": run.name})
        registry = CollectorRegistry()
        registry.register(self._page)
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise TrackerError(f"track.prometheus: {host}:{port}: {reason}; choose another port") from None
        self._server.set_app(_guarded(make_wsgi_app(registry), os.environ.get("PACELINE_TOKEN") or None))
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="paceline-metrics", daemon=True).start()

    def log(self, record: StepRecord) -> None:
        """The page shows this step from now on."""
        self._page.show(record)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()


class _Page:
    """What is collected when the page is read."""

    def __init__(self, run: dict[str, str]) -> None:
        self._run = run
        self._record: StepRecord | None = None
        self._events: Counter[str] = Counter()

    def show(self, record: StepRecord) -> None:
        # Readers see the old or the new ones: neither is changed in place.
        self._events, self._record = self._events + Counter(record.events), record

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("paceline_run", "The run.", value=self._run)
        record, events = self._record, self._events
        if record is None:
            return
        found: dict[str, list[tuple[str, float]]] = {"step": [("", float(record.step))]}
        for name, key, value in numbers(record):
            found.setdefault(name, []).append((key, value))
        for metric in METRICS:
            if metric.name == "events" or metric.name not in found:
                continue
            entries = found[metric.name]
            labels = [] if entries[0][0] == "" else ["key"]
            gauge = GaugeMetricFamily(f"paceline_{metric.name}", metric.definition, labels=labels)
            for key, value in entries:
                gauge.add_metric([key] if labels else [], value)
            yield gauge
        counter = CounterMetricFamily("paceline_events", "Named faults and fallbacks of the run.", labels=["event"])
        for event, count in events.items():
            counter.add_metric([event], count)
        yield counter


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Says nothing of requests."""


_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _guarded(app: _App, token: str | None) -> _App:
    """``app`` for those who send the token, where there is one."""
    if token is None:
        return app
    wanted = f"Bearer {token}".encode()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1")
        if hmac.compare_digest(given, wanted):
            return app(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the token is missing or wrong\n"]

    return answer
