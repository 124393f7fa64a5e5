"""Documents that tell the truth: links lead somewhere, commands run, tables agree with the code, the site is built."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from megapar import errors
from megapar.config import option_types
from tests.support.program import Program
from tests.support.source_tree import ROOT, TESTS, setup_argument, tree
from tools import docs_hooks, draw_architecture

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
INSTALLING = ("bash pretrain_scripts/quickstart.sh", "bash pretrain_scripts/moe_laptop.sh", "bash tests/run.sh")


def test_links_of_the_documents_lead_somewhere() -> None:
    wrong = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                wrong.append(f"{document.name}: {target}")
    assert not wrong, "\n".join(wrong)


def test_commits_that_contributing_names_exist() -> None:
    hashes = re.findall(r"git show ([0-9a-f]{7,})", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(hashes) > 8
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", "HEAD~100"], capture_output=True, check=False).returncode:
        pytest.skip("needs a git checkout with its history")
    for short in hashes:
        ancestor = [*git, "merge-base", "--is-ancestor", short, "HEAD"]
        assert subprocess.run(ancestor, capture_output=True, check=False).returncode == 0, short


def fenced(document: Path, language: str) -> list[str]:
    """The document's blocks in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def fenced_commands(document: Path) -> list[str]:
    """Lines of the document's ```bash blocks, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", "".join(fenced(document, "bash"))).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def assert_part_of_the_suite(command: str) -> None:
    """`python -m pytest FILE ...` names files, or tests in them, that `tests/run.sh` runs."""
    for word in shlex.split(command)[3:]:
        file, _, test = word.partition("::")
        assert (ROOT / file) in TESTS, command
        names = {node.name for node in tree(ROOT / file).body if hasattr(node, "name")}
        assert not test or test in names, command


def run_commands(document: Path, folder: Path, without: Collection[str] = ()) -> int:
    """Run the document's commands, but those in `without`, in order in `folder`, where the programs are; returns how
    many there are.

    What installs is only parsed, parts of the suite are only looked up. `python pretrain.py` runs in a fork: the
    launchers of the documents, laptop.sh and torchrun, start it in interpreters of their own.
    """
    for name in ("pretrain_scripts", "tools", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    commands = [command for command in fenced_commands(document) if command not in without]
    for command in commands:
        if command.startswith("python -m pytest "):
            assert_part_of_the_suite(command)
        elif command == "pip install -c constraints.txt -e .":
            assert (ROOT / "constraints.txt").is_file()
        elif command in INSTALLING:
            subprocess.run(["bash", "-n", command.split()[1]], cwd=ROOT, check=True)
        elif command.startswith("python pretrain_scripts/pretrain.py "):
            words = shlex.split(command)
            ended = Program(folder / words[1], words[2:], folder, {}).wait()
            assert ended.code == 0, f"{command}\n{ended.out}{ended.err}"
        else:
            run = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
    return len(commands)


def test_readme_commands(tmp_path: Path) -> None:
    """All run, and the losses that the README shows are those of one process and of eight ranks."""
    assert run_commands(ROOT / "README.md", tmp_path) > 7
    promised = re.findall(r"^step (\d)/5 \| loss ([\d.]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [int(step) for step, _ in promised] == [1, 2, 3, 4, 5]
    for folder in ("one", "eight"):
        lines = (tmp_path / "runs" / folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses == pytest.approx([float(loss) for _, loss in promised], abs=1e-3)


OTHERS_WITH_COMMANDS = [path for path in DOCUMENTS if path.name != "README.md" and fenced_commands(path)]


@pytest.mark.parametrize("document", OTHERS_WITH_COMMANDS, ids=lambda path: path.stem)
def test_commands_of_the_other_documents(document: Path, tmp_path: Path) -> None:
    run_commands(document, tmp_path, without=fenced_commands(ROOT / "README.md"))


def test_extras_that_documents_name_exist() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    named = {name for group in re.findall(r"\.\[([a-z,]+)\]", text) for name in group.split(",")}
    assert {"data", "convert", "docs", "dev"} <= named
    extras = setup_argument("extras_require")
    assert named <= {*extras}, f"setup.py has no extra {named - {*extras}}"
    assert {*extras["docs"]} <= {*extras["dev"]}, "the suite builds the site"


def test_options_that_documents_name_exist() -> None:
    """`--section.key` and `section.key` of a section of options, switches with no_ too, and sections in a section."""
    options = {*option_types()}
    options |= {path.rpartition(".")[0] for path in options}
    sections = {path.partition(".")[0] for path in options if "." in path}
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
    expected = {0: ""} | {error.exit_code: error.__name__ for error in classes if error.__module__ == "megapar.errors"}
    expected |= {128 + number: "" for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)}
    assert listed == expected


def test_the_files_to_read_have_about_as_many_lines_as_documents_say() -> None:
    text = (ROOT / "docs/reading.md").read_text()
    files = re.findall(r"^\| \d+ \| \[[^]]*\]\(\.\./([^)]+)\)", text, re.MULTILINE)
    assert len(files) > 15
    lines = sum((ROOT / name).read_text().count("\n") for name in files)
    assert 2500 < lines < 3800, "about 3,000 lines: leave out what is not needed to know how a step works"
    for document, pattern in (("README.md", r"these ([\d,]+) lines"), ("docs/reading.md", r"About ([\d,]+) lines")):
        found = re.search(pattern, (ROOT / document).read_text())
        assert found, document
        assert int(found[1].replace(",", "")) == pytest.approx(lines, abs=200), f"{document}: there are {lines}"


def test_the_architecture_picture_is_that_of_the_code() -> None:
    stale = "run python tools/draw_architecture.py, and look at the picture"
    assert draw_architecture.PICTURE.read_text() == draw_architecture.picture(), stale


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
    boxes = draw_architecture.place(may_import)
    assert boxes["e"].center == boxes["c"].center
    assert boxes["main"].width == boxes["b"].width


def test_python_of_the_documents_runs(tmp_path: Path) -> None:
    blocks = [(path, block) for path in DOCUMENTS for block in fenced(path, "python")]
    assert blocks
    for document, block in blocks:
        run = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{document.name}\n{block}{run.stderr}"


# The site


def test_options_page_has_every_option_with_its_default_and_sentence() -> None:
    rows = dict(re.findall(r"^\| `([a-z0-9_.]+)` \| (.*) \|$", docs_hooks.options_page(), re.MULTILINE))
    assert {*rows} == {*option_types()}
    value, default, sentence = rows["optimizer.zero_stage"].split(" | ")
    assert (value, default) == ("`0`, `1`, `2`, `3`", "`1`")
    assert "ZeRO-1" in sentence
    assert all(len(row.rsplit(" | ", 1)[1]) > 10 for row in rows.values())


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site() -> None:
    rewritten = docs_hooks.rewrite_links(
        "[a](../megapar/comm.py) [b](data.md#x) [c](../README.md) [d](gone.md)", "docs/x.md"
    )
    assert rewritten == "[a](files/megapar/comm.py.md) [b](data.md#x) [c](index.md) [d](gone.md)"
    assert docs_hooks.rewrite_links("[a](docs/data.md) ![b](docs/images/architecture.svg)", "README.md") == (
        "[a](data.md) ![b](images/architecture.svg)"
    )


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tools/build_docs.sh; skips the test where mkdocs is not installed."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -c constraints.txt -e '.[docs]'")
    command = ["bash", str(ROOT / "tools/build_docs.sh"), str(folder), *options]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Every page is there, and no page loads anything from elsewhere."""
    built = build(tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "contributing.html", "options.html", "files/megapar/train/step.py.html"} <= pages
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= pages
    assert "step_of" in (tmp_path / "site/api/megapar.checkpoint.html").read_text()
    loading = re.compile(
        r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:'
    )
    for page in pages:
        found = loading.search((tmp_path / "site" / page).read_text())
        assert found is None, f"{page}: {found}"


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    """With the settings of mkdocs.yml, on one page that links nowhere."""
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
