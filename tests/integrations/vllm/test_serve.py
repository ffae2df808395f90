"""The server's process: refused where others could reach it unasked, ready when it answers, gone when it should be."""

import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request

import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import PluginConfig
from paceline.engines.guard import LossyError
from paceline.integrations.vllm import serve as serving
from paceline.integrations.vllm.serve import ServeError, Server, is_loopback
from ports import free_port

# Stands in for vLLM's server: answers under /health, others under what the test says, and starts a child as vLLM starts
# its engine core.
STAND_IN = """
import http.server, os, pathlib, signal, subprocess, sys
pathlib.Path(os.environ["PACELINE_SERVE_REPORT"]).write_text("{}")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else int(sys.argv[2])); self.end_headers()
        self.wfile.write(f"{child.pid} {os.environ['VLLM_API_KEY']} {os.environ['PACELINE_TOKEN']}".encode())
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(serving, "require_vllm", lambda: "0.32.0")


def stand_in(unguarded=401):
    port = free_port()
    server = Server("model", PluginConfig(), port=port, token="secret")
    server.command = [sys.executable, "-c", STAND_IN, str(port), str(unguarded)]
    return server


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def test_an_address_that_others_can_reach_takes_a_token():
    for host in ("0.0.0.0", "::", "192.0.2.7", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ServeError, match=r"set PACELINE_TOKEN to a secret"):
            Server("model", PluginConfig(), host=host)
        Server("model", PluginConfig(), host=host, token="secret")
    for host in ("127.0.0.1", "localhost", "::1", "127.8.0.1"):
        Server("model", PluginConfig(), host=host)


def test_the_token_is_in_no_argument():
    server = Server("model", PluginConfig(), host="0.0.0.0", token="secret")
    assert "secret" not in " ".join(server.command)


def test_a_token_that_no_client_can_send_is_refused():
    for token in ("", " ", "two words", "tab\t", "line\n", "schl\u00fcssel", "\x00"):
        with pytest.raises(ServeError, match="PACELINE_TOKEN"):
            Server("model", PluginConfig(), host="0.0.0.0", token=token)


def test_an_environment_that_lets_others_in_is_refused():
    with pytest.raises(ServeError, match="VLLM_API_KEY: guards only some routes; set PACELINE_TOKEN"):
        Server("model", PluginConfig(), environ={"VLLM_API_KEY": "another"})
    Server("model", PluginConfig(), token="same", environ={"VLLM_API_KEY": "same"})
    insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with pytest.raises(ServeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION: whoever connects can run code"):
        Server("model", PluginConfig(), environ=insecure)
    Server("model", PluginConfig(), token="secret", environ=insecure)


def test_an_environment_that_bends_the_law_is_refused():
    with pytest.raises(LossyError, match="VLLM_SPEC_DECODE_SIMULATE"):
        Server("model", PluginConfig(), environ={"VLLM_SPEC_DECODE_SIMULATE": "1"})


def test_the_plug_in_gets_its_settings_and_no_budget_is_no_speculation():
    command = Server("model", PluginConfig()).command
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 16
    plugin = PluginConfig(snapshot="history.plh")
    plugin.drafter.budget = 0
    command = Server("model", plugin).command
    assert "--speculative-config" not in command
    assert json.loads(command[command.index("--additional-config") + 1])["paceline"]["snapshot"] == "history.plh"


def test_a_server_is_ready_when_it_answers_and_leaves_nothing_behind():
    server = stand_in()
    with server.running() as process:
        served = server.wait_until_ready(process, 30)
        child, key, token = get(f"{served.url.removesuffix('/v1')}/health").split()
        assert (key, token, served.token) == ("secret", "secret", True)
        assert psutil.pid_exists(int(child))
    assert process.returncode == 0
    psutil.wait_procs([psutil.Process(int(child))] if psutil.pid_exists(int(child)) else [], timeout=30)
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_before_it_is_ready_is_one_line():
    server = stand_in()
    server.command = [sys.executable, "-c", "raise SystemExit(7)"]
    with pytest.raises(ServeError, match="ended with exit code 7 before it was ready"), server.running() as process:
        server.wait_until_ready(process, 30)


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_that_answers_without_the_token_is_stopped(status):
    server = stand_in(unguarded=status)
    with pytest.raises(ServeError, match="answers without the token"), server.running() as process:
        server.wait_until_ready(process, 30)
    assert process.returncode is not None
    with pytest.raises(ServeError, match="answers without the token"):
        serving.serve(stand_in(unguarded=status), lambda served: None)


def test_a_server_that_has_not_looked_at_its_arguments_is_stopped():
    server = stand_in()
    server.command[2] = STAND_IN.replace('.write_text("{}")', "")
    with pytest.raises(ServeError, match="so it is stopped"), server.running() as process:
        server.wait_until_ready(process, 30)


def test_what_the_process_refuses_is_the_one_line_of_the_error():
    server = stand_in()
    report = "pathlib.Path(os.environ['PACELINE_SERVE_REPORT'])"
    refused = f'import os, pathlib; {report}.write_text(\'{{"refused": "--uds: no"}}\')'
    server.command = [sys.executable, "-c", refused]
    with pytest.raises(ServeError, match=r"^--uds: no$"):
        serving.serve(server, lambda served: None)


def test_a_port_that_is_taken_is_refused_before_anything_starts():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = Server("model", PluginConfig(), port=other.getsockname()[1])
        with pytest.raises(ServeError, match="in use; choose another"), server.running():
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_the_command(number):
    server = stand_in()
    ready = []

    def on_ready(served):
        ready.append(served)
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert serving.serve(server, on_ready) == 0
    assert not psutil.pid_exists(ready[0].pid)
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


def test_the_command_tells_bad_input_in_one_line():
    for arguments, says in (
        (["serve", "model", "--host", "0.0.0.0"], "error: --host 0.0.0.0: others can reach this address"),
        (["serve", "model", "--set", "drafter.kind=none"], "drafter.kind"),
        (["serve", "model", "--set", "drafter.bugdet=3"], "budget"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert says in result.stderr
        assert result.stderr.count("\n") == 1
