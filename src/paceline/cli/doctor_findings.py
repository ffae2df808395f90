"""What ``paceline doctor`` finds: one line each, and whatever raises on the way is a line as well."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

Outcome = Literal["ok", "warning", "refused"]

_STYLES: dict[Outcome, str] = {"ok": "green", "warning": "bold yellow", "refused": "bold red"}


class Finding(msgspec.Struct, kw_only=True):
    """One line: what was looked at, what ``says`` was found there, and what to ``do`` about it (empty: nothing)."""

    area: str
    name: str
    outcome: Outcome
    says: str
    do: str = ""


def ok(area: str, name: str, says: str, do: str = "") -> Finding:
    """As it must be."""
    return Finding(area=area, name=name, outcome="ok", says=says, do=do)


def warning(area: str, name: str, says: str, do: str) -> Finding:
    """It works, and something is lost."""
    return Finding(area=area, name=name, outcome="warning", says=says, do=do)


def refused(area: str, name: str, says: str, do: str = "") -> Finding:
    """It does not work. Where ``do`` is empty, ``says`` says itself what to do."""
    return Finding(area=area, name=name, outcome="refused", says=says, do=do)


def guarded(area: str, name: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What ``look`` finds until it raises; then that it is refused, and why."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except Exception as error:  # noqa: BLE001  a doctor must survive whatever is broken
        found.append(refused(area, name, reason(error)))
    return found


def size(count: float) -> str:
    """Bytes for people to read."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def reason(error: BaseException) -> str:
    """An error in one line; of those that are not meant for people, with its kind."""
    from paceline.schema import PacelineError

    text = " ".join(str(error).split())
    return text if isinstance(error, PacelineError) and text else f"{type(error).__name__}: {text or 'no message'}"


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a finding, what to do about it below what was found."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column("outcome")
    table.add_column("name", overflow="fold")
    table.add_column("found", overflow="fold")
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            table.add_section()
            table.add_row("", Text(area, style="bold"), "")
        said = Text(finding.says)
        if finding.do:
            said.append(f"\n-> {finding.do}", style="dim" if finding.outcome == "ok" else "bold")
        table.add_row(Text(finding.outcome, style=_STYLES[finding.outcome]), Text(finding.name), said)
    return table
