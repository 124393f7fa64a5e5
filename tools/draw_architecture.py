"""Draw docs/images/architecture.svg: who may import whom, from the table enforced by tests/test_house.py.

A box is a room: a package, or modules counted as one. It is drawn above all rooms it may import. An arrow is left out
if it follows from others. All places are computed, so the picture stays whole when rooms and modules are added: no box
covers another, and no arrow crosses a box. An arrow to a deeper floor passes the floors between in a lane beside their
boxes.
"""

import random
import runpy
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations, pairwise, permutations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/architecture.svg"

MINIMUM_WIDTH, MARGIN, GAP = 900, 10, 10  # pixels, as all lengths here
FLOOR_GAP = 56  # between floors, where the arrows bend
LANE = 10
PORT_GAP = 16  # between the ends of two arrows at one box
TITLE_HEIGHT = 20
LINE_HEIGHT = 16
PADDING = 9
CHARACTER_WIDTH = 7.2  # of the modules' names, in the widest font that a browser may take
TITLE_CHARACTER_WIDTH = 9
LINES = 12  # a room with longer text is wider
SPARE = 0.5  # by how much a room may be wider than it needs
STARTS = 8  # orders to begin with
COLORS = ("#eceff1", "#e3f2fd", "#e8f5e9", "#fff8e1", "#fbe9e7", "#f3e5f5")  # of the floors, from the lowest


@dataclass(frozen=True)
class Item:
    """What stands on a floor: a room, or the lane past it of all arrows to a room of a lower floor."""

    floor: int
    room: str
    lane: bool = False


@dataclass
class Box:
    """The place of an item. A lane is an invisible box."""

    x: float
    width: float
    y: float = 0.0
    height: float = 0.0

    @property
    def center(self) -> float:
        return self.x + self.width / 2


Link = tuple[Item, Item]  # from an item to one on the next floor below
Order = dict[int, list[Item]]  # the items of each floor, from the left


def floors(may_import: Mapping[str, set[str]]) -> dict[str, int]:
    """Each room's floor: 0 for a room without imports, else one above its highest permitted import."""
    known: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((floor(below) for below in may_import[room]), default=-1)
        return known[room]

    return {room: floor(room) for room in may_import}


def direct(may_import: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The permitted imports of each room, without those implied by another of them (transitive reduction)."""
    kept = {}
    for room, below in may_import.items():
        implied = {deeper for other in below for deeper in may_import[other]}
        kept[room] = [other for other in may_import if other in below - implied]
    return kept


def links(may_import: Mapping[str, set[str]]) -> list[Link]:
    """The arrows, cut into links from floor to floor. Arrows to one room share its lanes."""
    floor = floors(may_import)
    found: dict[Link, None] = {}  # a set that keeps its order
    for room, others in direct(may_import).items():
        for other in others:
            path = [Item(floor[room], room)]
            path += [Item(level, other, lane=True) for level in range(floor[room] - 1, floor[other], -1)]
            path.append(Item(floor[other], other))
            found |= dict.fromkeys(pairwise(path))
    return list(found)


# Where things stand


def spread(wanted: Sequence[float], widths: Sequence[float], gap: float, left: float, right: float) -> list[float]:
    """Centers for things of these widths: in order, `gap` apart, from `left` to `right`, and else as `wanted`.

    The sum of the squared distances from the `wanted` centers is the least possible (isotonic regression).
    """
    packed = []  # the centers if all stood at 0 without room between them
    end = 0.0
    for width in widths:
        packed.append(end + width / 2)
        end += width + gap
    groups: list[list[float]] = []  # neighbors that touch; numbers are how far each would be moved from `packed`
    for center, lay_out in zip(wanted, packed, strict=True):
        groups.append([center - lay_out])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    moved = [_mean(group) for group in groups for _ in group]
    room_right = right - (end - gap)
    return [lay_out + min(max(by, left), room_right) for lay_out, by in zip(packed, moved, strict=True)]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def widths_of(texts: Mapping[str, str]) -> dict[str, float]:
    """The width of each room: its title fits, its longest word fits, and its text has about `LINES` lines."""
    widths = {}
    for room, text in texts.items():
        longest = max((len(word) for word in text.split()), default=0)
        characters = max(longest, len(text) / LINES)
        inner = max(characters * CHARACTER_WIDTH, len(title(room)) * TITLE_CHARACTER_WIDTH)
        widths[room] = inner + 2 * PADDING
    return widths


def lay_out(order: Order, connected: Iterable[Link], widths: Mapping[str, float]) -> dict[Item, Box]:
    """Place all items horizontally: each as near as it can be to the middle of its links below.

    The rooms of the widest floor fill the picture. Those of other floors are wider than they need, if there is room.
    """
    below: dict[Item, list[Item]] = {}
    for upper, lower in connected:
        below.setdefault(upper, []).append(lower)
    needed = {level: [LANE if item.lane else widths[item.room] for item in items] for level, items in order.items()}
    right = max(MINIMUM_WIDTH - MARGIN, *(MARGIN + sum(of) + GAP * (len(of) - 1) for of in needed.values()))
    boxes: dict[Item, Box] = {}
    for level in sorted(order):
        items = order[level]
        rooms = sum(widths[item.room] for item in items if not item.lane)
        wider = (right - MARGIN - sum(needed[level]) - GAP * (len(items) - 1)) / rooms
        if len(items) > 1:
            wider = min(wider, SPARE)
        width_of_items = [LANE if item.lane else widths[item.room] * (1 + wider) for item in items]
        middle = (MARGIN + right) / 2
        wanted = [_mean([boxes[other].center for other in below[item]]) if item in below else middle for item in items]
        centers = spread(wanted, width_of_items, GAP, MARGIN, right)
        for item, center, width in zip(items, centers, width_of_items, strict=True):
            boxes[item] = Box(center - width / 2, width)
    return boxes


def disorder(boxes: Mapping[Item, Box], connected: Sequence[Link]) -> tuple[int, float]:
    """How many pairs of arrows cross, and how far all arrows go to the side."""
    of_floors: dict[int, list[tuple[float, float]]] = {}
    for upper, lower in connected:
        of_floors.setdefault(upper.floor, []).append((boxes[upper].center, boxes[lower].center))
    crossings = sum(
        (start - other_start) * (end - other_end) < 0
        for ends in of_floors.values()
        for (start, end), (other_start, other_end) in combinations(ends, 2)
    )
    return crossings, sum(abs(start - end) for ends in of_floors.values() for start, end in ends)


def best_order(may_import: Mapping[str, set[str]], widths: Mapping[str, float]) -> Order:
    """The tidiest order of the items of each floor found from some random orders, always the same ones."""
    connected = links(may_import)
    rooms = [Item(floor, room) for room, floor in floors(may_import).items()]
    items = dict.fromkeys([*rooms, *(item for link in connected for item in link)])
    dice = random.Random(0)
    found: list[tuple[tuple[int, float], Order]] = []
    for _ in range(STARTS):
        order: Order = {}
        for item in dice.sample(list(items), len(items)):
            order.setdefault(item.floor, []).append(item)
        found.append(_improved(order, connected, widths))
    return min(found, key=lambda pair: pair[0])[1]


def _improved(order: Order, connected: Sequence[Link], widths: Mapping[str, float]) -> tuple[tuple[int, float], Order]:
    """The order after moves of one item at a time, as long as one makes it tidier; returns its `disorder` too."""
    least = disorder(lay_out(order, connected, widths), connected)
    moves = [(level, *pair) for level, items in order.items() for pair in permutations(range(len(items)), 2)]
    improved = True
    while improved:
        improved = False
        for level, start, end in moves:
            items = list(order[level])
            items.insert(end, items.pop(start))
            moved = {**order, level: items}
            cost = disorder(lay_out(moved, connected, widths), connected)
            if cost < least:
                order, least, improved = moved, cost, True
    return least, order


def ports(boxes: Mapping[Item, Box], connected: Sequence[Link]) -> dict[Link, tuple[float, float]]:
    """The places of each link on the edges of the upper and lower box. It goes straight down if it can."""
    ends: dict[Link, float] = {}
    for lower, box in boxes.items():
        arriving = sorted((link for link in connected if link[1] == lower), key=lambda link: boxes[link[0]].center)
        ends |= _ports(box, arriving, [boxes[upper].center for upper, _ in arriving], lower)
    starts: dict[Link, float] = {}
    for upper, box in boxes.items():
        leaving = sorted((link for link in connected if link[0] == upper), key=lambda link: ends[link])
        starts |= _ports(box, leaving, [ends[link] for link in leaving], upper)
    return {link: (starts[link], ends[link]) for link in connected}


def _ports(box: Box, links_of_box: Sequence[Link], wanted: Sequence[float], item: Item) -> dict[Link, float]:
    if item.lane:
        return dict.fromkeys(links_of_box, box.center)
    left, right = box.x + PADDING, box.x + box.width - PADDING
    inside = [min(max(x, left), right) for x in wanted]
    return dict(zip(links_of_box, spread(inside, [0.0] * len(inside), PORT_GAP, left, right), strict=True))


# The picture


def draw(may_import: Mapping[str, set[str]], modules: Mapping[str, Sequence[str]]) -> str:
    """The picture as SVG. `modules` are the names of the modules of each room."""
    texts = {room: ", ".join(names) for room, names in modules.items()}
    widths = widths_of(texts)
    order = best_order(may_import, widths)
    connected = links(may_import)
    boxes = lay_out(order, connected, widths)
    lines = {item: _wrapped(texts[item.room], box.width) for item, box in boxes.items() if not item.lane}
    y = float(MARGIN)
    for level in sorted(order, reverse=True):
        rows = max(len(lines[item]) for item in order[level] if not item.lane)
        for item in order[level]:
            boxes[item].y = y
            boxes[item].height = TITLE_HEIGHT + LINE_HEIGHT * rows + 2 * PADDING
        y = boxes[item].y + boxes[item].height + FLOOR_GAP
    right = max(box.x + box.width for box in boxes.values())
    parts = [_head(right + MARGIN, y - FLOOR_GAP + MARGIN)]
    parts += [_lane(box) for item, box in boxes.items() if item.lane]
    for (upper, lower), (start, end) in ports(boxes, connected).items():
        parts.append(_arrow(start, boxes[upper], end, boxes[lower], tip=not lower.lane))
    parts += [_box(item, boxes[item], texts) for item, texts in lines.items()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * PADDING) / CHARACTER_WIDTH + 1e-6), break_long_words=False)


def title(room: str) -> str:
    if room == "main":
        return "programs"
    return room.removeprefix("megapar.")


def _head(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, '
        'sans-serif" role="img" aria-label="Who may import whom">\n'
        f'<rect id="paper" width="{width:g}" height="{height:g}" fill="white"/>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#607d8b"/></marker></defs>'
    )


def _lane(box: Box) -> str:
    return f'<path d="M{box.center:.1f},{box.y:g} V{box.y + box.height:g}" stroke="#607d8b" stroke-width="1.5"/>'


def _arrow(x: float, upper: Box, end_x: float, lower: Box, *, tip: bool) -> str:
    """A curve through the space between two floors, vertical at both ends."""
    y = upper.y + upper.height
    middle = (y + lower.y) / 2
    marker = ' marker-end="url(#tip)"' if tip else ""
    return (
        f'<path d="M{x:.1f},{y:g} C{x:.1f},{middle:g} {end_x:.1f},{middle:g} {end_x:.1f},{lower.y:g}" stroke="#607d8b" '
        f'stroke-width="1.5" fill="none"{marker}/>'
    )


def _box(item: Item, box: Box, lines: Sequence[str]) -> str:
    title_y = box.y + PADDING + 13
    center = f"{box.center:.1f}"
    texts = [f'<text x="{center}" y="{title_y:g}" font-size="13" font-weight="bold">{escape(title(item.room))}</text>']
    for number, line in enumerate(lines, 1):
        y = title_y + 4 + number * LINE_HEIGHT
        texts.append(f'<text x="{center}" y="{y:g}" font-size="12" fill="#37474f">{escape(line)}</text>')
    frame = (
        f'<rect x="{box.x:.1f}" y="{box.y:g}" width="{box.width:.1f}" height="{box.height:g}" rx="6" '
        f'fill="{COLORS[item.floor % len(COLORS)]}" stroke="#90a4ae"/>'
    )
    return "\n".join([frame, '<g text-anchor="middle" fill="#1c2a33">', *texts, "</g>"])


def rooms_and_modules() -> tuple[dict[str, set[str]], dict[str, list[str]]]:
    """Who may import whom, and the modules of each room, as they are now. It runs a test's file: the dev extra."""
    sys.path.insert(0, str(ROOT))  # the test's file imports tests.support
    house = runpy.run_path(str(ROOT / "tests/test_house.py"))
    modules: dict[str, list[str]] = {room: [] for room in house["MAY_IMPORT"]}
    for path in house["LIBRARY"]:
        if path.stem != "__init__":
            module = house["module_name"](path)
            room = house["room"](module)
            # A folder within a room shows in the name: gpt.model.
            name = module.removeprefix(f"{room}.") if module.startswith(f"{room}.") else path.stem
            modules[room].append(name)
    modules["main"] = ["pretrain_scripts", "tools"]
    return house["MAY_IMPORT"], modules


def picture() -> str:
    """The picture of the repository as it is now."""
    return draw(*rooms_and_modules())


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    print(PICTURE)
