"""Every block of the documentation runs, is loaded by what reads it, or is parsed by the command that it calls."""

import ast
import importlib
import importlib.util
import json
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.exceptions import TyperException
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import load_config
from paceline.drafters import HistoryDrafter
from paceline.history.snapshot import encode_snapshot
from paceline.simulate.softcurves import load_soft
from page_blocks import PAGES, PROGRAMS, ROOT, Block, blocks, commands

FOUND = [block for page in PAGES for block in blocks(page)]
BLOCKS = [block for block in FOUND if block.reader is None]
FOREIGN = [block for block in FOUND if block.reader is not None]
PYTHON = [block for block in BLOCKS if block.language == "python"]
KINDS = ("python", "yaml", "json", "text", "")
#: Run by a test of their own, which looks at what they give.
ELSEWHERE = {
    "README.md": "test_the_example_of_the_readme_runs",
    "docs/tasks.md": "test_the_task_of_the_tasks_page_works",
}
POLICY = "examples/policies/sql-1m"
#: What makes the quickstart's commands small; the last of an option, or of a key, counts.
QUICK = {
    "train": [
        *("tasks.text_to_sql.train_prompts=4", "rl.prompts_per_step=2", "rl.group_size=2", "rl.epochs=2"),
        *("sampling.max_tokens=16", "check.every=2"),
    ],
    "profile": ["--rows", "1,4", "--drafted", "0,3", "--passes", "2"],
    "tune": ["--budgets", "4", "--held-out", "0.4"],
    "simulate": ["--prompts", "4", "--siblings", "4", "--repeats", "1", "--mean-tokens", "64"],
}
#: Page -> what stands on it, and what it becomes here: a path that readers have, a size that takes seconds.
SMALL = {
    "docs/grammars.md": {
        "path/to/model": POLICY,
        "SamplingParams(": "SamplingParams(max_tokens=12, ",
        "prompt=prompt": "prompt=[5, 6]",
    },
    "docs/lossy.md": {"GenerateEngine(model": "GenerateEngine(MODEL"},
    "docs/trl.md": {
        'output_dir="runs/trl", num_generations=8, max_completion_length=256': 'output_dir="runs/trl", max_steps=1, '
        "num_generations=2, per_device_train_batch_size=2, max_completion_length=4, use_cpu=True, bf16=False, "
        "report_to=[]"
    },
    "docs/transformers.md": {"max_new_tokens=128": "max_new_tokens=4"},
    "docs/simulate.md": {"prompts=4096": "prompts=64", "engines=256": "engines=4", "repeats=10": "repeats=2"},
}


def test_every_block_is_of_a_kind_that_is_tested_and_none_is_lost() -> None:
    assert [f"{b}: {b.language}" for b in BLOCKS if b.language not in KINDS] == []
    for page in PAGES:
        fences = re.findall(r"^ *(?:```|~~~)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len([b for b in FOUND if b.page == page]), page
    assert [str(b) for b in BLOCKS if not b.language and not commands(b)] == [], "no command: say ```text"
    hidden = re.compile(rf"^(?:\$ )?(?:{'|'.join(PROGRAMS)}) +[\w-]+[./ ]", re.MULTILINE)
    assert [str(b) for b in BLOCKS if b.language == "text" and hidden.search(b.text)] == [], "a command: say ```"
    assert [str(b) for b in BLOCKS if b.needs and b.language != "python"] == []


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON} - ELSEWHERE.keys()))
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "run.yaml").write_text(f"policy: {{path: {POLICY}}}\n", encoding="utf-8")
    (tmp_path / "history.bin").write_bytes(encode_snapshot(HistoryDrafter().snapshot()))
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {"__name__": "the_page"}
    if page in ("docs/lossy.md", "docs/trl.md", "docs/transformers.md"):
        model = AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(POLICY, padding_side="left")
        session |= {"MODEL": model, "model": model, "tokenizer": tokenizer, "QUESTIONS": ["List all genres."]}
    if page == "docs/trl.md":
        datasets = pytest.importorskip("datasets")
        session["DATASET"] = datasets.Dataset.from_dict({"prompt": ["List all genres."]})
        session["REWARD"] = lambda completions, **_: [float(len(said)) for said in completions]
    unused = set(SMALL.get(page, ()))
    for block in [block for block in PYTHON if block.page == page]:
        source = block.text
        for large in [large for large in SMALL.get(page, ()) if large in source]:
            source = source.replace(large, SMALL[page][large])
            unused.discard(large)
        code = compile("\n" * block.line + source, str(ROOT / page), "exec")
        if block.needs:
            _imports_exist(block)
        else:
            exec(code, session)
    assert not unused, f"no longer on {page}"


@pytest.mark.parametrize("block", FOREIGN, ids=str)
def test_what_others_read_calls_what_is_there(block: Block) -> None:
    {"bash": str, "yaml": yaml.safe_load, "toml": tomllib.loads, "python": ast.parse}[block.language](block.text)
    for words in [words for words in commands(block) if words[0] == "paceline"]:
        _parse(words[1:], block)
    for name in re.findall(r"\bpaceline\.integrations(?:\.\w+)+", block.text):
        _name_exists(name, block)


def test_what_is_run_elsewhere_is_run() -> None:
    tests = (ROOT / "tests/docs/test_pages.py").read_text(encoding="utf-8")
    for page, test in ELSEWHERE.items():
        assert f"def {test}(" in tests
        assert len([block for block in PYTHON if block.page == page]) == 1, page


def _imports_exist(block: Block) -> None:
    """Of a block that cannot run here: its imports, but for those of the package that it needs."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            package = module.partition(".")[0]
            if importlib.util.find_spec(package) is None:
                assert package == block.needs, f"{block}: {package} is not here; say what the block needs"
                continue
            found = importlib.import_module(module)
            names = [name.name for name in node.names] if isinstance(node, ast.ImportFrom) else []
            assert [name for name in names if not hasattr(found, name)] == [], str(block)
        if isinstance(node, ast.Constant) and re.fullmatch(r"paceline(\.\w+)+", str(node.value)):
            _name_exists(str(node.value), block)


def _name_exists(dotted: str, block: Block) -> None:
    module, _, name = dotted.rpartition(".")
    folder = ROOT / "src" / module.replace(".", "/")
    if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
        return
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert re.search(rf"\b{name}\b", source.read_text(encoding="utf-8")), f"{block}: {dotted}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_yaml_blocks_are_runs(block: Block, tmp_path: Path) -> None:
    tree = yaml.safe_load(block.text)
    if "apiVersion" in tree:
        (called,) = re.findall(r"paceline [^']+", tree["spec"]["entrypoint"])
        _parse(called.replace("$again", "--resume").split(), block)
        return
    path = tmp_path / "run.yaml"
    path.write_text(block.text, encoding="utf-8")
    load_config(path)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_json_blocks_are_read(block: Block, tmp_path: Path) -> None:
    if (block.title or "").endswith(".jsonl"):
        assert all(json.loads(line) for line in block.text.splitlines())
        return
    curve = tmp_path / "curve.json"
    curve.write_text(block.text, encoding="utf-8")
    assert load_soft(str(curve)).section.kind == json.loads(block.text)["kind"]


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = blocks("docs/index.md")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in page:
        if block.title:
            (tmp_path / block.title).write_text(block.text + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    called, said = Counter[str](), ""
    for words in [words for block in page if not block.language for words in commands(block)]:
        if words[0] == "paceline":
            done = CliRunner().invoke(app, [*words[1:], *QUICK.get(words[1], [])])
            said = done.output
            assert done.exit_code == 0, (words, said)
            called[words[1]] += 1
    assert called.keys() == {"train", "replay", "profile", "tune", "simulate", "diff"}
    assert said.startswith("identical"), "the page's last command compares a run with drafts and one without"
    for left in ("runs/mine/report.html", "runs/tuned/policy", "page.html"):
        assert (tmp_path / left).exists(), left
    assert load_config(tmp_path / "tuned.yaml").drafter.kind in ("history", "prompt_lookup", "none")


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.language], ids=str)
def test_commands_are_understood(block: Block) -> None:
    for words in commands(block):
        _parse(words, block)


def _parse(words: list[str], block: Block) -> None:
    program, *arguments = words
    where = f"{block}: {' '.join(words)}"
    shipped = [
        a
        for a in arguments
        if re.match(r"(examples|benchmarks|docs)/", a) and not a.startswith("benchmarks/traces/TRACE")
    ]
    assert [a for a in shipped if not (ROOT / a).exists()] == [], where
    if program == "paceline":
        _paceline(arguments, where)
    elif program == "make":
        assert [a for a in arguments if "=" not in a and a not in _targets()] == [], where
    elif program == "pip":
        extras = [e for a in arguments for e in re.findall(r"paceline\[(\w+)\]", a)]
        assert arguments[0] == "install", where
        assert extras, where
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(extras) <= project["optional-dependencies"].keys(), where
    elif program == "python" and arguments[0] != "-c":
        _script(arguments, block, where)


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def _script(arguments: list[str], block: Block, where: str) -> None:
    """A benchmark's options stand in its source or in that of what it shares; a page's own script needs none."""
    path = ROOT / arguments[0]
    if "/" not in arguments[0]:
        assert any(b.language == "python" for b in BLOCKS if b.page == block.page), where
        return
    folders = {path.parent, ROOT / "benchmarks", ROOT / "src/paceline/cli"}
    sources = "".join(other.read_text(encoding="utf-8") for folder in folders for other in folder.glob("*.py"))
    assert [a for a in arguments if a.startswith("--") and f'"{a}"' not in sources] == [], where
    _settings(None, [a for a in arguments[1:] if re.fullmatch(r"[a-z_.]+=.*", a)])


def _paceline(arguments: list[str], where: str) -> None:
    command = typer.main.get_command(app)
    arguments = ["1" if a == "N" else a for a in arguments]
    while hasattr(command, "commands"):
        assert arguments[0] in command.commands, where
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        given = command.make_context(command.name, list(arguments), resilient_parsing=False).params
    except TyperException as error:
        pytest.fail(f"{where}: {error.format_message()}")
    overrides = given.get("overrides")
    if overrides:
        path = given.get("config")
        kind = ["engine.kind=vllm"] if given.get("engine") == "vllm" else []
        _settings(path if path and (ROOT / path).exists() else None, [*overrides, *kind])


def _settings(path: Path | str | None, overrides: list[str]) -> None:
    load_config(ROOT / path if path else None, [o for o in overrides if not o.startswith("tasks.") or path])
