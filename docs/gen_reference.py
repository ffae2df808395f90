"""Fills the reference pages from the code when the site is built, so that they cannot fall behind it.

A page asks for a table with an HTML comment: ``<!-- reference: configuration -->``.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from paceline.audit.certificate import read_certificate
from paceline.audit.vllm_matrix import summary, support_table
from paceline.config import Config
from paceline.engines.vllm.workarounds import FAULTS
from paceline.report.definitions import EVENTS, METRICS
from paceline.report.elsewhere import ELSEWHERE

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
MARKER = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)
FAULT = re.compile(r"field ([A-K]\d+(?:, [A-K]\d+)*)")
WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "any"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The hook of mkdocs: replaces each marker by its table; an unknown marker stops the build."""
    return MARKER.sub(lambda marker: REFERENCES[marker[1]](), markdown)


def configuration() -> str:
    """One table a section: key, meaning, type, default. ValueError where ``keys.yml`` and the code disagree."""
    meanings = yaml.safe_load((HERE / "keys.yml").read_text(encoding="utf-8"))
    tables = "\n".join(_section(Config, "", "Top level", meanings))
    if meanings:
        raise ValueError(f"docs/keys.yml: no key {next(iter(meanings))} in the configuration; remove it")
    return tables


def _section(kind: type[msgspec.Struct], prefix: str, title: str, meanings: dict[str, str]) -> Iterator[str]:
    below = []
    yield f"### {title}\n\n{_prose(kind)}\n"
    yield "| key | meaning | type | default |\n|---|---|---|---|"
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        dotted, hint = f"{prefix}{field.name}", hints[field.name]
        struct, name = _struct_in(hint), f"{prefix}{field.name}"
        if struct is not None:
            name += ".*" if typing.get_origin(hint) is dict else ""
            below.append((struct, f"{name}.", name))
            meaning, kind_shown = f"See [{name}](#{re.sub('[^a-z_]', '', name)}).", "section"
        elif dotted in meanings:
            meaning, kind_shown = meanings.pop(dotted), _words(hint)
        else:
            raise ValueError(f"docs/keys.yml: says nothing about {dotted}; add a line")
        yield f"| `{dotted}` | {meaning} | {kind_shown} | {_default(field, struct)} |"
    yield ""
    for struct, start, name in below:
        yield from _section(struct, start, name, meanings)


def _prose(kind: type[msgspec.Struct]) -> str:
    return re.sub("``(.+?)``", r"`\1`", inspect.getdoc(kind) or "")


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """The struct that a hint holds, also behind ``| None`` or as the values of a dict."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for arm in typing.get_args(hint) if (found := _struct_in(arm))), None)


def _words(hint: Any) -> str:
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(f"`{arm}`" for arm in arms)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(arm) for arm in arms)
    if origin is tuple:
        return f"list of ({_words(arms[0])})" if typing.get_args(arms[0]) else f"list of {_words(arms[0])}"
    if origin is dict:
        return f"mapping of {_words(arms[0])} to {_words(arms[1])}"
    return WORDS[hint]


def _default(field: msgspec.structs.FieldInfo, struct: type[msgspec.Struct] | None) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if struct is not None:
        return ", ".join(f"`{name}`" for name in value) if isinstance(value, dict) else "null" if value is None else ""
    if field.required:
        return "must be given"
    if isinstance(value, float):
        return f"`{value:g}`"
    shown = yaml.safe_dump(msgspec.to_builtins(value), default_flow_style=True, width=1000)
    return f"`{shown.removesuffix('...' + chr(10)).strip()}`"


def metrics() -> str:
    """The fields of a line of ``metrics.jsonl``."""
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.definition} |" for metric in METRICS]
    return "\n".join(["| name | unit | definition |", "|---|---|---|", *rows])


def events() -> str:
    """The events of runs with workers."""
    return "\n".join(
        ["| event | what it stands for |", "|---|---|", *(f"| `{n}` | {what} |" for n, what in EVENTS.items())]
    )


def elsewhere() -> str:
    """What other tools call the metrics."""
    rows = [f"| `{a.metric}` | {a.tool} | `{a.name}` | {a.differs} |" for a in ELSEWHERE]
    return "\n".join(["| here | tool | there | what differs |", "|---|---|---|---|", *rows])


def faults() -> str:
    """Faults with the tests that name them. ValueError for one that ``faults.yml`` does not describe."""
    known = yaml.safe_load((HERE / "faults.yml").read_text(encoding="utf-8"))
    tested = fault_tests()
    if unknown := tested.keys() - known.keys():
        raise ValueError(f"docs/faults.yml: no row {', '.join(sorted(unknown))}, which a test names; add it")
    rows = []
    for fault in [fault for fault in known if fault in tested]:
        cells = [known[fault][column] for column in ("symptom", "cause", "says", "seen")]
        names = "<br>".join(f"<code>{test}</code>" for test in tested[fault])
        folded = f"<details><summary>{len(tested[fault])}</summary>{names}</details>"
        rows.append(f"| {' | '.join([fault, *cells, folded])} |")
    head = ["| id | symptom | cause | what paceline says | seen in | tests |", "|---" * 6 + "|"]
    return "\n".join([*head, *rows])


def fault_tests() -> dict[str, list[str]]:
    """Fault id -> the test functions whose source, or the line above it, names it."""
    tested: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        for number, line in enumerate(source.splitlines(), 1):
            for fault in ", ".join(FAULT.findall(line)).split(", ") if FAULT.search(line) else ():
                name = next(function.name for function in functions if number <= (function.end_lineno or 0))
                if name not in tested.setdefault(fault, []):
                    tested[fault].append(name)
    return tested


def vllm_support() -> str:
    """What the audits of vLLM found, from their certificates."""
    headings = {"drafting": "with drafts", "plain": "without", "unmended": "with drafts, vLLM as it is"}
    found = {
        heading: read_certificate((HERE / "vllm-support" / f"{name}.json").read_bytes())
        for name, heading in headings.items()
    }
    sizes = "\n".join(f"- {heading}: {summary(certificate)}" for heading, certificate in found.items())
    return f"{support_table(found)}\n\n{sizes}"


def vllm_faults() -> str:
    """The faults of vLLM that are known here, and what is done about them."""
    lines = ["| fault | what goes wrong | where | seen in | bends the law | answer |", "|---" * 6 + "|"]
    lines += [
        f"| `{fault.name}` {fault.number} | {fault.what} | {fault.where} | {', '.join(fault.seen)} "
        f"| {'yes' if fault.lossy else 'no'} | {fault.answer} |"
        for fault in FAULTS
    ]
    return "\n".join(lines)


REFERENCES = {
    "configuration": configuration,
    "metrics": metrics,
    "events": events,
    "elsewhere": elsewhere,
    "faults": faults,
    "vllm_support": vllm_support,
    "vllm_faults": vllm_faults,
}
