"""Runs ``paceline`` in this process, for tests that feed commands with what nobody should."""

import traceback

from typer.testing import CliRunner

from paceline.cli import app

#: Exit codes of a command that was refused, failed a comparison, or did what it was asked.
CODES = (0, 1, 2)
_MAX_LINE = 2000


def run_command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors. AssertionError, with the traceback, where the command ended in one."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(
            f"paceline {' '.join(arguments)[:300]!r}\n" + "".join(traceback.format_exception(result.exception))
        )
    return result.exit_code, result.stdout, result.stderr


def refused_in_one_line(*arguments: str) -> str:
    """What a command that must be refused says: one line after what it had printed before."""
    code, _, said = run_command(*arguments)
    assert code == 2, (code, said)
    lines = [line for line in said.splitlines() if line.startswith(("error:", "Error:"))]
    assert len(lines) == 1, said
    return lines[0]


def check_ending(*arguments: str) -> int:
    """Run a command that may do as it likes but must end in order; its exit code."""
    code, out, said = run_command(*arguments)
    assert code in CODES, (arguments, code, said)
    assert "Traceback" not in said, said
    assert all(len(line) <= _MAX_LINE for line in said.splitlines()), said[:_MAX_LINE]
    assert "\x1b" not in said
    if code == 2:
        assert (said + out).strip(), arguments
    return code
