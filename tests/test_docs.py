"""Documents tell the truth: links lead somewhere, commands run, tables agree with the code, the site is built."""

import importlib.util
import io
import itertools
import json
import operator
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from functools import cache
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown.extensions.toc import slugify, unique
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from megapar_models.registry import FOR_OPTIONS

from megapar.base import errors
from megapar.migrate.table import TABLE
from tests.support.program import Program
from tests.support.source_tree import ROOT, TESTS, imports, setup_argument, tree
from tests.support.sweeps import slow_but
from tools import docs_hooks, draw_architecture

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
SVG = "{http://www.w3.org/2000/svg}"
INSTALLING = (
    *(f"bash pretrain_scripts/{name}.sh" for name in ("quickstart", "moe_laptop", "finetune_laptop")),
    "bash tests/run.sh",
)


def test_links_of_the_documents_lead_somewhere() -> None:
    wrong = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                wrong.append(f"{document.name}: {target}")
    assert not wrong, "\n".join(wrong)


@cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of a page's headings as the site's Markdown writes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        unique(slugify(plain, "-"), found)  # adds the anchor, with a number behind where another heading has it
    return found


def wrong_anchors(documents: Collection[Path]) -> list[str]:
    """Return the links of `documents` to headings of documents that are not there."""
    wrong = []
    for document in documents:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            page = (document.parent / target).resolve() if target else document
            if "://" not in target and page.suffix == ".md" and anchor not in anchors(page):
                wrong.append(f"{document.name}: {target}#{anchor}")
    return wrong


def test_links_to_headings_lead_to_headings(tmp_path: Path) -> None:
    assert wrong_anchors(DOCUMENTS) == []
    page = tmp_path / "page.md"
    page.write_text("# A `page`\n## More\n## More\n\n[a](#more_1) [b](page.md#a-page) [c](#gone) [d](page.md#mor)\n")
    assert wrong_anchors([page]) == ["page.md: #gone", "page.md: page.md#mor"]


def test_files_that_contributing_names_exist() -> None:
    """It sends nobody to a commit: files move, and their history says little to a newcomer."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "git show" not in text
    named = set(re.findall(r"`((?:megapar|models|kernels|tools|tests)/[\w/]+\.\w+)`", text))
    assert len(named) > 30
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, missing


def fenced(document: Path, language: str) -> list[str]:
    """The document's blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def fenced_commands(document: Path) -> list[str]:
    """Lines of the document's ```bash blocks, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", "".join(fenced(document, "bash"))).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def assert_part_of_the_suite(command: str) -> None:
    """`python -m pytest FILE ...` names files of `tests/run.sh`, or tests in them."""
    for word in shlex.split(command)[3:]:
        file, _, test = word.partition("::")
        assert (ROOT / file) in TESTS, command
        names = {node.name for node in tree(ROOT / file).body if hasattr(node, "name")}
        assert not test or test in names, command


def run_commands(document: Path, folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Run the document's commands, but those in `without`, in order in `folder` with the programs; returns what each
    printed.

    Installations are only parsed, parts of the suite are only looked up. Our own programs run in forks: the launchers
    of the documents, laptop.sh and torchrun, start them in interpreters of their own.
    """
    for name in ("pretrain_scripts", "tools", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    commands = [command for command in fenced_commands(document) if command not in without]
    printed = dict.fromkeys(commands, "")
    for command in commands:
        if command.startswith("python -m pytest "):
            assert_part_of_the_suite(command)
        elif command == "pip install -c constraints.txt -e .":
            assert (ROOT / "constraints.txt").is_file()
        elif command in INSTALLING:
            subprocess.run(["bash", "-n", command.split()[1]], cwd=ROOT, check=True)
        elif command.startswith(("python pretrain_scripts/", "python tools/")):
            words = shlex.split(command)
            ended = Program(folder / words[1], words[2:], folder, {}).wait()
            assert ended.code == 0, f"{command}\n{ended.out}{ended.err}"
            printed[command] = ended.out
        else:
            run = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
            printed[command] = run.stdout
    return printed


def test_readme_commands(tmp_path: Path) -> None:
    """All run, and the losses in the README equal those of one process and of eight ranks."""
    assert len(run_commands(ROOT / "README.md", tmp_path)) > 7
    promised = losses_in((ROOT / "README.md").read_text())
    assert len(promised) == 5
    for folder in ("one", "eight"):
        lines = (tmp_path / "runs" / folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses == pytest.approx(promised, abs=1e-3)


LIBRARY_PAGE, TUTORIAL, NEW_FAMILY = (ROOT / f"docs/{name}.md" for name in ("library", "tutorial", "new-family"))
WITH_TESTS_OF_THEIR_OWN = (ROOT / "README.md", LIBRARY_PAGE, TUTORIAL, NEW_FAMILY)
OTHERS_WITH_COMMANDS = [path for path in DOCUMENTS if path not in WITH_TESTS_OF_THEIR_OWN and fenced_commands(path)]


# Those of profile.md train with a profiler, as tests/test_profile.py does.
WITH_COMMANDS = slow_but(
    [number for number, path in enumerate(OTHERS_WITH_COMMANDS) if path.stem != "profile"], OTHERS_WITH_COMMANDS
)


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.stem)
def test_commands_of_the_other_documents(document: Path, tmp_path: Path) -> None:
    run_commands(document, tmp_path, without=fenced_commands(ROOT / "README.md"))


def losses_in(text: str) -> list[float]:
    """The losses in lines reporting a step."""
    return [float(loss) for loss in re.findall(r"^step +\d+(?:/\d+)? \| loss ([\d.]+)", text, re.MULTILINE)]


def test_a_loop_of_your_own_trains_as_the_program_does(tmp_path: Path) -> None:
    """The page shows the whole file of 40 lines. Its losses in another layout are those of pretrain.py."""
    loop = (ROOT / "pretrain_scripts/own_loop.py").read_text()
    assert fenced(LIBRARY_PAGE, "python")[0] == loop
    assert len([line for line in loop.splitlines() if line]) <= 40
    two_ranks, resumed = run_commands(LIBRARY_PAGE, tmp_path).values()
    promised = losses_in((ROOT / "README.md").read_text())
    assert len(promised) == 5
    assert losses_in(two_ranks) == pytest.approx(promised, abs=1e-3)
    assert len(losses_in(resumed)) == 2, "it goes on from step 5"


@pytest.mark.slow
def test_the_tutorial_ends_in_what_transformers_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole walk, in fewer steps: transformers generates what generate.py generates."""
    pytest.importorskip("transformers")
    page = tmp_path / "tutorial.md"
    text = TUTORIAL.read_text()
    shorter = {"\nsteps = 300": "\nsteps = 6", "--train.steps 350": "--train.steps 8", "--max_mb 6": "--max_mb 3"}
    shorter |= {"warmup_steps = 20": "warmup_steps = 2"}
    for long, short in shorter.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    page.write_text(text.replace("00000300", "00000006").replace("00000350", "00000008"))
    (tmp_path / "mine.toml").write_text(fenced(page, "toml")[0])
    printed = run_commands(page, tmp_path)
    generated = next(out for command, out in printed.items() if "generate.py" in command)
    assert "resumed step 6 from" in "".join(printed.values())
    assert len(generated) > len("def read(self, ") + 20, "24 tokens"
    monkeypatch.chdir(tmp_path)
    (loading,) = fenced(page, "python")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(loading, str(TUTORIAL), "exec"), {})
    assert out.getvalue() == generated


@pytest.mark.slow
def test_a_family_is_built_as_the_page_says(tmp_path: Path) -> None:
    """Its file lies outside of the repository. The draft does as well, and a wrong rule is refused as the page says."""
    pytest.importorskip("transformers")
    assert NEW_FAMILY.read_text().count("\n") <= 150
    script, rules, names = fenced(NEW_FAMILY, "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "my_stablelm.py").write_text(f"{rules}\n\n{names}")
    printed = run_commands(NEW_FAMILY, tmp_path)
    (asked,) = fenced(NEW_FAMILY, "text")
    report = next(out for command, out in printed.items() if "new_family.py" in command)
    assert {*asked.splitlines()} <= {*report.splitlines()}
    assert "nothing is missing" in report
    assert "5 layouts compute what one process computes" in "".join(printed.values())
    assert "started from the weights of native" in "".join(printed.values())
    # Other families in place of the page's.
    wrong = rules.replace("partial_rotary(model)", "Rotary.of(model)").replace(
        "from megapar_models.stage", "from megapar_models.rotary import Rotary\nfrom megapar_models.stage"
    )
    assert wrong.count("Rotary.of(model)") == 1
    (tmp_path / "drafts/wrong.py").write_text(f"{wrong}\n\n{names}")
    command = next(command for command in printed if "hf-to-native" in command).replace("PYTHONPATH=.", "")
    environment = {**os.environ, "PYTHONPATH": "drafts", "OMP_NUM_THREADS": "1"}
    for module, code, said in (("stablelm", 0, ""), ("wrong", 4, "logits differ from those of transformers")):
        words = shlex.split(command.replace("my_stablelm:", f"{module}:").replace(" native ", f" {module}_native "))
        run = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == code, run.stderr
        assert said in run.stderr
        assert (tmp_path / f"{module}_native").exists() == (code == 0)
    assert "`logits differ from those of transformers`" in NEW_FAMILY.read_text()


def test_extras_that_documents_name_exist() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    named = {name for group in re.findall(r"\.\[([a-z,]+)\]", text) for name in group.split(",")}
    assert {"data", "convert", "docs", "dev"} <= named
    extras = setup_argument("extras_require")
    assert named <= {*extras}, f"setup.py has no extra {named - {*extras}}"
    assert {*extras["docs"]} <= {*extras["dev"]}, "the suite builds the site"


def test_options_that_documents_name_exist() -> None:
    """`--section.key` and `section.key` of a section of options, switches with no_ too, and sections in a section."""
    options = {*FOR_OPTIONS.types()}
    options |= {path.rpartition(".")[0] for path in options}
    sections = {path.partition(".")[0] for path in options if "." in path}
    options |= {row.name for rows in TABLE.values() for row in rows}  # torchtitan has a section `checkpoint` too
    options.add("model.use_qkv_bias")  # of the family that docs/new-family.md builds
    wrong = []
    for document in DOCUMENTS:
        for section, key in re.findall(r"[`\s](?:--)?([a-z]+)\.([a-z_]+)\b(?![.(/])", document.read_text()):
            if section in sections and not {f"{section}.{key}", f"{section}.{key.removeprefix('no_')}"} & options:
                wrong.append(f"{document.name}: {section}.{key}")
    assert not wrong, "\n".join(wrong)


def test_exit_codes_are_those_of_the_classes_and_signals() -> None:
    text = (ROOT / "docs/launching.md").read_text()
    listed = {
        int(code): name for code, name in re.findall(r"^\| (\d+) \|[^|]*\|\s*`?(\w*)`?\s*\|$", text, re.MULTILINE)
    }
    classes = [errors.MegaparError, *errors.MegaparError.__subclasses__()]
    expected = {0: ""} | {
        error.exit_code: error.__name__ for error in classes if error.__module__ == "megapar.base.errors"
    }
    expected |= {
        128 + number: "" for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGPIPE, signal.SIGTERM)
    }
    assert listed == expected


def linked_files(text: str) -> list[str]:
    """The Python files of the project that a page in docs/ links to."""
    return re.findall(r"\]\(\.\./([^)]+\.py)\)", text)


def files_to_read(text: str) -> list[str]:
    """All files in the numbered rows of docs/reading.md."""
    return linked_files("\n".join(re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE)))


def files_imported(name: str) -> set[str]:
    """The files of the library that a file imports, wherever they are."""
    found = set()
    for module in imports(ROOT / name):
        parts = module.split(".")
        folder = {"megapar": ROOT, "megapar_models": ROOT / "models", "megapar_kernels": ROOT / "kernels"}.get(parts[0])
        while folder and parts and not (path := folder.joinpath(*parts).with_suffix(".py")).is_file():
            parts.pop()
        if folder and parts:
            found.add(path.relative_to(ROOT).as_posix())
    return found


def files_to_open(text: str) -> list[tuple[str, str]]:
    """The files of docs/reading.md to open when a reader meets them, each with where that is."""
    table = text.partition("## Open these when you meet them")[2].partition("## Where to look")[0]
    rows = re.findall(r"^\| ([a-z_./, ]+) \|(.*)$", table, re.MULTILINE)
    return [(name, met_in) for met_in, cells in rows for name in linked_files(cells)]


def rooms_known_by_name(text: str) -> dict[str, str]:
    """The rooms of docs/reading.md that a reader need not enter, each with its sentence."""
    return dict(re.findall(r"^\| `([a-z_/]+)` \| (.+) \|$", text, re.MULTILINE))


def test_the_reading_page_tells_of_each_file_that_the_files_to_read_import() -> None:
    """They are on the list, or to be opened when a reader meets them, or in a room that the page tells of."""
    text = (ROOT / "docs/reading.md").read_text()
    listed, rooms = files_to_read(text), rooms_known_by_name(text)
    told = {*listed, *(name for name, _ in files_to_open(text))}
    missing = {
        f"{name} imports {found}"
        for name in listed
        for found in files_imported(name) - told
        if found.rpartition("/")[0] not in rooms
    }
    assert not missing, "\n".join(sorted(missing))


def test_the_reading_page_tells_of_no_file_or_room_that_a_reader_does_not_meet() -> None:
    text = (ROOT / "docs/reading.md").read_text()
    imported = {name: files_imported(name) for name in files_to_read(text)}
    files = files_to_open(text)
    assert len(files) > 40
    assert not {name for name, _ in files} & {*imported}, "is on the list too"
    for name, met_in in files:
        ends = tuple(f"/{end}" for end in met_in.split(", ")) if met_in != "everywhere" else ""
        places = [found for file, found in imported.items() if file.endswith(ends)]
        assert any(name in found for found in places), f"nobody meets {name} in {met_in}"
        assert not ends or len(places) == len(ends), f"{met_in} is not on the list, or not alone"
    met = {found.rpartition("/")[0] for of_file in imported.values() for found in of_file}
    for room, sentence in rooms_known_by_name(text).items():
        assert room in met, room
        assert sentence.endswith("."), room
        assert len(sentence.split()) > 8, room


def test_the_files_to_read_have_about_as_many_lines_as_documents_say() -> None:
    text = (ROOT / "docs/reading.md").read_text()
    files = files_to_read(text)
    assert len(files) > 15
    lines = sum((ROOT / name).read_text().count("\n") for name in files)
    assert lines <= 4500, "leave out what is not needed to know how a step works"
    assert f"{len(files)} files" in text
    for document, pattern in (("README.md", r"these ([\d,]+) lines"), ("docs/reading.md", r"About ([\d,]+) lines")):
        found = re.search(pattern, (ROOT / document).read_text())
        assert found, document
        assert int(found[1].replace(",", "")) == pytest.approx(lines, abs=200), f"{document}: there are {lines}"


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
        "megapar.plan": {"megapar.base", "megapar.pipeline"},
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


def test_python_of_the_documents_runs(tmp_path: Path) -> None:
    loop = (ROOT / "pretrain_scripts/own_loop.py").read_text()  # it has a test of its own, as two pages have
    pages = [path for path in DOCUMENTS if path not in (TUTORIAL, NEW_FAMILY)]
    blocks = [(path, block) for path in pages for block in fenced(path, "python") if block != loop]
    assert blocks
    for document, block in blocks:
        (tmp_path / "block.py").write_text(block)
        run = Program(tmp_path / "block.py", (), tmp_path, {}).wait()
        assert run.code == 0, f"{document.name}\n{block}{run.err}"


# The site


def test_options_page_has_every_option_with_its_default_and_sentence() -> None:
    rows = dict(re.findall(r"^\| `([a-z0-9_.]+)` \| (.*) \|$", docs_hooks.options_page(), re.MULTILINE))
    assert {*rows} == {*FOR_OPTIONS.types()}
    value, default, sentence = rows["optimizer.zero_stage"].split(" | ")
    assert (value, default) == ("`0`, `1`, `2`, `3`", "`1`")
    assert "ZeRO-1" in sentence
    assert all(len(row.rsplit(" | ", 1)[1]) > 10 for row in rows.values())


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site() -> None:
    rewritten = docs_hooks.rewrite_links(
        "[a](../megapar/comm/collectives.py) [b](data.md#x) [c](../README.md) [d](gone.md)", "docs/x.md"
    )
    assert rewritten == "[a](files/megapar/comm/collectives.py.md) [b](data.md#x) [c](index.md) [d](gone.md)"
    assert docs_hooks.rewrite_links("[a](docs/data.md) ![b](docs/images/architecture.svg)", "README.md") == (
        "[a](data.md) ![b](images/architecture.svg)"
    )


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tools/build_docs.sh; skips the test if mkdocs is not installed."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -c constraints.txt -e '.[docs]'")
    command = ["bash", str(ROOT / "tools/build_docs.sh"), str(folder), *options]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Every page is there, the search works from a disk, and no page loads anything from elsewhere."""
    built = build(tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    # A page from a disk may neither read files nor start a worker: the index is a script, and a frame is the worker.
    index = (tmp_path / "site/search/search_index.js").read_text()
    entries = json.loads(index.removeprefix("var __index = "))["docs"]
    assert {"strategies.html", "options.html"} <= {entry["location"].partition("#")[0] for entry in entries}
    page = (tmp_path / "site/api/megapar.data.html").read_text()
    assert '<script src="../javascripts/iframe-worker.js"></script>' in page
    assert (tmp_path / "site/javascripts/iframe-worker.js").is_file()
    assert {"default", "slate"} <= {*re.findall(r'data-md-color-scheme="(\w+)"', page)}
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "contributing.html", "options.html", "files/megapar/step/step.py.html"} <= pages
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= pages
    assert "step_of" in (tmp_path / "site/api/megapar.checkpoint.html").read_text()
    loading = re.compile(
        r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:'
    )
    for page in pages:
        found = loading.search((tmp_path / "site" / page).read_text())
        assert found is None, f"{page}: {found}"


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    """With the settings of mkdocs.yml, on one page with a link to nowhere."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("# A page\n\n[a link](gone.md)\n")
    settings = ["site_name: test", "docs_dir: docs", "nav: [page.md]", "hooks: []", "plugins: []"]
    (tmp_path / "mkdocs.yml").write_text("\n".join([f"INHERIT: {ROOT}/mkdocs.yml", *settings]))
    built = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert built.returncode == 1, built.stdout + built.stderr
    assert "gone.md" in built.stderr


def test_a_folder_with_other_files_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    built = build(tmp_path)
    assert built.returncode == 2
    assert "holds other files" in built.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"
