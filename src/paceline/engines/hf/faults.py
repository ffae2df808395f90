"""What goes wrong inside a pass: whose fault it is, and what it leaves behind."""

from collections.abc import Mapping

from paceline.engines.hf.row import Row
from paceline.schema import PacelineError


class RowError(PacelineError):
    """One row cannot go on; the others can."""

    def __init__(self, row: Row, why: str) -> None:
        super().__init__(line(row, why))
        self.row = row


class CacheLostError(PacelineError):
    """The key-value memory could not be grown and is gone: every row's is computed again, in less memory."""


def line(row: Row, why: object) -> str:
    """One line about what ended a row: its request, the position that it was at, and why."""
    if isinstance(why, PacelineError):
        text = str(why)
    else:
        text = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    text = " ".join(text.split())
    where = f"request {row.request_id}"
    return text if text.startswith(where) else f"{where}, response position {len(row.response)}: {text}"


def failures_of(error: Exception) -> Mapping[str, str]:
    """The requests that an error names as those that failed, with a line each; empty where it names none."""
    found = getattr(error, "failures", None)
    return found if isinstance(found, Mapping) else {}
