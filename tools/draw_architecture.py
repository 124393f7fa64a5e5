"""Draw docs/images/architecture.svg: who may import whom, from the table that tests/test_house.py enforces.

A box is a room: a package, or modules that count as one. It is drawn above all rooms that it may import. An arrow is
left out if it follows from others.
"""

import runpy
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/architecture.svg"

WIDTH, MARGIN, GAP = 1000, 16, 14  # pixels
FLOOR_GAP = 34  # between floors, where the arrows are
TITLE_HEIGHT = 20
LINE_HEIGHT = 16
PADDING = 12
CHARACTER_WIDTH = 6.3  # of the modules' names
COLORS = ("#eceff1", "#e3f2fd", "#e8f5e9", "#fff8e1", "#fbe9e7", "#f3e5f5")  # of the floors, from the lowest


@dataclass
class Box:
    """A room on the picture, in pixels."""

    x: float
    width: float
    y: float = 0.0
    height: float = 0.0

    @property
    def center(self) -> float:
        return self.x + self.width / 2


def floors(may_import: Mapping[str, set[str]]) -> dict[str, int]:
    """Each room's floor: 0 for a room that imports nothing, else one above the highest room that it may import."""
    known: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((floor(below) for below in may_import[room]), default=-1)
        return known[room]

    for room in may_import:
        floor(room)
    return known


def direct(may_import: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The rooms that each room may import, without those that follow from another of them (transitive reduction)."""
    kept = {}
    for room, below in may_import.items():
        implied = {deeper for other in below for deeper in may_import[other]}
        kept[room] = [other for other in may_import if other in below - implied]
    return kept


def place(may_import: Mapping[str, set[str]]) -> dict[str, Box]:
    """Place the rooms horizontally; returns their boxes, whose heights are not set yet.

    Floors 0 and 1 take the whole width. Each room of floor 2 has a column. A higher room is as wide as the rooms that
    it uses.
    """
    floor = floors(may_import)
    below = direct(may_import)
    columns = [room for room in may_import if floor[room] == 2]
    width = (WIDTH - 2 * MARGIN + GAP) / len(columns) - GAP
    boxes = {room: Box(MARGIN + i * (width + GAP), width) for i, room in enumerate(columns)}
    for room in sorted(may_import, key=lambda room: floor[room]):
        if floor[room] < 2:
            boxes[room] = Box(MARGIN, WIDTH - 2 * MARGIN)
        elif floor[room] > 2:
            used = [boxes[other] for other in below[room]]
            left = min(box.x for box in used)
            right = max(box.x + box.width for box in used)
            boxes[room] = Box(left, right - left)
    return boxes


def draw(may_import: Mapping[str, set[str]], modules: Mapping[str, Sequence[str]]) -> str:
    """The picture as SVG. `modules` are the names of the modules of each room."""
    floor = floors(may_import)
    boxes = place(may_import)
    lines = {room: _wrapped(modules[room], boxes[room].width) for room in may_import}
    y = float(MARGIN)
    for level in range(max(floor.values()), -1, -1):
        rooms = [room for room in may_import if floor[room] == level]
        height = TITLE_HEIGHT + LINE_HEIGHT * max(len(lines[room]) for room in rooms) + 2 * PADDING
        for room in rooms:
            boxes[room].y = y
            boxes[room].height = height
        y += height + FLOOR_GAP
    parts = [_head(y - FLOOR_GAP + MARGIN)]
    for room, others in direct(may_import).items():
        parts += [_arrow(boxes[room], boxes[other]) for other in others]
    parts += [_box(room, boxes[room], lines[room], COLORS[floor[room] % len(COLORS)]) for room in may_import]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _wrapped(names: Sequence[str], width: float) -> list[str]:
    return textwrap.wrap(", ".join(names), int((width - 2 * PADDING) / CHARACTER_WIDTH), break_long_words=False)


def _head(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="Helvetica, Arial, '
        'sans-serif" role="img" aria-label="Who may import whom">\n'
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#607d8b"/></marker></defs>'
    )


def _arrow(above: Box, below: Box) -> str:
    """An arrow straight down."""
    # From the middle of the narrower box, because the other box also covers that point.
    x = above.center if above.width < below.width else below.center
    start = above.y + above.height
    end = below.y
    return (
        f'<path d="M{x:g},{start:g} V{end:g}" stroke="#607d8b" stroke-width="1.5" fill="none" marker-end="url(#tip)"/>'
    )


def _box(room: str, box: Box, lines: Sequence[str], color: str) -> str:
    title = "programs" if room == "main" else room.removeprefix("megapar.")
    title_y = box.y + PADDING + 13
    texts = [f'<text x="{box.center:g}" y="{title_y:g}" font-size="14" font-weight="bold">{escape(title)}</text>']
    for number, line in enumerate(lines, 1):
        y = title_y + 4 + number * LINE_HEIGHT
        texts.append(f'<text x="{box.center:g}" y="{y:g}" font-size="12" fill="#37474f">{escape(line)}</text>')
    frame = (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="6" '
        f'fill="{color}" stroke="#90a4ae"/>'
    )
    return "\n".join([frame, '<g text-anchor="middle" fill="#1c2a33">', *texts, "</g>"])


def picture() -> str:
    """The picture of the repository as it is now. It needs the dev extra, because it runs a test's file."""
    sys.path.insert(0, str(ROOT))  # the test's file imports tests.support
    house = runpy.run_path(str(ROOT / "tests/test_house.py"))
    modules: dict[str, list[str]] = {room: [] for room in house["MAY_IMPORT"]}
    for path in house["LIBRARY"]:
        if path.stem != "__init__":
            module = house["module_name"](path)
            room = house["room"](module)
            # A folder within a room shows in the name: gpt.model. The foundation's modules have no folder in common.
            name = module.removeprefix(f"{room}.") if module.startswith(f"{room}.") else path.stem
            modules[room].append(name)
    modules["main"] = ["pretrain_scripts", "tools"]
    return draw(house["MAY_IMPORT"], modules)


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    print(PICTURE)
