"""The picture of the architecture: it is that of the code, and can be read."""

import itertools
import operator
import re
from collections.abc import Callable
from functools import cache
from itertools import combinations
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from tools import draw_architecture

SVG = "{http://www.w3.org/2000/svg}"


@cache
def picture_of_ours() -> str:
    return draw_architecture.picture()


def test_the_architecture_picture_is_that_of_the_code() -> None:
    stale = "run python tools/draw_architecture.py, and look at the picture"
    assert draw_architecture.PICTURE.read_text() == picture_of_ours(), stale


def test_the_architecture_picture_shows_each_room_above_what_it_imports() -> None:
    may_import = {"a": set(), "b": {"a"}, "c": {"b", "a"}, "d": {"b"}, "e": {"c", "b", "a"}, "main": {*"abcde"}}
    assert draw_architecture.floors(may_import) == {"a": 0, "b": 1, "c": 2, "d": 2, "e": 3, "main": 4}
    assert draw_architecture.direct(may_import) == {
        "a": [],
        "b": ["a"],
        "c": ["b"],
        "d": ["b"],
        "e": ["c"],
        "main": ["d", "e"],
    }


def frame(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom."""
    x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def boxes_of(picture: str) -> dict[tuple[float, float, float, float], list[ElementTree.Element]]:
    """The frame of each box of the architecture picture, and the box's texts."""
    elements = list(ElementTree.fromstring(picture))
    frames = [i for i, element in enumerate(elements) if element.tag == f"{SVG}rect" and "rx" in element.attrib]
    return {frame(elements[i]): elements[i + 1].findall(f"{SVG}text") for i in frames}


def curve(path: str) -> list[tuple[float, float]]:
    """Points of a path of the picture: a line straight down, or a Bezier curve."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", path)]
    x, y, *rest = numbers
    if " V" in path:
        return [(x, y + (rest[0] - y) * i / 50) for i in range(51)]
    points = []
    for t in (i / 50 for i in range(51)):
        weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
        points.append(tuple(sum(map(operator.mul, weights, numbers[axis::2])) for axis in (0, 1)))
    return points


def with_rooms_to_come() -> str:
    """The picture of a larger table than ours: a package more on two floors, and modules with long names."""
    may_import, modules = draw_architecture.rooms_and_modules()
    added = {
        "megapar_tools.plan": {"megapar.base", "megapar.pipeline"},
        "megapar.launching_of_ranks": {"megapar.base"},
    }
    may_import = {**may_import, **added, "main": may_import["main"] | {*added}}
    names = {room: [f"a_module_with_a_long_name_{i}" for i in range(9)] for room in added}
    return draw_architecture.draw(may_import, modules | names)


@cache
def width_of(text: str, size: float, weight: str) -> float:
    """In a wide font. Most texts are on both pictures."""
    font = FontProperties(family="DejaVu Sans", weight=weight)
    return float(TextPath((0, 0), text, size, prop=font).get_extents().width)


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(picture_of_ours, id="ours"),
        pytest.param(with_rooms_to_come, id="more-rooms", marks=pytest.mark.slow),
    ],
)
def test_nothing_on_the_architecture_picture_covers_anything_else(draw: Callable[[], str]) -> None:
    """No two boxes meet, each text is inside its box also in a wide font, and no arrow enters a box."""
    picture = draw()
    boxes = boxes_of(picture)
    rooms = {texts[0].text for texts in boxes.values()}
    assert {"programs", "train", "megapar_models.convert", "declare"} <= rooms
    for (left, top, right, bottom), (other_left, other_top, other_right, other_bottom) in combinations(boxes, 2):
        assert left > other_right or right < other_left or top > other_bottom or bottom < other_top
    for (left, top, right, bottom), texts in boxes.items():
        for text in texts:
            assert text.text is not None
            half = width_of(text.text, float(text.attrib["font-size"]), text.get("font-weight", "normal")) / 2
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            assert left < x - half < x + half < right, text.text
            assert top < y < bottom - 4, text.text
    arrows = [path.attrib["d"] for path in ElementTree.fromstring(picture).findall(f"{SVG}path")]
    assert len(arrows) > len(rooms)
    for x, y in itertools.chain.from_iterable(map(curve, arrows)):
        assert not any(left <= x <= right and top < y < bottom for left, top, right, bottom in boxes), (x, y)
