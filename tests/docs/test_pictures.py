"""The pictures of the concepts are those that their script draws, and are shown for light and for dark pages."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pictures_are_drawn_by_the_script_and_shown_in_both_themes() -> None:
    spec = importlib.util.spec_from_file_location("draw_concepts", DOCS / "draw_concepts.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.drawn()
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert {path.name for path in (DOCS / "figures").glob("concept_*")} == drawn.keys()
    for name, svg in drawn.items():
        assert (DOCS / "figures" / name).read_text(encoding="utf-8") == svg, "run docs/draw_concepts.py"
        assert f"(figures/{name}#only-{'light' if 'light' in name else 'dark'})" in page
        _inside(ElementTree.fromstring(svg))


def _inside(svg: ElementTree.Element) -> None:
    """Nothing stands outside the picture."""
    width, height = (float(svg.attrib[side]) for side in ("width", "height"))
    for shape in svg:
        at = shape.attrib
        if "x" in at:
            right, bottom = (float(at[a]) + float(at.get(b, 0)) for a, b in (("x", "width"), ("y", "height")))
            assert right <= width
            assert bottom <= height
