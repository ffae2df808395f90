"""``paceline draft``: heads that draft, as files for vLLM, SGLang and speculators."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.common import JsonPath, one_line_errors, write_json

draft = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@draft.callback()
def root() -> None:
    """Train heads that draft, and hand them to engines; docs/drafter-export.md has the formats."""


@draft.command()
def export(
    run_or_head: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_HEAD",
            help="The folder of a run, or the directory or hub id of a head that any of them loads.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The new directory.", show_default=False)],
    format: Annotated[  # noqa: A002
        Literal["vllm", "sglang", "speculators"], typer.Option("--format", help="Who shall load it.")
    ] = "vllm",
    taps: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="The layers whose outputs the head reads, counted from 0, where its files do not say.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The policy's name in the files; default: what they say.", show_default=False
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that speculators drafts by default.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Write a head as a directory that vLLM, SGLang or speculators loads.

    Weights stay as they are, bit for bit. A directory that was written for one is written for another in the same way.
    """
    with one_line_errors():
        from dataclasses import replace

        from paceline.cotrain.export import write_head
        from paceline.rl.heads import find_head

        found = find_head(run_or_head, _layers(taps))
        if policy is not None:
            found = replace(found, policy=policy)
        path = write_head(found, out, format, tokens)
        numbers = sum(tensor.numel() for tensor in found.tensors.values())
        layers = ", ".join(map(str, found.taps or ()))
        print(f"{path}: {found.kind} head for {format}, {numbers} numbers, version {found.version} of {found.policy}")
        print(f"reads the outputs of layers {layers}, counted from 0")
        result = {
            "path": str(path),
            "format": format,
            "kind": found.kind,
            "policy": found.policy,
            "version": found.version,
            "taps": list(found.taps or ()),
            "vocabulary": found.config.vocab_size,
            "numbers": numbers,
        }
        write_json(json_path, result)


def _layers(text: str | None) -> tuple[int, ...]:
    from paceline.schema import PacelineError

    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise PacelineError(f"--taps {text}: give numbers of layers, as in 1,15,28") from None
