"""The site of the documents is built, by tools/build_docs.sh."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT


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
