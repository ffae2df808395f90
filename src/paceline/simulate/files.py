"""The files of a rollout log and their rows: JSONL, gzipped JSONL or Parquet, one row in memory at a time."""

import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.schema import PacelineError

Row = dict[str, Any]
Warn = Callable[[str], None]
"""Receives one line about something that was passed over."""

RUN_ROLLOUTS = "rollouts.jsonl"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
#: Files that lie beside rollouts in the folders of the trainers and hold none that were trained on.
_BESIDE = re.compile(r"(eval|val|metrics|prompts|aggregated_results|config)|.*\.prompts\.jsonl$")


class LogError(PacelineError, ValueError):
    """A rollout log that cannot be read; the message names the file and the line."""


def log_files(path: Path) -> list[Path]:
    """The files of a log in the order of its steps: ``path`` itself, a run's rollouts, or all logs below a folder.

    Files of a folder are ordered by the numbers in their names, so ``2.jsonl`` comes before ``10.jsonl``. Raises
    LogError where there is nothing to read.
    """
    if path.is_file():
        if path.suffix == ".pt":
            raise LogError(
                f"{path}: a torch pickle, which is never loaded; write its samples as JSON first, one a line: "
                "[print(json.dumps(s, default=str)) for s in torch.load(path, weights_only=True)['samples']]"
            )
        return [path]
    if not path.is_dir():
        raise LogError(f"{path}: no such file or folder")
    if (path / RUN_ROLLOUTS).is_file():
        return [path / RUN_ROLLOUTS]
    below = [found for found in path.rglob("*") if found.name.endswith(_SUFFIXES) and found.is_file()]
    files = [found for found in below if not _BESIDE.match(found.name)]
    # The step folders of prime-rl hold other streams beside the one that was trained on.
    trained = [found for found in files if found.name.startswith("train_rollouts.")]
    if not files:
        pickles = sorted(path.rglob("*.pt"))
        if pickles:
            return log_files(pickles[0])
        raise LogError(f"{path}: holds no rollout log ({', '.join(_SUFFIXES)})")
    return sorted(trained or files, key=lambda found: _natural(str(found.relative_to(path))))


def read_rows(path: Path, warn: Warn) -> Iterator[tuple[str, Row]]:
    """(where, row) of every row of a file; ``where`` is ``file:number``.

    Raises LogError for a line that is no JSON object; a torn last line, of a run that is still writing, is passed over
    with a warning.
    """
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if not line.endswith(b"\n"):
                        warn(f"{where}: the last line is torn and was passed over")
                        return
                    raise LogError(f"{where}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise LogError(f"{where}: a rollout is a JSON object, got {type(row).__name__}")
                yield where, row
    except (OSError, EOFError) as error:
        raise LogError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise LogError(f"{path}: reading Parquet needs pyarrow; pip install 'paceline[parquet]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise LogError(f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from None


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares runs of digits as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
