"""Starts vLLM's OpenAI-compatible server with the plug-in in it, and looks after the process."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec

from paceline.config import PluginConfig, is_loopback
from paceline.engines.vllm.versions import require_vllm
from paceline.integrations.frameworks import engine_arguments
from paceline.schema import PacelineError

#: Arguments of the server that are set here, and what to use for them.
_OURS = {
    "--model": "MODEL",
    "--host": "--host",
    "--port": "--port",
    "--api-key": "the environment variable PACELINE_TOKEN",
    "--speculative-config": "--config and --set",
    "--additional-config": "--config and --set",
}
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
    """The process of a server. ``arguments`` are vLLM's own, after those that are set here.

    Listens on ``host``; one that is not a loopback address takes a ``token``, which clients then send as bearer token.
    Raises ServeError, LossyError or VllmVersionError, one line, before anything is started.
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
        if not is_loopback(host) and not token:
            raise ServeError(
                f"--host {host}: others can reach this address; set PACELINE_TOKEN to a secret that clients must send, "
                "or leave --host at 127.0.0.1"
            )
        for argument in arguments:
            name = argument.split("=", 1)[0].replace("_", "-")
            if name in _OURS:
                raise ServeError(f"{argument}: set here already; use {_OURS[name]}")
        drafts = engine_arguments(plugin, environ=environ)
        additional = json.dumps(drafts["additional_config"])
        self.model, self.plugin, self.host, self.port, self.token = model, plugin, host, port, token
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host,
            "--port", str(port), "--shutdown-timeout", str(_DRAIN_SECONDS), "--additional-config", additional,
        ]  # fmt: skip
        if "speculative_config" in drafts:
            self.command += ["--speculative-config", json.dumps(drafts["speculative_config"])]
        self.command += arguments
        self._environ = dict(os.environ if environ is None else environ)
        self._is_ready = False

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The server's process, which is ended when the context is left, with everything that it started.

        One that never was ready has nothing to lose and is killed at once. ServeError where the port is taken.
        """
        self._claim_port()
        self._is_ready = False
        with tempfile.TemporaryDirectory(prefix="paceline-metrics-") as metrics:
            environ = {**self._environ, "PROMETHEUS_MULTIPROC_DIR": metrics}
            environ.pop("PACELINE_TOKEN", None)
            if self.token:
                environ["VLLM_API_KEY"] = self.token  # the environment of a process is not listed, its arguments are
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
            code = process.poll()
            if code is not None:
                raise ServeError(f"vLLM's server ended with exit code {code} before it was ready; its log says why")
            try:
                with urllib.request.urlopen(f"{self._base}/health", timeout=2):
                    self._is_ready = True
                    return self._served(process.pid)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise ServeError(f"vLLM's server did not answer at {self._base} within {seconds:.0f} s; its log says more")

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
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


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
    while True:
        try:
            return server.wait_until_ready(process, seconds=0.5)
        except ServeError:
            if asked.is_set():
                raise _AskedError from None
            if process.poll() is not None:
                raise


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process and its session: asked by SIGTERM first, killed after ``seconds``."""
    if process.poll() is None and seconds:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind
    process.wait()
