"""Draws the pictures of concepts.md, each for light and for dark pages: ``python docs/draw_concepts.py``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FIGURES = Path(__file__).parent / "figures"
WIDTH = 480
#: Colours by what they stand for: text, what is told beside, lines, what is kept, what is not, the policy's own work.
THEMES = {
    "light": {
        "ink": "#1f2328",
        "soft": "#59636e",
        "line": "#8c959f",
        "kept": "#1a7f37",
        "lost": "#b35900",
        "own": "#0550ae",
    },
    "dark": {
        "ink": "#e6edf3",
        "soft": "#a3adb8",
        "line": "#7d8590",
        "kept": "#4ac26b",
        "lost": "#e0823d",
        "own": "#6cb6ff",
    },
}


class Picture:
    """Shapes in the colours of a theme; y grows downwards, sizes are pixels."""

    def __init__(self, theme: str, height: int, title: str) -> None:
        self._colours, self._height, self._title, self._shapes = THEMES[theme], height, title, []

    def text(self, x: float, y: float, said: str, colour: str = "ink", anchor: str = "start", size: int = 14) -> None:
        """Words whose base line begins, or with another ``anchor`` has its middle, at the place."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="{self._colours[colour]}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(said)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, said: str = "", full: bool = True
    ) -> None:
        """A box with words in its middle; one that is not ``full`` has a broken edge only."""
        fill, dash = (self._colours[colour], "") if full else ("none", ' stroke-dasharray="4 3"')
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" '
            f'fill-opacity="0.18" stroke="{self._colours[colour]}"{dash}/>'
        )
        self.text(x + width / 2, y + height / 2 + 5, said, anchor="middle")

    def line(self, points: Sequence[tuple[float, float]], colour: str = "line", arrow: bool = False) -> None:
        """An ``arrow`` points to the right or, where the last two points share their x, down or up."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{self._colours[colour]}" stroke-width="1.6"/>'
        )
        if arrow:
            (before, above), (x, y) = points[-2:]
            back = 6 if y > above else -6
            if before == x:
                wings = f"{x - 4:g},{y - back:g} {x + 4:g},{y - back:g}"
            else:
                wings = f"{x - 6:g},{y - 4:g} {x - 6:g},{y + 4:g}"
            self._shapes.append(f'<polygon points="{x:g},{y:g} {wings}" fill="{self._colours[colour]}"/>')

    def svg(self) -> str:
        """The picture as a file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" font-family="system-ui, sans-serif" role="img">'
            f"<title>{escape(self._title)}</title>"
        )
        return "\n".join([head, *self._shapes, "</svg>", ""])


def tree(theme: str) -> Picture:
    """A draft of six nodes, of which the policy's own samples keep two."""
    picture = Picture(theme, 286, "A drafted tree and the policy's own samples")
    picture.text(10, 20, "draft: a tree, one pass over all its nodes", "soft")
    picture.box(10, 78, 96, 30, "own", "… COUNT")
    nodes = {
        "(*)": (140, 50, "kept"),
        "(Id)": (140, 130, "lost"),
        "FROM": (226, 50, "kept"),
        "Album": (320, 34, "lost"),
        "Artist": (320, 76, "lost"),
        "FROM ": (226, 130, "lost"),
    }
    edges = (("(*)", "FROM"), ("FROM", "Album"), ("FROM", "Artist"), ("(Id)", "FROM "))
    for name in ("(*)", "(Id)"):
        picture.line([(106, 93), (140, nodes[name][1] + 15)], "kept" if name == "(*)" else "line")
    for parent, child in edges:
        (x, y, _), (to, at, colour) = nodes[parent], nodes[child]
        picture.line([(x + 64, y + 15), (to, at + 15)], "kept" if colour == "kept" else "line")
    for name, (x, y, colour) in nodes.items():
        picture.box(x, y, 64, 30, colour, name, full=colour == "kept")
    picture.text(10, 196, "the policy's own sample, with the noise of its position", "soft")
    steps = (("after COUNT", "(*)", "is drafted: kept"), ("after (*)", "FROM", "is drafted: kept"))
    for row, (where, said, what) in enumerate((*steps, ("after FROM", "Track", "is not: emitted, end of the pass"))):
        y = 220 + 26 * row
        colour = "kept" if row < 2 else "own"
        picture.text(10, y, where)
        picture.text(120, y, said, colour)
        picture.text(190, y, what, colour)
    return picture


def tiers(theme: str) -> Picture:
    """Where the end of a request's text occurs, and who votes."""
    picture = Picture(theme, 232, "Four tiers of evidence vote for the next token")
    places = (
        "the request's own text",
        "siblings, still being written",
        "the same prompt, earlier epochs",
        "other prompts",
    )
    for row, place in enumerate(places):
        y = 10 + 44 * row
        picture.box(10, y, 236, 32, "kept" if row < 3 else "line", place)
        picture.line([(246, y + 16), (300, 92)])
    picture.box(300, 76, 62, 32, "own", "votes")
    picture.line([(362, 92), (390, 92)], arrow=True)
    picture.box(390, 76, 80, 32, "own", "chances")
    picture.line([(430, 108), (430, 146)], arrow=True)
    picture.box(390, 146, 80, 32, "own", "tree")
    picture.text(10, 206, "A vote weighs by tier, length of the match, age and", "soft")
    picture.text(10, 224, "place; the weights follow what is really said.", "soft")
    return picture


def budget(theme: str) -> Picture:
    """Nodes of a batch by their chance, and the tokens a second that the most probable n of them give."""
    picture = Picture(theme, 262, "How many drafted nodes are verified")
    rows, chances = 8, [0.95 * 0.9**n for n in range(26)]
    rates = [(rows + sum(chances[:n])) / (20 + 0.5 * (rows + n)) for n in range(27)]
    best = rates.index(max(rates))
    for n, chance in enumerate(chances):
        colour = "kept" if n < best else "lost"
        picture.box(34 + 16.5 * n, 180 - 88 * chance, 12, 88 * chance, colour, full=n < best)
    low, high = min(rates), max(rates)
    curve = [(32 + 16.5 * n, 78 - 50 * (rate - low) / (high - low)) for n, rate in enumerate(rates)]
    picture.line(curve, "own")
    x, y = curve[best]
    picture.line([(x, y), (x, 184)], "ink")
    picture.text(x, 18, "most tokens a second", "own", "middle")
    picture.text((34 + x) / 2, 204, f"verified: {best}", "kept", "middle")
    picture.text((x + WIDTH - 14) / 2, 204, f"dropped: {26 - best}", "lost", "middle")
    picture.text(10, 234, "Bars: nodes of the whole batch, the most probable first.", "soft")
    picture.text(10, 252, "Line: tokens a second of the n first. Made-up numbers.", "soft")
    return picture


def step(theme: str) -> Picture:
    """One step, without drafts and with them: the same tokens, a shorter generation."""
    picture = Picture(theme, 178, "A GRPO step without drafts and with them")
    for row, (said, generation) in enumerate((("without drafts", 300), ("with drafts", 120))):
        y = 28 + 66 * row
        picture.text(10, y - 8, said)
        picture.box(10, y, generation, 32, "kept", "generate")
        picture.box(10 + generation, y, 110, 32, "own", "train")
        picture.box(120 + generation, y, 48, 32, "line", "refit")
    picture.text(10, 150, "The same tokens, rewards and update. Generation is 65 % of this", "soft")
    picture.text(10, 168, "plain step, so no draft can make it more than 2.9 times as fast.", "soft")
    return picture


def schedule(theme: str) -> Picture:
    """Two schedules of four steps: in turn, and rollouts one step ahead."""
    picture = Picture(theme, 268, "Synchronous and asynchronous schedules")
    picture.text(10, 18, "in turn: rl.max_age_steps 0")
    lanes = {"rollouts": ("kept", 28), "learner": ("own", 62)}
    for lane, (colour, y) in lanes.items():
        picture.text(10, y + 20, lane, "soft")
        for n in range(3):
            picture.box(
                84 + 128 * n + (80 if lane == "learner" else 0), y, 80 if lane == "rollouts" else 48, 28, colour, str(n)
            )
    picture.text(10, 128, "one step ahead: rl.max_age_steps 1")
    for n in range(4):
        picture.box(84 + 84 * n, 138, 80, 28, "kept", str(n))
    for n in range(3):
        picture.box(168 + 84 * n, 172, 48, 28, "own", str(n))
    picture.text(10, 158, "rollouts", "soft")
    picture.text(10, 192, "learner", "soft")
    for n in range(2):
        picture.line([(216 + 84 * n, 186), (250 + 84 * n, 186), (250 + 84 * n, 168)], arrow=True)
    picture.text(10, 232, "Numbers are steps. Ahead, step 2 is sampled by the weights that", "soft", size=13)
    picture.text(10, 250, "step 0 made: one version older than those that learn from it.", "soft", size=13)
    return picture


PICTURES: dict[str, Callable[[str], Picture]] = {
    "tree": tree,
    "tiers": tiers,
    "budget": budget,
    "step": step,
    "schedule": schedule,
}


def drawn() -> dict[str, str]:
    """File name -> SVG, of every picture in both themes."""
    return {f"concept_{n}_{theme}.svg": draw(theme).svg() for n, draw in PICTURES.items() for theme in THEMES}


if __name__ == "__main__":
    for name, svg in drawn().items():
        (FIGURES / name).write_text(svg, encoding="utf-8")
