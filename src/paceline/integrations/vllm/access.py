"""ASGI middleware in front of every route of a server: the token first, then the list of routes that are served.

vLLM's own key guards the paths that begin with /v1, /v2, /inference and /cohere, and no OPTIONS request; everything
else answers anybody. This middleware is the outermost one, so that it sees all requests and websockets, those to
mounted applications and those that CORS would answer included, and it lets through nothing that it does not know.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from paceline.config import is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: The environment variable that holds the token: all users can list the arguments of a process, not its environment.
TOKEN = "PACELINE_TOKEN"
#: What answers without the token: probes of load balancers send none, and its answer is a status without a body.
PUBLIC = frozenset({("GET", "/health")})
#: Generation, tokens, models and metrics.
SERVED = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/metrics/",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/models",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/responses",
        "/v1/responses/render",
        "/inference/v1/generate",
        "/inference/v1/abort_requests",
    }
)
#: What an RL trainer does to a server. vLLM has them where VLLM_SERVER_DEV_MODE, a profiler or
#: VLLM_ALLOW_RUNTIME_LORA_UPDATING asks for them. /collective_rpc is not among them: it calls any method of a worker.
CONTROL = frozenset(
    {
        "/pause",
        "/resume",
        "/is_paused",
        "/abort_requests",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
        "/update_weight_version",
        "/weight_info",
        "/weight_checker",
        "/get_world_size",
        "/server_info",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/release_kv_cache_memory",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
_STORED_RESPONSE = re.compile(r"/v1/responses/[^/]+(/cancel)?")
_POLICY_VIOLATION = 1008  # of websockets


class AccessMiddleware:
    """Lets a request through that carries the token, where there is one, to a route that is served.

    The token is that of the environment variable ``PACELINE_TOKEN`` when the application is built; clients send it as
    ``Authorization: Bearer TOKEN``. Without a token only requests that name this machine in ``Host`` (and in
    ``Origin``, which browsers send) are let through: a page of another site cannot reach the server by way of the
    browser of somebody who works on this machine.

    A refused request gets 401, 403 or 404 with one line, a refused websocket is closed before it is accepted. Where
    another middleware stands in front of this one, the server does not start.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        token = os.environ.get(TOKEN)
        self._digest = _digest(token.encode()) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        kind = scope["type"]
        outer = _outer(scope)
        if kind == "lifespan":
            if outer is None:
                await self._app(scope, receive, send)
                return
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"{outer} would answer before the token is seen"})
            return
        refused = (503, f"{outer} stands in front of the check of the token") if outer else self._refusal(scope)
        if refused is None:
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refused[1]})
        elif kind == "http":
            await _answer(send, *refused)
        # Nothing is known of other kinds, so they are not passed on.

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason why the request is refused; None where it is not."""
        if scope["type"] not in ("http", "websocket"):
            return 404, "not served"
        path = _route_path(scope)
        if scope["type"] == "http" and (scope["method"], path) in PUBLIC and path == scope["path"]:
            return None
        if self._digest is not None:
            if not self._carries_token(scope):
                return 401, f"the token is missing or wrong; send {TOKEN} of the server as bearer token"
        elif not _is_from_here(scope):
            return 403, f"this server answers this machine only; set {TOKEN} where it is started to let others in"
        if path not in SERVED and path not in CONTROL and not _STORED_RESPONSE.fullmatch(path):
            return 404, "paceline serve does not serve this route"
        return None

    def _carries_token(self, scope: Scope) -> bool:
        given = _headers(scope, b"authorization")
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests have one length, so that the time of the comparison says nothing about the token.
        is_equal = hmac.compare_digest(_digest(token.strip()), self._digest or b"")
        return is_equal and scheme.lower() == b"bearer"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _route_path(scope: Scope) -> str:
    """The path without the prefix of a proxy (``--root-path``), as the application's router takes it off."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _is_from_here(scope: Scope) -> bool:
    hosts, origins = _headers(scope, b"host"), _headers(scope, b"origin")
    if len(hosts) > 1 or len(origins) > 1:
        return False
    names = [f"//{host.decode('latin-1')}" for host in hosts] + [origin.decode("latin-1") for origin in origins]
    return all(_names_this_machine(name) for name in names)


def _names_this_machine(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _outer(scope: Scope) -> str | None:
    """The name of a middleware of the application that stands in front of this one."""
    middleware = getattr(scope.get("app"), "user_middleware", None)
    first = middleware[0].cls if middleware else AccessMiddleware
    return None if first is AccessMiddleware else str(getattr(first, "__name__", first))


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": {"message": reason, "type": "access", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
