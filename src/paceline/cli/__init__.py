"""The ``paceline`` command: one file a sub-command, each a thin caller; ``--help`` loads no torch."""

from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.assets import assets
from paceline.cli.audit import audit
from paceline.cli.cache import cache
from paceline.cli.config import config
from paceline.cli.diff import diff
from paceline.cli.doctor import doctor
from paceline.cli.draft import draft
from paceline.cli.plan import plan
from paceline.cli.profile import profile
from paceline.cli.replay import replay
from paceline.cli.report import report
from paceline.cli.serve import serve
from paceline.cli.simulate import simulate
from paceline.cli.timeline import timeline
from paceline.cli.top import top
from paceline.cli.train import train
from paceline.cli.tune import tune
from paceline.cli.warmup import warmup
from paceline.terminal import say

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_RUNS = (train, warmup, replay, profile, simulate, tune, plan)
for _command in (*_RUNS, doctor, audit, diff, report, timeline, top, serve, config, assets):
    app.command()(_command)
app.add_typer(cache, name="cache")
app.add_typer(draft, name="draft")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Faster RL post-training: rollouts are drafted and verified, and no token changes.

    Exit codes: 0 done, 1 a comparison failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM.
    """


def main() -> None:
    """Run the command line."""
    app()
