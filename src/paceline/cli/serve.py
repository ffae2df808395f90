"""``paceline serve``: vLLM's OpenAI-compatible server, with drafts from history."""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, one_line_errors, source, write_json
from paceline.terminal import safe_console


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory or hub id.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="Arguments of vLLM's own server.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Others than loopback take a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65535)] = 8000,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file of the plug-in's settings.", show_default=False, parser=source),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the plug-in, such as drafter.budget=8.", show_default=False
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Serve a model through vLLM, with drafts from history.

    Clients see vLLM's OpenAI-compatible API; requests that share a prompt, or name a group in vllm_xargs, draft from
    one another's answers. The token that clients must send is read from the environment variable PACELINE_TOKEN.
    Metrics of vLLM and of the plug-in are under /metrics. Ctrl-C ends the server.
    """
    with one_line_errors():
        from rich.table import Table

        from paceline.config import PluginConfig
        from paceline.integrations.vllm.serve import Served, Server
        from paceline.integrations.vllm.serve import serve as run
        from paceline.typed_yaml import load

        plugin = load(PluginConfig, config, settings or [])
        token = os.environ.get("PACELINE_TOKEN") or None
        server = Server(model, plugin, host=host, port=port, token=token, arguments=arguments or ())
        console = safe_console()

        def ready(served: Served) -> None:
            table = Table(show_header=False, title=f"{served.model}, ready")
            table.add_row("API", served.url)
            table.add_row("metrics", served.metrics)
            table.add_row("drafter", f"{served.drafter}, at most {served.budget} tokens a request and pass")
            table.add_row("token", "needed" if served.token else "not needed: only this machine can connect")
            table.add_row("vLLM", served.vllm)
            console.print(table)
            write_json(json_path, served)

        code = run(server, ready)
    if code:
        raise typer.Exit(code)
