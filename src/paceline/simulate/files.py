"""The files of a rollout log and their rows: JSONL, gzipped JSONL or Parquet, one row in memory at a time."""

import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from paceline.files import FileReadError, named, open_regular
from paceline.schema import PacelineError
from paceline.terminal import printable

Row = dict[str, Any]
Warn = Callable[[str], None]
"""Receives one line about something that was passed over."""

RUN_ROLLOUTS = "rollouts.jsonl"
#: Most bytes of a row, and most files of a folder, that are read.
MAX_ROW_BYTES = 256 << 20
MAX_FILES = 1_000_000
#: A compressed file may be this many times as large as it is on the disk, beyond the first bytes that are free.
MAX_RATIO = 300
_FREE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_BOM = b"\xef\xbb\xbf"
#: Files that lie beside rollouts in the folders of the trainers and hold none that were trained on.
_BESIDE = re.compile(
    r"(eval|val|metrics|prompts|aggregated_results|config)|.*(\.prompts\.jsonl|_aggregate_metrics\.json)$"
    r"|.*materialized_inputs"
)
#: Streams beside which others hold the same rollouts again, or some that were not trained on: a name's beginning.
_TRAINED = ("train_rollouts.", "train_data_step")
#: prime-rl's rollouts/step_N/KIND/SUBSET/traces.jsonl, best first; ``all`` has what failed and was dropped as well.
_COHORTS = (("train", "effective"), ("train", "all"), ("eval", "effective"), ("eval", "all"))

#: Writes the samples of a torch pickle as JSON; values may be lists, tensors, or numpy's arrays and numbers.
PICKLE_RECIPE = (
    "python -c 'import json, sys, numpy as n, torch; c = n._core.multiarray; torch.serialization.add_safe_globals("
    '[c._reconstruct, c.scalar, n.ndarray, n.dtype, *{type(n.dtype(k)) for k in "?bBhHiIlLqQefdSU"}]); '
    '[print(json.dumps(s, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))) '
    'for s in torch.load(sys.argv[1], weights_only=True)["samples"]]\' FILE.pt > FILE.jsonl'
)


class LogError(PacelineError, ValueError):
    """A rollout log that cannot be read; the message names the file and the line."""


def log_files(path: Path) -> list[Path]:
    """The files of a log in the order of its steps: ``path`` itself, a run's rollouts, or all logs below a folder.

    Files of a folder are ordered by the numbers in their names, so ``2.jsonl`` comes before ``10.jsonl``. Raises
    LogError where there is nothing to read.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise LogError(f"{named(path)}: no such file or folder") from None
    except (OSError, ValueError) as error:
        raise LogError(f"{named(path)}: cannot be read: {_reason(error)}") from None
    if stat.S_ISREG(mode):
        if path.suffix == ".pt":
            raise LogError(
                f"{named(path)}: a torch pickle, which is never loaded; write its samples as JSON first, one a line: "
                f"{PICKLE_RECIPE}"
            )
        return [path]
    if not stat.S_ISDIR(mode):
        raise LogError(f"{named(path)}: cannot be read: it is neither a regular file nor a folder")
    if (path / RUN_ROLLOUTS).is_file():
        return [path / RUN_ROLLOUTS]
    below = list(_below(path))
    files = [found for found in below if found.name.endswith(_SUFFIXES) and not _BESIDE.match(found.name)]
    if not files:
        pickles = sorted(found for found in below if found.suffix == ".pt")
        if pickles:
            return log_files(pickles[0])
        raise LogError(f"{named(path)}: holds no rollout log ({', '.join(_SUFFIXES)})")
    trained = [found for found in files if found.name.startswith(_TRAINED)] + _cohort(files)
    # By name, not by Path: a folder may hold hundreds of thousands of them.
    return sorted(trained or files, key=lambda found: _natural(str(found)))


def _cohort(files: list[Path]) -> list[Path]:
    """prime-rl's traces that were trained on; where there is no such file, those of the best cohort there is."""
    cohorts: dict[tuple[str, str], list[Path]] = {}
    for file in files:
        if file.name == "traces.jsonl":
            parents = file.absolute().parts
            cohorts.setdefault((parents[-3], parents[-2]) if len(parents) > 2 else ("", ""), []).append(file)
    return next((cohorts[cohort] for cohort in _COHORTS if cohort in cohorts), [])


def _below(folder: Path) -> Iterator[Path]:
    """The regular files below a folder, those behind links among them, each folder once however it is linked."""
    waiting: list[str] = [str(folder)]
    seen: set[tuple[int, int]] = set()
    count = 0
    while waiting:
        here = waiting.pop()
        try:
            place = os.stat(here)
            if (place.st_dev, place.st_ino) in seen:
                continue
            seen.add((place.st_dev, place.st_ino))
            with os.scandir(here) as entries:
                for entry in entries:
                    mode = _mode(entry)
                    if stat.S_ISDIR(mode) and not entry.name.startswith("."):
                        waiting.append(entry.path)
                    elif stat.S_ISREG(mode) and entry.name.endswith((*_SUFFIXES, ".pt")):
                        count += 1
                        if count > MAX_FILES:
                            raise LogError(f"{named(folder)}: holds more than {MAX_FILES} files; name one run's folder")
                        yield Path(entry.path)
        except OSError as error:
            raise LogError(f"{named(here)}: cannot be read: {_reason(error)}") from None


def _mode(entry: "os.DirEntry[str]") -> int:
    """What an entry is, behind links; 0 for a link that leads nowhere or to itself."""
    try:
        if entry.is_dir():
            return stat.S_IFDIR
        return stat.S_IFREG if entry.is_file() else 0
    except OSError:
        return 0


def read_rows(path: Path, warn: Warn) -> Iterator[tuple[str, Row]]:
    """(where, row) of every row of a file; ``where`` is ``file:number``.

    NaN and infinities, which Python's ``json.dumps`` writes, are read. Raises LogError for a line that is no JSON
    object or is longer than ``MAX_ROW_BYTES``, and for a file that unpacks to more than ``MAX_RATIO`` times its size;
    a torn last line, of a run that is still writing, is passed over with a warning.
    """
    name = named(path)
    try:
        with open_regular(path) as file:
            if path.suffix == ".parquet":
                yield from _parquet_rows(path, file)
            elif path.suffix == ".gz":
                bound = _FREE_BYTES + MAX_RATIO * os.fstat(file.fileno()).st_size
                with io.BufferedReader(gzip.GzipFile(fileobj=file), _CHUNK_BYTES) as unpacked:
                    yield from _json_rows(name, unpacked, bound, warn)
            else:
                yield from _json_rows(name, file, None, warn)
    except FileReadError as error:
        raise LogError(str(error)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise LogError(f"{name}: cannot be read: {_reason(error)}") from None


def _json_rows(name: str, lines: Any, bound: int | None, warn: Warn) -> Iterator[tuple[str, Row]]:
    number, total = 0, 0
    while line := lines.readline(MAX_ROW_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        if len(line) > MAX_ROW_BYTES:
            raise LogError(f"{where}: a line of more than {MAX_ROW_BYTES} bytes; write a rollout a line")
        total += len(line)
        if bound is not None and total > bound:
            raise LogError(f"{name}: unpacks to more than {MAX_RATIO} times its size, as no log does; it is not read")
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            row = _decoded(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                warn(f"{where}: the last line is torn and was passed over")
                return
            reason = "nested too deeply" if isinstance(error, RecursionError) else printable(error)
            raise LogError(f"{where}: not JSON: {reason}") from None
        if not isinstance(row, dict):
            raise LogError(f"{where}: a rollout is a JSON object, got {type(row).__name__}")
        yield where, row


def _decoded(line: bytes) -> Any:
    """The value of a line; with Python's own reader where it is what only that one takes: NaN, or long integers."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            return json.loads(line.decode())
        except ValueError:
            raise error from None


def _parquet_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Row]]:
    name = named(path)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise LogError(f"{name}: reading Parquet needs pyarrow; pip install 'paceline[parquet]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_batch_rows(table.metadata, name, file)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}:{number}", {key: _without_nulls(value) for key, value in row.items()}
    except (OSError, pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, PacelineError):
            raise
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        raise LogError(f"{name}: not a Parquet file that can be read: {reason}") from None


def _batch_rows(metadata: Any, name: str, file: BinaryIO) -> int:
    """How many rows are decoded at a time: values that are stored once and repeated stay within a row's bound.

    Raises LogError for a file that unpacks to more than ``MAX_RATIO`` times its size.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    sizes = [group.column(index).total_uncompressed_size for group in groups for index in range(group.num_columns)]
    if sum(sizes) > _FREE_BYTES + MAX_RATIO * os.fstat(file.fileno()).st_size:
        raise LogError(f"{name}: unpacks to more than {MAX_RATIO} times its size, as no log does; it is not read")
    return max(1, min(256, MAX_ROW_BYTES // max(1, *sizes, 0)))


def _without_nulls(value: Any) -> Any:
    """The value without the fields that a Parquet table gives to every struct because another row has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares runs of digits as numbers."""
    parts = re.split(r"(\d+)", name)
    # By length and then by digit, which orders numbers of any length; a file's name may have hundreds of digits.
    return [(len(digits := part.lstrip("0")), digits) if index % 2 else (-1, part) for index, part in enumerate(parts)]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or printable(error) or type(error).__name__
