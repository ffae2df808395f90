"""The blocks of the documentation's pages, and the commands in them.

A comment above a block, unseen by readers, says what running it takes: ``<!-- block: needs vllm -->`` names a package
that the environment may lack, ``<!-- block: needs a GPU -->`` something else. ``<!-- block: for verl -->`` says that
another program reads the block, of which then only what is paceline's is looked at.
"""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))),
)
#: What begins a command; a line of anything else is output.
PROGRAMS = {"paceline", "python", "make", "pip", "cat", "tail", "head", "source"}
NEEDS = re.compile(r"<!-- block: (needs|for) (.+?) -->\s*$")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    title: str | None
    needs: str | None
    reader: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page. ValueError for one that does not end."""
    found, begun, body = [], None, []
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if begun is None and fence:
            before = "\n".join(lines[: number - 1])
            needs = NEEDS.search(before)
            language, _, rest = fence[3].strip().partition(" ")
            title = re.search(r'title="(.+?)"', rest)
            said = {needs[1]: needs[2]} if needs else {}
            begun, body, mark = (number, language, title and title[1], said.get("needs"), said.get("for")), [], fence[2]
        elif begun and line.strip() == mark:
            found.append(Block(page, *begun, textwrap.dedent("\n".join(body))))
            begun = None
        elif begun:
            body.append(line)
    if begun:
        raise ValueError(f"{page}:{begun[0]}: a block without an end")
    return found


def commands(block: Block) -> list[list[str]]:
    """The words of each command: lines behind ``$``, or where there is none all that begin with a program.

    Comments, environment variables and the brackets of what may be left out are taken off.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
        found = [_words(line) for line in lines]
        if strange := [words[0] for words in found if words[0] not in PROGRAMS]:
            raise ValueError(f"{block}: {strange[0]} is no program that the tests know")
        return found
    return [words for line in lines if (words := _words(line)) and words[0] in PROGRAMS]


def _words(line: str) -> list[str]:
    bare = re.sub(r"\[(-[^\]]*)\]", r"\1", line)
    try:
        words = shlex.split(bare, comments=True)
    except ValueError:  # a line of output, with one quotation mark
        return []
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    while words and words[0] in ("nice", "time", "-p"):
        words = words[1:]
    return words
