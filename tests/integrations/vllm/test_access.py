"""In front of every route: without the token nothing but the probe answers, with it only what is on the list."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.integrations.vllm.access import CONTROL, PUBLIC, SERVED, AccessMiddleware

TOKEN = "s3cret-token"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PURGE", "get")
BEARER = (b"authorization", f"Bearer {TOKEN}".encode())
# What vLLM 0.32.0 has beside, under some setting or other.
UNLISTED = (
    "/invocations", "/collective_rpc", "/score", "/v1/score", "/rerank", "/v2/rerank", "/pooling", "/classify",
    "/scale_elastic_ep", "/fault_tolerance/apply", "/kv_event_sources", "/v1/realtime", "/cohere/v2/chat", "/",
)  # fmt: skip
# Spellings of routes that a router, a proxy or a mounted application may take for the route itself.
ODD = (
    "/v1/models/", "//v1/models", "/V1/MODELS", "/v1/models;x", "/v1/./models", "/v1/../v1/models", "/metricsfoo",
    "/metrics/x", "/health/", "//health", "/HEALTH", "/health/../metrics", "/health;x", "/healthz", "/health\n",
    "/health\x00", "/health?", "/docs/", "", "health", "*", "http://127.0.0.1/health", "/v1/responses/a/b",
    "/v1/responses//cancel", "/v1/models\u2215", "/ｈealth",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)


def ask(path="/v1/models", method="GET", headers=(), kind="http", root_path="", app=None):
    """Status that the middleware answers (200 where it passes the request on), and what it sent."""
    passed, sent = [], []

    async def inner(scope, receive, send):
        passed.append(scope)

    async def receive():
        return {"type": f"{kind}.startup" if kind == "lifespan" else f"{kind}.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers), "root_path": root_path, "app": app}
    if kind == "http":
        scope["method"] = method
    asyncio.run(AccessMiddleware(inner)(scope, receive, send))
    assert bool(passed) != bool(sent) or kind == "unknown"
    if passed:
        return 200, sent
    return next((message.get("status", message["type"]) for message in sent), None), sent


def test_without_the_token_only_the_probe_answers():
    for path, method in itertools.product({*SERVED, *CONTROL, *UNLISTED, *ODD}, METHODS):
        expected = 200 if (method, path) == ("GET", "/health") else 401
        assert ask(path, method)[0] == expected, (method, path)
    assert frozenset({("GET", "/health")}) == PUBLIC


def test_with_the_token_only_what_is_on_the_list_answers():
    for path in {*SERVED, *CONTROL, "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"}:
        assert ask(path, "POST", [BEARER])[0] == 200, path
    for path in {*UNLISTED, *ODD}:
        assert ask(path, "GET", [BEARER])[0] == 404, path


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", f"Basic {TOKEN}".encode())],
        [(b"authorization", f"Bearer {TOKEN[:-1]}".encode())],
        [(b"authorization", f"Bearer {TOKEN}x".encode())],
        [(b"authorization", f"Bearer {TOKEN.upper()}".encode())],
        [(b"authorization", f"Bearer {TOKEN}, Bearer wrong".encode())],
        [(b"authorization", f"Bearer {TOKEN}\xff".encode("latin-1"))],
        [(b"authorization", b"\xff\xfe")],
        [BEARER, (b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer wrong"), BEARER],
        [BEARER, BEARER],
        [(b"x-api-key", TOKEN.encode())],
        [(b"cookie", f"token={TOKEN}".encode())],
        [(b"x-forwarded-for", b"127.0.0.1"), (b"host", b"localhost")],
    ],
)
def test_anything_but_the_one_token_is_refused(headers):
    status, (start, body) = ask(headers=headers)
    assert status == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    assert "bearer token" in json.loads(body["body"])["error"]["message"]
    assert TOKEN.encode() not in body["body"]


@given(st.binary(max_size=40))
def test_no_other_bytes_are_the_token(value):
    if value.partition(b" ")[2].strip() != TOKEN.encode():
        assert ask(headers=[(b"authorization", value)])[0] == 401


def test_the_scheme_may_be_spelled_as_clients_spell_it():
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert ask(headers=[(b"Authorization", f"{scheme} {TOKEN}".encode())])[0] == 200


def test_websockets_are_closed_before_they_are_accepted():
    status, (closed,) = ask("/v1/realtime", kind="websocket")
    assert (status, closed["code"]) == ("websocket.close", 1008)
    assert ask("/health", kind="websocket")[0] == "websocket.close"
    assert ask("/v1/realtime", kind="websocket", headers=[BEARER])[0] == "websocket.close"
    assert ask("/v1/responses", kind="websocket", headers=[BEARER])[0] == 200


def test_a_kind_of_request_that_nobody_knows_is_not_passed_on():
    assert ask(kind="unknown") == (None, [])
    assert ask(kind="unknown", headers=[BEARER]) == (None, [])


def test_the_prefix_of_a_proxy_opens_nothing():
    assert ask("/api/v1/models", headers=[BEARER], root_path="/api")[0] == 200
    assert ask("/v1/models", headers=[BEARER], root_path="/api")[0] == 200
    for path, root in itertools.product(
        ("/api/health", "/health/v1/models", "/health/metrics", "/health/", "/v1/completions/collective_rpc"),
        ("/api", "/health", "/", "/v1/completions"),
    ):
        assert ask(path, root_path=root)[0] == 401, (path, root)
    assert ask("/v1/completions/collective_rpc", headers=[BEARER], root_path="/v1/completions")[0] == 404


def test_without_a_token_only_this_machine_is_answered(monkeypatch):
    monkeypatch.delenv("PACELINE_TOKEN")
    for host in (b"localhost", b"127.0.0.1:8000", b"[::1]:8000", b"LOCALHOST:1", b"127.1.2.3"):
        assert ask(headers=[(b"host", host)])[0] == 200, host
    assert ask(headers=[])[0] == 200  # HTTP/1.0
    for host in (
        b"evil.example",
        b"192.0.2.7:8000",
        b"localhost.evil.example",
        b"127.0.0.1@evil.example",
        b"",
        b"[",
        b"0x7f.1",
    ):
        assert ask(headers=[(b"host", host)])[0] == 403, host
    assert ask(headers=[(b"host", b"localhost"), (b"host", b"evil.example")])[0] == 403
    for origin, status in ((b"http://localhost:3000", 200), (b"https://evil.example", 403), (b"null", 403), (b"", 403)):
        assert ask("/pause", "POST", [(b"host", b"localhost"), (b"origin", origin)])[0] == status, origin
    assert ask("/collective_rpc", "POST", [(b"host", b"localhost")])[0] == 404


def test_the_server_does_not_start_behind_another_middleware():
    class Throttle:
        pass

    inner = SimpleNamespace(cls=AccessMiddleware)
    behind = SimpleNamespace(user_middleware=[SimpleNamespace(cls=Throttle), inner])
    status, (failed,) = ask(kind="lifespan", app=behind)
    assert status == "lifespan.startup.failed"
    assert "Throttle would answer" in failed["message"]
    assert ask(headers=[BEARER], app=behind)[0] == 503
    first = SimpleNamespace(user_middleware=[inner, SimpleNamespace(cls=Throttle)])
    assert ask(kind="lifespan", app=first)[0] == 200
    assert ask(headers=[BEARER], app=first)[0] == 200
