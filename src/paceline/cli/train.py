"""``paceline train``: GRPO on speculative rollouts, as a configuration file describes it."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, Out, Overrides, one_line_errors, source, with_out, write_json
from paceline.files import expanded
from paceline.terminal import safe_console


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False, parser=source)
    ],
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that the folder holds.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Train by GRPO on speculative rollouts.

    Rollouts are drafted and verified: their tokens equal those of plain decoding. Writes metrics.jsonl, rollouts.jsonl,
    config.yaml, checkpoints and report.html into the folder of the run. Ctrl-C and SIGTERM stop after the step, with a
    checkpoint; again: at once.
    """
    with one_line_errors():
        from paceline.config import dump_config, load_config
        from paceline.report.live import LiveView, summary_table
        from paceline.report.summary import first_and_later

        effective = load_config(config, with_out(overrides, out))
        console = safe_console()
        console.print(dump_config(effective), soft_wrap=True)
        from paceline.rl.loop import train as run

        with LiveView(console=console) as view:
            records = run(effective, resume=resume, overwrite=overwrite, on_event=view.on_event)
        console.print(summary_table(records))
        report = expanded(effective.out) / "report.html"
        if report.is_file():
            console.print(f"report: {report}", soft_wrap=True)
        first, later = first_and_later(records) if records else (None, None)
        write_json(json_path, {"run": effective.out, "first_epoch": first, "later_epochs": later, "steps": records})
