"""``paceline draft``: models that draft, trained before a run, and as files for vLLM, SGLang and speculators."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli.common import JsonPath, Overrides, folder, one_line_errors, source, write_json
from paceline.terminal import safe_console, say

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.rl.schooling import SchoolingResult

draft = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@draft.callback()
def root() -> None:
    """Train models that draft, and hand heads to engines; docs/drafter-export.md has the formats."""


@draft.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False, parser=source)
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder of the training [default: OUT-drafter].", parser=folder
        ),
    ] = None,
    rollouts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Learn from these: the folder of a run, or a rollouts.jsonl. May be given several times. "
            "Without it the policy answers prompts that the run does not use.",
            show_default=False,
            parser=source,
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(metavar="N", min=2, help="Prompts that the policy answers.")] = 128,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Answers to each.")] = 4,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="How often each rollout is read.")] = 4,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Rollouts per update.")] = 16,
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="Prompts that judge and teach nothing.")] = 0.1,
    schedule: Annotated[
        Literal["constant", "cosine"], typer.Option(help="Of the learning rate, cotrain.lr.")
    ] = "cosine",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a training in the folder.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Train the model that CONFIG drafts with, before the run.

    The result is a drafter.head.path (or drafter.draft_model.path) to start from."""
    with one_line_errors():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from paceline.config import ConfigError, load_config
        from paceline.rl.schooling import Schooling, school

        if not 0 < held_out < 1:
            raise ConfigError(f"--held-out {held_out}: must be between 0 and 1, both excluded")
        effective = load_config(config, overrides or [])
        folder = Path(f"{effective.out}-drafter" if out is None else out).expanduser()
        schooling = Schooling(tuple(rollouts or ()), prompts, samples, epochs, batch, held_out, schedule)
        columns = (TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=safe_console(stderr=True), transient=True) as bar:
            task = bar.add_task("updates", total=None, loss=float("nan"))
            result = school(
                effective,
                schooling,
                folder,
                resume=resume,
                overwrite=overwrite,
                progress=lambda done, total, loss: bar.update(task, completed=done, total=total, loss=loss),
                tell=say,
            )
        safe_console().print(_marks(result))
        say(
            f"{result.drafter}: {result.kind}, {result.updates} updates on {result.rollouts} rollouts "
            f"({result.tokens} tokens), {result.seconds:.0f} s"
        )
        write_json(json_path, result)


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
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The new directory.", show_default=False, parser=folder)
    ],
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
        say(f"{path}: {found.kind} head for {format}, {numbers} numbers, version {found.version} of {found.policy}")
        say(f"reads the outputs of layers {layers}, counted from 0")
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


def _marks(result: "SchoolingResult") -> "Table":
    from rich import box
    from rich.table import Table

    last = result.marks[-1].held_out
    passes = sorted(int(name.rpartition("_")[2]) for name in last if name.startswith("overlap_"))
    table = Table(box=box.SIMPLE_HEAD, caption=f"held out: {result.held_out} rollouts of other prompts")
    for name in ("epoch", "loss", "held out", *(f"overlap {number}" for number in passes), "tokens per forward"):
        table.add_column(name, justify="right")
    for mark in result.marks:
        taught = f"{mark.train['loss']:.3f}" if mark.train else "-"
        overlaps = [f"{mark.held_out[f'overlap_{number}']:.3f}" for number in passes]
        table.add_row(
            str(mark.epoch), taught, f"{mark.held_out['loss']:.3f}", *overlaps, f"{mark.held_out['expected']:.2f}"
        )
    return table
