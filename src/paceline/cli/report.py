"""``paceline report``: writes a run's report.html again."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, one_line_errors, source, write_json
from paceline.terminal import say


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False, parser=source)],
    json_path: JsonPath = None,
) -> None:
    """Render the report of a run.

    Writes report.html, one self-contained file, from the other files in the folder."""
    with one_line_errors():
        from paceline.report.html import write_report
        from paceline.report.metrics import identity_verdict
        from paceline.report.summary import first_and_later
        from paceline.report.trace import read_metrics

        path = write_report(run)
        say(path)
        records = read_metrics(run / "metrics.jsonl")
        first, later = first_and_later(records)
        verdict, checked = identity_verdict(records)
        identity = {"verdict": verdict, "steps_checked": checked}
        write_json(json_path, {"report": str(path), "first_epoch": first, "later_epochs": later, "identity": identity})
