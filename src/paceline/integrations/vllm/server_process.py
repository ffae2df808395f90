"""Runs vLLM's OpenAI-compatible server in this process, after its own parser has shown what the arguments mean.

``python -m paceline.integrations.vllm.server_process N OURS... THEIRS...`` takes N arguments of paceline and then those
that a user gives for vLLM. An argument has many spellings (``--host``, ``--hos``, ``--speculative-config.method``,
``-sc``, a key of the file behind ``--config``), so what is compared is what vLLM's parser makes of them, at the moment
at which the server itself parses them. What was found is written to the file that ``PACELINE_SERVE_REPORT`` names.
"""

import os
import runpy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from paceline.files import write_atomically
from paceline.schema import PacelineError
from paceline.terminal import printable

#: The environment variable that names the file for the ``Report``.
REPORT = "PACELINE_SERVE_REPORT"
MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "paceline.integrations.vllm.access.AccessMiddleware"
#: Settings of vLLM's parser that paceline decides, and what to use for them.
OURS = {
    "model": "MODEL",
    "model_tag": "MODEL",
    "host": "--host",
    "port": "--port",
    "uds": "--host and --port",
    "api_key": "the environment variable PACELINE_TOKEN",
    "speculative_config": "--config and --set",
    "spec_method": "--config and --set",
    "spec_model": "--config and --set",
    "spec_tokens": "--config and --set",
    "additional_config": "--config and --set",
}
_OWN_SERVER = "start vLLM's own server with the plug-in in it (docs/vllm.md) and guard it yourself"
#: Settings that would let others in beside the token, or run what a model writes.
UNGUARDED = {
    "middleware": "it could answer before the token is seen",
    "grpc": "its port asks for no token",
    "grpc_port": "its port asks for no token",
    "headless": "its ports ask for no token",
    "api_server_count": "one process serves here",
    "nnodes": "ports between nodes ask for no token",
    "node_rank": "ports between nodes ask for no token",
    "master_addr": "ports between nodes ask for no token",
    "data_parallel_address": "ports between nodes ask for no token",
    "data_parallel_external_lb": "ports between nodes ask for no token",
    "data_parallel_hybrid_lb": "ports between nodes ask for no token",
    "data_parallel_multi_port_external_lb": "its ports ask for no token",
    "kv_events_config": "its port asks for no token",
    "kv_transfer_config": "its ports ask for no token",
    "ec_transfer_config": "its ports ask for no token",
    "tool_server": "its tools run what a model writes",
    "ssl_cert_reqs": "clients are known by PACELINE_TOKEN",
    "ssl_ca_certs": "clients are known by PACELINE_TOKEN",
}
_CROSS_ORIGIN = "a browser sends no token with its preflight request, so none is answered; use a proxy that adds it"


class ArgumentError(PacelineError):
    """Arguments for vLLM that vLLM does not take, or that paceline decides; one line."""


class Report(msgspec.Struct, kw_only=True):
    """What the server's process found: why it did not start, or the scheme that it serves."""

    refused: str | None = None
    scheme: str = "http"


Parse = Callable[[Sequence[str]], Namespace]


def read(parse: Parse, ours: Sequence[str], theirs: Sequence[str], *, has_token: bool) -> Namespace:
    """Parse ``ours`` and ``theirs`` together; ArgumentError where ``theirs`` touch what paceline decides.

    They do where they change one of those settings when they stand alone, or in the result.
    """
    default, alone, meant = parse([]), parse(theirs), parse(ours)
    together = parse([*ours, *theirs])
    for name, value in vars(together).items():
        is_touched = getattr(alone, name, None) != getattr(default, name, None)
        if name in UNGUARDED and (is_touched or value != getattr(meant, name, None)):
            raise ArgumentError(f"{_flag(name)}: {UNGUARDED[name]}; leave it out, or {_OWN_SERVER}")
        if name in OURS and (is_touched or value != getattr(meant, name, None)):
            raise ArgumentError(f"{_flag(name)}: set here already; use {OURS[name]}")
        if name in ("allowed_origins", "allow_credentials") and has_token and is_touched:
            raise ArgumentError(f"{_flag(name)}: {_CROSS_ORIGIN}")
    if bool(getattr(together, "ssl_keyfile", None)) != bool(getattr(together, "ssl_certfile", None)):
        raise ArgumentError("--ssl-keyfile, --ssl-certfile: HTTPS takes both; one alone would serve in the clear")
    return together


def parsing(parser: ArgumentParser, parse_args: Callable[..., Namespace]) -> Parse:
    """A function that parses by ``parser`` and raises ArgumentError for whatever it does not take."""

    def error(message: str) -> NoReturn:
        raise ArgumentError(f"arguments for vLLM: {printable(message)}")

    def parse(arguments: Sequence[str]) -> Namespace:
        try:
            return parse_args(parser, list(arguments))
        except ArgumentError:
            raise
        except Exception as problem:  # noqa: BLE001  files behind --config, types of fields: whatever vLLM's code raises
            what = printable(problem).strip() or type(problem).__name__
            raise ArgumentError(f"arguments for vLLM: {what}") from None

    parser.error = error  # type: ignore[method-assign]
    return parse


def main(arguments: Sequence[str]) -> None:
    """Check the arguments when vLLM parses them, write the report, and serve."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    count = int(arguments[0])
    ours, theirs = arguments[1 : 1 + count], arguments[1 + count :]
    parse_args: Callable[..., Namespace] = FlexibleArgumentParser.parse_args

    def checked(parser: ArgumentParser, args: Any = None, namespace: Any = None) -> Namespace:
        if args is not None or namespace is not None:
            return parse_args(parser, args, namespace)
        try:
            found = read(parsing(parser, parse_args), ours, theirs, has_token=bool(os.environ.get("PACELINE_TOKEN")))
            if MIDDLEWARE not in getattr(found, "middleware", ()):
                raise ArgumentError("this vLLM takes no --middleware, without which nothing asks for the token")
        except ArgumentError as error:
            _report(Report(refused=str(error)))
            sys.exit(2)
        _report(Report(scheme="https" if getattr(found, "ssl_keyfile", None) else "http"))
        return found

    FlexibleArgumentParser.parse_args = checked
    sys.argv = [MODULE, *ours, *theirs]
    runpy.run_module(MODULE, run_name="__main__")


def _report(report: Report) -> None:
    write_atomically(os.environ[REPORT], msgspec.json.encode(report))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    main(sys.argv[1:])
