"""``paceline top``: how does a run stand, right now?"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import BAD_INPUT, JsonPath, one_line_errors, source, write_json
from paceline.terminal import safe_console


def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False, parser=source)],
    once: Annotated[bool, typer.Option("--once", help="Show it once, as plain text.")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often the files are read.")] = 1.0,
    json_path: JsonPath = None,
) -> None:
    """Watch a run by its folder: how far, how fast, and what everyone does.

    The run may be running, finished or not begun, and the folder a copy from another machine. Only new lines are read;
    a run that is started anew or resumed is noticed. q or Ctrl-C leaves. With --once, and where the output is no
    terminal, the view is plain text, shown once. --json keeps the newest state in one object. Exit code 2: a file of
    the run has a line that cannot be read.
    """
    with one_line_errors():
        import msgspec
        from rich.live import Live

        from paceline.report.top import State, Watch
        from paceline.report.top_view import view

        console, watch = safe_console(), Watch(run)
        written = b""

        def poll() -> State:
            nonlocal written
            state = watch.poll()
            told = msgspec.json.encode(state)
            if told != written:
                write_json(json_path, state)
                written = told
            return state

        state = poll()
        if once or not console.is_terminal:
            console.print(view(state), highlight=False, soft_wrap=True)
        else:
            with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
                try:
                    while True:
                        live.update(view(state, console.width), refresh=True)
                        if "q" in pressed(every):
                            break
                        state = poll()
                except KeyboardInterrupt:
                    pass
            console.print(view(state, console.width), highlight=False)
        raise typer.Exit(BAD_INPUT if state.problems else 0)


@contextmanager
def _keys() -> Iterator["Pressed"]:
    """Within it keys are read one by one, unseen. Where there is no such terminal, none is ever pressed."""
    try:
        import termios
        import tty

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError, termios.error):
        yield Pressed(None)
        return
    try:
        tty.setcbreak(number)
        yield Pressed(number)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


class Pressed:
    """Called with seconds, waits so long for keys and returns them; less where one is pressed."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def __call__(self, seconds: float) -> str:
        """The keys, as text."""
        if self._number is None:
            time.sleep(seconds)
            return ""
        import os
        import select

        ready, _, _ = select.select([self._number], [], [], seconds)
        keys = os.read(self._number, 64) if ready else b""
        if ready and not keys:  # the terminal is gone
            self._number = None
        return keys.decode(errors="replace")
