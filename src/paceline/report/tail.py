"""Reads a file of lines as it grows: what is half written is waited for, and what was replaced is read again."""

from pathlib import Path
from typing import BinaryIO, Generic

from paceline.files import MAX_LINE_BYTES, FileReadError, lines_of, named, open_regular
from paceline.report.trace import RowT, TraceError, decode_line


class Tail(Generic[RowT]):
    """The whole lines of ``path`` so far, as ``rows`` of ``kind``.

    The last line taken must still stand where it was read. Where it does not, another run has the file, or the run was
    resumed and its later lines dropped: all is read anew. ``broken`` says which line cannot be read; nothing after it
    is taken, and the next ``poll`` tries it again, since on a network's file system it may not be whole yet.
    """

    def __init__(self, path: Path, kind: type[RowT]) -> None:
        self.path, self._kind = path, kind
        self.rows: list[RowT] = []
        self.broken = ""
        self.modified: float | None = None
        self._offset, self._last = 0, b""

    def poll(self) -> bool:
        """Take what is new; returns whether ``rows`` changed. A file that is not there has no rows."""
        before, self.broken = len(self.rows), ""
        try:
            self.modified = self.path.stat().st_mtime
        except OSError:
            self.modified = None
            self._forget()
            return before > 0
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset - len(self._last))
                anew = file.read(len(self._last)) != self._last
                if anew:
                    self._forget()
                    file.seek(0)
                self._take(file)
        except (FileReadError, OSError) as error:
            self.broken = str(error) if isinstance(error, FileReadError) else f"{named(self.path)}: cannot be read"
            return len(self.rows) != before
        return anew or len(self.rows) != before

    def _take(self, file: BinaryIO) -> None:
        for line in lines_of(file, self.path, MAX_LINE_BYTES, len(self.rows) + 1):
            if not line.endswith(b"\n"):
                return
            try:
                self.rows.append(decode_line(self._kind, line, self.path, len(self.rows) + 1))
            except TraceError as error:
                self.broken = str(error)
                return
            self._offset, self._last = self._offset + len(line), line

    def _forget(self) -> None:
        self.rows, self._offset, self._last = [], 0, b""
