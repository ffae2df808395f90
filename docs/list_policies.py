"""Writes the table of policies.md from the families that transformers knows: ``python docs/list_policies.py``."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
PAGE = HERE / "policies.md"
BEGIN, END = "<!-- families: written by docs/list_policies.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """One row an outcome and reason, with the families that share it."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from families import FAMILIES, outcome

    found: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        found.setdefault(outcome(family), []).append(family)
    order = ("runs", "refused", "not tried")
    lines = ["| outcome | why | families |", "|---|---|---|"]
    for kind, why in sorted(found, key=lambda key: (order.index(key[0]), -len(found[key]), key[1])):
        names = ", ".join(f"`{name}`" for name in found[kind, why])
        lines.append(f"| {kind} | {why.replace('|', '/')} | {names} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """``text`` with the table of today between its marks. ValueError where it has none."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGE.name}: the marks of the table are missing")
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
