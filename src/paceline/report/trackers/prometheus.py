"""A page that Prometheus reads: the last step as gauges, events as counters."""

import hmac
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from paceline.report.definitions import METRICS
from paceline.report.trackers.base import Tracked, TrackerError, numbers
from paceline.schema import StepRecord

#: Clients at once, and seconds that one may take; a scrape takes milliseconds.
_MOST_CLIENTS, _CLIENT_SECONDS = 32, 10.0
_JOIN_SECONDS = 2.0


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
        """Stop serving, hang up on who is still connected, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()


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
    """Serves few clients at once, and none for long: one that stays, however slowly it sends, is hung up on."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, tuple[float, threading.Thread]] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; a client beyond the most is hung up on at once."""
        with self._lock:
            is_full = len(self._clients) >= _MOST_CLIENTS
            if not is_full:
                thread = threading.Thread(
                    target=self.process_request_thread,
                    args=(request, client_address),
                    name="paceline-scrape",
                    daemon=True,
                )
                self._clients[request] = (time.monotonic() + _CLIENT_SECONDS, thread)
        if is_full:
            self.shutdown_request(request)
        else:
            thread.start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and forget the client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._clients.pop(request, None)

    def service_actions(self) -> None:
        """Between requests: hang up on who has been there too long."""
        super().service_actions()
        self.hang_up(time.monotonic())

    def hang_up(self, now: float = math.inf) -> None:
        """Cut the connections whose time is over at ``now`` (without it: all, and wait for their threads)."""
        with self._lock:
            over = [(client, thread) for client, (until, thread) in self._clients.items() if until <= now]
        for client, _ in over:
            with suppress(OSError):  # it has just gone by itself
                client.shutdown(socket.SHUT_RDWR)
        if now == math.inf:
            for _, thread in over:
                thread.join(_JOIN_SECONDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that was cut off; a fault of ours keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


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
