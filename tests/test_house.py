"""Invariants of the house that no other tool checks: documented rooms, nothing of one machine."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
ROOMS = (".ci", "benchmarks", "docs", "examples", "src", "tests")
MODULES = sorted(PACKAGE.rglob("*.py"))
CPP = sorted(path for room in ("src", "tests") for path in (ROOT / room).rglob("*") if path.suffix in (".h", ".cpp"))
# Written in pieces, so that this file does not contain what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.~$}/-])/(?:" + "|".join(("root", "home", "work", "Users")) + r")/")
REGISTRIES = re.compile(
    "|".join((r"pypi\." + "org", "python" + "hosted", r"download\." + "pytorch", r"anaconda\." + "org"))
)
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the repository, outside what tools build."""
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    for path in files:
        if "__pycache__" in path.parts:
            continue
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def found(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def unsafe_loads(tree: ast.AST) -> Iterator[int]:
    """Lines that import an unpickler, or call torch.load, torch.save or a load with allow_pickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            names = [] if isinstance(node.value, ast.Constant) and node.value.value is False else ["pickle"]
        else:
            continue
        if any(name.split(".")[0] in UNPICKLERS or name in ("torch.load", "torch.save") for name in names):
            yield node.lineno


def floor_layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    floors = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "floors")
    return [room.strip() for layer in floors["layers"] for room in re.split("[|:]", layer)]


def rooms_that_exist() -> set[str]:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return {f"paceline.{name}" for name in packages | {path.stem for path in PACKAGE.glob("[!_]*.py")}}


def test_every_folder_of_modules_is_a_package_with_a_docstring() -> None:
    for folder in {path.parent for path in MODULES}:
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder.relative_to(ROOT)} has modules and no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), (
            f"{init.relative_to(ROOT)} has no docstring"
        )


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT)) for p in MODULES if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_file_of_cpp_says_what_it_is_for() -> None:
    assert [str(path.relative_to(ROOT)) for path in CPP if not path.read_text(encoding="utf-8").startswith("// ")] == []


def test_no_file_mentions_a_path_of_one_machine() -> None:
    assert found(MACHINE_PATHS) == []


def test_no_file_mentions_a_package_registry() -> None:
    assert found(REGISTRIES) == []


@pytest.mark.parametrize(
    ("line", "pattern", "hit"),
    [
        ("cache in /" + "home/me/x", MACHINE_PATHS, True),
        ("'/" + "work/main'", MACHINE_PATHS, True),
        ("a frame/" + "work/x and ~/" + "work/x", MACHINE_PATHS, False),
        ("pip install -i https://pypi." + "org/simple", REGISTRIES, True),
        ("the PyPI package", REGISTRIES, False),
    ],
)
def test_the_patterns_tell_a_mention_from_a_likeness(line: str, pattern: re.Pattern[str], hit: bool) -> None:
    assert bool(pattern.search(line)) is hit


def test_the_source_can_load_no_pickle() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}": path.read_text(encoding="utf-8").splitlines()[number - 1]
        for path in MODULES
        for number in unsafe_loads(ast.parse(path.read_text(encoding="utf-8")))
    }
    # vLLM reads the mask of a DFlash head from a file of torch's, which is written for it and never read.
    written = [line for line, source in found.items() if "cotrain/formats.py" in line and "torch.save({" in source]
    assert len(written) == 1
    assert sorted(found.keys() - set(written)) == []


@pytest.mark.parametrize(
    ("source", "unsafe"),
    [
        ("import pickle", True),
        ("from pickle import loads", True),
        ("torch.load(path, weights_only=True)", True),
        ("numpy.load(path, allow_pickle=True)", True),
        ("numpy.load(path, allow_pickle=False)", False),
        ("safetensors.torch.load(data)", False),
    ],
)
def test_unsafe_loads_are_recognised(source: str, unsafe: bool) -> None:
    assert bool(list(unsafe_loads(ast.parse(source)))) is unsafe


#: The modules that print, and that load models; everything else goes through them.
PRINTS, LOADS = PACKAGE / "terminal.py", (PACKAGE / "forward" / "model_files.py", PACKAGE / "forward" / "pretrained.py")
_PRINTERS = {"print", "Console", "echo", "secho", "escape", "from_markup", "showwarning"}
_LOADERS = {"from_pretrained", "safe_open", "load_file", "load_model", "load_peft_weights", "load_adapter", "PeftModel"}


def calls(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and source of every call of a function or method of such a name; methods of ``re`` and of consoles aside."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        is_own = owner in ("re", "glob") or (name == "print" and owner)
        if (name in names and not is_own) or called in ("sys.stdout.write", "sys.stderr.write"):
            yield node.lineno, called


def test_no_module_prints_foreign_text_past_the_terminal() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {called}"
        for path in MODULES
        if path != PRINTS
        for line, called in calls(ast.parse(path.read_text(encoding="utf-8")), _PRINTERS)
    ]
    # A policy that every character of vLLM's page must pass, and that paceline writes whole.
    assert [line for line in found if "simulate/page.py" not in line] == []


def test_no_module_loads_a_models_files_past_the_loader() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {called}"
        for path in MODULES
        if path not in LOADS
        for line, called in calls(ast.parse(path.read_text(encoding="utf-8")), _LOADERS)
        if called != "HFEngine.from_pretrained"
    ]
    assert found == []


def test_every_load_of_a_model_names_its_attention_and_takes_safetensors_alone() -> None:
    places = [*LOADS, *(path for room in ("examples", "benchmarks") for path in (ROOT / room).rglob("*.py"))]
    bare = []
    for path in places:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not re.fullmatch(r"AutoModel\w*\.from_\w+", ast.unparse(node.func)):
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            is_load = ast.unparse(node.func).endswith(".from_pretrained")
            if "attn_implementation" not in given or (is_load and given.get("use_safetensors") != "True"):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert bare == []


@pytest.mark.parametrize(
    ("source", "names", "hit"),
    [
        ("print(x)", _PRINTERS, True),
        ("console.print(x)", _PRINTERS, False),
        ("rich.console.Console()", _PRINTERS, True),
        ("html.escape(x)", _PRINTERS, True),
        ("re.escape(x)", _PRINTERS, False),
        ("sys.stderr.write(x)", _PRINTERS, True),
        ("AutoTokenizer.from_pretrained(x)", _LOADERS, True),
        ("safetensors.torch.load_file(x)", _LOADERS, True),
    ],
)
def test_what_prints_or_loads_is_recognised(source: str, names: set[str], hit: bool) -> None:
    assert bool(list(calls(ast.parse(source), names))) is hit


def test_the_package_ships_its_types() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_floors_contract_lists_every_room_that_exists() -> None:
    assert rooms_that_exist() - {room.strip("()") for room in floor_layers()} == set()


def test_a_room_that_exists_is_not_optional_in_the_floors_contract() -> None:
    optional = {room.strip("()") for room in floor_layers() if room.startswith("(")}
    assert rooms_that_exist() & optional == set()


def test_the_changelog_has_an_unreleased_section() -> None:
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_versions_agree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = settings["project"]["version"]
    assert f'__version__ = "{version}"' in (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_once_and_exactly() -> None:
    names: dict[str, list[str]] = {}
    for file in ("constraints.txt", "constraints-vllm.txt"):
        lines = [line for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
        inexact = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
        assert inexact == []
        names[file] = [re.sub("[-_.]+", "-", line.split("==")[0]).lower() for line in lines]
        assert sorted(names[file]) == sorted(set(names[file]))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, asked = settings["project"], ["cmake", "ninja", *settings["build-system"]["requires"]]
    asked += project["dependencies"] + [need for extra in project["optional-dependencies"].values() for need in extra]
    wanted = {re.sub("[-_.]+", "-", re.match(r"[\w.-]+", need)[0]).lower() for need in asked} - {"paceline"}
    # The CPU build of vLLM has another name, and the Makefile says which version.
    assert wanted - set(names["constraints.txt"]) == {"vllm"}


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, paceline, paceline.config; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
