"""Documents tell the truth: links lead somewhere, tables agree with the code."""

import re
import signal
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify, unique
from megapar_models.registry import FOR_OPTIONS
from megapar_tools.migrate.table import TABLE

from megapar.base import errors
from tests.support.documents import DOCUMENTS
from tests.support.source_tree import ROOT, imports, project
from tools import docs_hooks


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


def test_extras_that_documents_name_exist() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    named = {name for group in re.findall(r"\.\[([a-z,]+)\]", text) for name in group.split(",")}
    assert {"data", "convert", "docs", "dev"} <= named
    extras = project()["optional-dependencies"]
    assert named <= {*extras}, f"pyproject.toml has no extra {named - {*extras}}"
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


FOLDERS_OF_PACKAGES = {
    "megapar": ROOT,
    "megapar_models": ROOT / "models",
    "megapar_kernels": ROOT / "kernels",
    "megapar_tools": ROOT / "tools",
}


def files_to_read(text: str) -> list[str]:
    """All files in the numbered rows of docs/reading.md."""
    return linked_files("\n".join(re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE)))


def files_imported(name: str) -> set[str]:
    """The files of the library that a file imports, wherever they are."""
    found = set()
    for module in imports(ROOT / name):
        parts = module.split(".")
        folder = FOLDERS_OF_PACKAGES.get(parts[0])
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
