"""Starts vLLM's OpenAI-compatible server with the plug-in in it, and looks after the process."""

import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline.config import PluginConfig, is_loopback
from paceline.engines.vllm.versions import require_vllm
from paceline.files import read_bytes, to_json
from paceline.integrations.frameworks import engine_arguments
from paceline.integrations.vllm.access import TOKEN
from paceline.integrations.vllm.server_process import MIDDLEWARE, REPORT, Report
from paceline.schema import PacelineError

_REPORT_BYTES = 1 << 16
#: Asked without the token before the server counts as ready: a route that vLLM guards, and some that it does not.
_GUARDED = ("/v1/models", "/version", "/metrics", "/nowhere")
#: How long vLLM lets requests in flight end, and how long it may take in all: without the first it kills its workers.
_DRAIN_SECONDS = 30
_GRACE_SECONDS = 60.0


class ServeError(PacelineError):
    """A server that cannot be started as asked, or that ended by itself."""


class Served(msgspec.Struct, kw_only=True):
    """What is served: ``url`` is the base of the OpenAI API, ``metrics`` the Prometheus page."""

    model: str
    url: str
    metrics: str
    drafter: str
    budget: int
    token: bool
    vllm: str
    pid: int


class Server:
    """The process of a server. ``arguments`` are vLLM's own; those that are set here are refused when it starts.

    Listens on ``host``; one that is not a loopback address takes a ``token``, which clients then send as bearer token
    on every route but ``/health``. Raises ServeError, LossyError or VllmVersionError, one line, before anything starts.
    """

    def __init__(
        self,
        model: str,
        plugin: PluginConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._vllm = require_vllm()
        self._environ = dict(os.environ if environ is None else environ)
        if not is_loopback(host) and not token:
            raise ServeError(
                f"--host {host}: others can reach this address; set {TOKEN} to a secret that clients must send, "
                "or leave --host at 127.0.0.1"
            )
        _check_secrets(token, self._environ)
        drafts = engine_arguments(plugin, environ=environ)
        additional = to_json(drafts["additional_config"])
        self.model, self.plugin, self.host, self.port, self.token = model, plugin, host, port, token
        ours = [
            "--model", model, "--host", host, "--port", str(port), "--shutdown-timeout", str(_DRAIN_SECONDS),
            "--middleware", MIDDLEWARE, "--additional-config", additional,
        ]  # fmt: skip
        if "speculative_config" in drafts:
            ours += ["--speculative-config", to_json(drafts["speculative_config"])]
        process = [sys.executable, "-m", "paceline.integrations.vllm.server_process", str(len(ours))]
        self.command = [*process, *ours, *arguments]
        self._report_path: Path | None = None
        self._scheme = "http"
        self._is_ready = False

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The server's process, which is ended when the context is left, with everything that it started.

        One that never was ready has nothing to lose and is killed at once. ServeError where the port is taken.
        """
        self._claim_port()
        self._is_ready = False
        with tempfile.TemporaryDirectory(prefix="paceline-serve-") as folder:
            metrics = Path(folder, "metrics")
            metrics.mkdir()
            self._report_path = Path(folder, "report.json")
            environ = {**self._environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics), REPORT: str(self._report_path)}
            environ.pop(TOKEN, None)
            if self.token:
                # The environment of a process is not listed, its arguments are. vLLM's own check is the second one.
                environ[TOKEN] = environ["VLLM_API_KEY"] = self.token
            process = subprocess.Popen(self.command, env=environ, start_new_session=True)
            try:
                yield process
            finally:
                end(process, _GRACE_SECONDS if self._is_ready else 0.0)

    def _claim_port(self) -> None:
        """ServeError unless the address can be listened on: another server there would seem to be this one."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                reason = error.strerror or error
                raise ServeError(f"--host {self.host} --port {self.port}: {reason}; choose another") from None

    def wait_until_ready(self, process: subprocess.Popen[bytes], seconds: float = 3600.0) -> Served:
        """Return when the server answers. ServeError where it ends or stays silent for ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            served = self.look(process)
            if served is not None:
                return served
            time.sleep(0.1)
        raise ServeError(f"vLLM's server did not answer at {self._base} within {seconds:.0f} s; its log says more")

    def look(self, process: subprocess.Popen[bytes]) -> Served | None:
        """What is served, None while nothing is.

        ServeError where the process has ended, refuses its arguments, or would answer without the token.
        """
        code, report = process.poll(), self._report()
        if report is not None and report.refused is not None:
            raise ServeError(report.refused)
        if code is not None:
            raise ServeError(f"vLLM's server ended with exit code {code} before it was ready; its log says why")
        self._scheme = report.scheme if report is not None else "http"
        if self._status("/health") != 200:
            return None
        # Whatever a version of vLLM makes of the middleware, nobody is let in who should not be.
        if report is None or (self.token and not all(self._status(path) == 401 for path in _GUARDED)):
            raise ServeError(f"vLLM {self._vllm} answers without the token, so it is stopped; report this fault")
        self._is_ready = True
        return self._served(process.pid)

    def _report(self) -> Report | None:
        """What the process has found in its arguments; None before it has looked."""
        if self._report_path is None or not self._report_path.exists():
            return None
        return msgspec.json.decode(read_bytes(self._report_path, _REPORT_BYTES), type=Report)

    def _status(self, path: str) -> int | None:
        """The status of a request without a token; None where nobody answers."""
        # The certificate is the server's own, for the name that its clients use; nothing secret is sent.
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(f"{self._base}{path}", timeout=2, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, http.client.HTTPException):
            return None

    def _served(self, pid: int) -> Served:
        drafter = self.plugin.drafter
        return Served(
            model=self.model,
            url=f"{self._base}/v1",
            metrics=f"{self._base}/metrics",
            drafter=drafter.kind,
            budget=drafter.budget,
            token=bool(self.token),
            vllm=self._vllm,
            pid=pid,
        )

    @property
    def _base(self) -> str:
        # A server that listens everywhere is asked here.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self._scheme}://[{host}]:{self.port}" if ":" in host else f"{self._scheme}://{host}:{self.port}"


def serve(server: Server, on_ready: Callable[[Served], None]) -> int:
    """Run the server until it ends or this process is told to; its exit code, or 0 after Ctrl-C and SIGTERM.

    Both are passed on once, so that requests in flight end and the history is written.
    """
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:  # noqa: ARG001
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with server.running() as process:
            try:
                on_ready(_ready_or_asked(server, process, asked))
                while process.poll() is None and not asked.is_set():
                    asked.wait(0.2)
            except _AskedError:
                pass
            return 0 if asked.is_set() else process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _AskedError(Exception):
    """The end was asked for before the server was ready."""


def _ready_or_asked(server: Server, process: subprocess.Popen[bytes], asked: threading.Event) -> Served:
    while not asked.is_set():
        served = server.look(process)
        if served is not None:
            return served
        asked.wait(0.1)
    raise _AskedError


def _check_secrets(token: str | None, environ: Mapping[str, str]) -> None:
    """ServeError where a token cannot be sent, or where the environment would let others in without it."""
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ServeError(f"{TOKEN}: no client can send it; use printable ASCII characters without spaces")
    if environ.get("VLLM_API_KEY", token) != token:
        raise ServeError(f"VLLM_API_KEY: guards only some routes; set {TOKEN} instead, which guards all of them")
    unsafe = environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0").strip().lower() not in ("", "0", "false")
    if unsafe and not token:
        raise ServeError(
            f"VLLM_ALLOW_INSECURE_SERIALIZATION: whoever connects can run code by it; set {TOKEN} or unset the variable"
        )


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process and its session: asked by SIGTERM first, killed after ``seconds``."""
    if process.poll() is None and seconds:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind
    process.wait()
