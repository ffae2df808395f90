"""The real server: groups over HTTP draft, both families of metrics are there, a token is needed, history is kept."""

import http.client
import json
import os
import signal
import socket
import string
import urllib.error
import urllib.request

import psutil
import pytest

pytest.importorskip("vllm")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.config import PluginConfig
from paceline.history.snapshot import read_snapshot
from paceline.integrations.vllm.access import CONTROL, SERVED
from paceline.integrations.vllm.serve import ServeError, Server
from ports import free_port
from vllm_models import save_tiny

pytestmark = pytest.mark.vllm


def save_tokenizer(directory):
    """A token for each letter, so that any answer of the tiny model is a text."""
    letters = string.ascii_letters + " .,:{}[]"
    vocabulary = {"<eos>": 0, "<unk>": 1, **{letter: 2 + at for at, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(directory)


def counted(base, *names):
    request = urllib.request.Request(f"{base}/metrics", headers={"authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=30) as page:
        lines = [line.split() for line in page.read().decode().splitlines() if not line.startswith("#")]
    return [sum(float(line[1]) for line in lines if line[0].split("{")[0] == name) for name in names]


def answer(url, model, token):
    body = {
        "model": model,
        "prompt": "hello wOrld",
        "max_tokens": 40,
        "temperature": 0,
        "vllm_xargs": {"paceline_group": "a"},
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as found:
        return json.load(found)["choices"][0]["text"]


def test_a_served_model_drafts_over_http_and_keeps_its_history(tmp_path):
    model = str(save_tiny(tmp_path / "model"))
    save_tokenizer(model)
    plugin = PluginConfig(snapshot=str(tmp_path / "history.plh"))
    plugin.budget.mode = "fixed"
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    server = Server(model, plugin, port=free_port(), token="secret", arguments=arguments, environ=environ)
    with server.running() as process:
        served = server.wait_until_ready(process, 300)
        base = served.url.removesuffix("/v1")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            answer(served.url, model, "guess")
        first = answer(served.url, model, "secret")
        assert len(first) > 8
        (before,) = counted(base, "paceline_tokens_accepted_total")
        assert answer(served.url, model, "secret") == first
        for _ in range(40):  # counters are handed on twice a second, while something is decoded
            accepted, theirs = counted(
                base, "paceline_tokens_accepted_total", "vllm:spec_decode_num_accepted_tokens_total"
            )
            if accepted > before + len(first) // 2:
                break
            answer(served.url, model, "secret")
        assert accepted > before + len(first) // 2
        assert theirs > 0
    assert process.returncode == 0
    snapshot = read_snapshot(tmp_path / "history.plh")
    assert len(snapshot.records[-1]) >= 2 * len(first)


def every_route(environ):
    """Methods and paths of vLLM's application with all tasks and all that its environment adds; mounts included."""
    from fastapi.routing import APIRoute
    from starlette.routing import Mount, Route, WebSocketRoute
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", "m", "--enable-tokenizer-info-endpoint"]
        )
        app = build_app(args, ("generate", "render", "realtime", "transcription", "embed", "classify"), None)
    found = set()
    for route in app.routes:
        path = route.path.replace("{response_id}", "resp_1")
        if isinstance(route, WebSocketRoute):
            found.add(("WEBSOCKET", path))
        elif isinstance(route, Mount):
            found |= {("GET", path), ("GET", f"{path}/"), ("GET", f"{path}/below")}
        else:
            assert isinstance(route, APIRoute | Route)
            found |= {(method, path) for method in route.methods or ()}
    return found


def status(address, method, path, token=None, body=b"{}", **headers):
    """Status of a raw request; nothing is normalised on the way."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="host" in headers)
        named = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        if token is not None:
            named["authorization"] = f"Bearer {token}"
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read() if method != "HEAD" else b""
    finally:
        connection.close()


def websocket_status(address, path, token=None):
    """Status of the answer to a request for a websocket; 101 is a connection."""
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    headers["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    return status(address, "GET", path, token, b"", **headers)[0]


def is_not_served(answer):
    return answer[0] == 404 and b"does not serve this route" in answer[1]


def test_every_route_of_the_real_server_asks_for_the_token(tmp_path):
    model = str(save_tiny(tmp_path / "model"))
    save_tokenizer(model)
    extra = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    routes = every_route(extra)
    assert {("POST", "/invocations"), ("GET", "/metrics"), ("POST", "/collective_rpc"), ("GET", "/docs")} <= routes
    assert {("POST", "/update_weights"), ("POST", "/pause"), ("WEBSOCKET", "/v1/realtime")} <= routes
    environ = {**os.environ, **extra, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--enable-tokenizer-info-endpoint"]
    server = Server(
        model, PluginConfig(), host="0.0.0.0", port=free_port(), token="secret", arguments=arguments, environ=environ
    )
    with server.running() as process:
        server.wait_until_ready(process, 300)
        address = ("127.0.0.1", server.port)
        # What others can connect to is this one port.
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = [c.laddr for each in family for c in each.net_connections() if c.status == psutil.CONN_LISTEN]
        assert {laddr.port for laddr in listening if not laddr.ip.startswith(("127.", "::1"))} == {server.port}
        assert not any("secret" in argument for each in family for argument in each.cmdline())
        # The application that serves has the routes that were enumerated.
        schema = json.loads(status(address, "GET", "/openapi.json", "secret")[1])
        served = {
            (method.upper(), path.replace("{response_id}", "resp_1"))
            for path, methods in schema["paths"].items()
            for method in methods
        }
        assert len(served) > 40
        assert served <= routes

        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE")
        paths = {path for _, path in routes}
        for path in sorted(paths):
            for method in methods:
                for token in (None, "wrong", ""):
                    expected = 200 if (method, path) == ("GET", "/health") else 401
                    assert status(address, method, path, token)[0] == expected, (method, path, token)
            assert websocket_status(address, path) == 403, path
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        assert status(address, "OPTIONS", "/v1/completions", **preflight)[0] == 401
        for path in (
            "//invocations", "/./invocations", "/v1/../invocations", "/%69nvocations", "/INVOCATIONS", "/metrics%2f",
            "/metricsx", "/health/../metrics", "/health%2f..%2fmetrics", "/health/", "/health;/metrics", "/nowhere",
            "/health%00", "/health%0a", "//health", f"http://127.0.0.1:{server.port}/metrics", "*",
        ):  # fmt: skip
            assert status(address, "GET", path)[0] in (400, 401), path
        assert status(address, "GET", "/%68ealth")[0] == 200  # the same route

        # With it, what is on the list is vLLM's own answer; the rest is not served. What changes the server comes last.
        changing = {"/pause", "/sleep", "/release_kv_cache_memory", "/resume", "/wake_up"}
        for method, path in sorted(routes, key=lambda route: (route[1] in changing, route)):
            if method == "WEBSOCKET":
                assert websocket_status(address, path, "secret") == 403
                continue
            is_listed = path in SERVED or path in CONTROL or path.startswith("/v1/responses/")
            answer = status(address, method, path, "secret")
            assert answer[0] != 401, (method, path)
            assert answer[0] != 403 or b'"type": "access"' not in answer[1], (method, path)
            assert is_not_served(answer) is (not is_listed and method != "HEAD"), (method, path, answer)
            if path in (
                "/version",
                "/load",
                "/metrics",
                "/v1/models",
                "/health",
                "/docs",
                "/is_paused",
                "/server_info",
            ):
                assert answer[0] == 200 or method == "HEAD", (method, path, answer)
        for path in CONTROL | SERVED:
            known = {route for _, route in routes}
            assert path in known or path in ("/start_profile", "/stop_profile"), path
    assert process.returncode == 0


def test_what_the_real_server_refuses_is_one_line_before_it_listens(tmp_path):
    for arguments, line in (
        (["--hos", "0.0.0.0"], "--host: set here already; use --host"),
        (["--speculative-config.method", "ngram"], "--speculative-config: set here already; use --config and --set"),
        (["--nothing", "1"], "arguments for vLLM: unrecognized arguments: --nothing"),
    ):
        server = Server(str(tmp_path), PluginConfig(), port=free_port(), arguments=arguments)
        with pytest.raises(ServeError) as refused, server.running() as process:
            server.wait_until_ready(process, 120)
        assert str(refused.value).startswith(line)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0
        assert process.returncode in (2, -signal.SIGKILL)
