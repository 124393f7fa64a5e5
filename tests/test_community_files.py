"""The files that hosts of repositories and editors read: forms of issues, citation, container for development."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.source_tree import ROOT, project

FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
ATTRIBUTES = {  # of each type of element in GitHub's forms
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
}


def read_yaml(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_of_issues_has_what_github_asks_for(path: Path) -> None:
    form = read_yaml(path)
    assert {"name", "description", "body"} <= {*form} <= {"name", "description", "title", "labels", "body"}
    assert len(form["description"]) < 200
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert any(element.get("validations") == {"required": True} for element in asked)
    assert len({element["id"] for element in asked}) == len(asked)
    assert len({element["attributes"]["label"] for element in asked}) == len(asked)
    for element in form["body"]:
        assert {*element} <= {"type", "id", "attributes", "validations"}
        assert {*element["attributes"]} <= ATTRIBUTES[element["type"]]
        assert element["type"] != "markdown" or element["attributes"]["value"]


def test_forms_name_pages_and_files_of_a_run_folder_that_exist() -> None:
    assert {path.stem for path in FORMS} == {"bug", "question"}
    assert read_yaml(ROOT / ".github/ISSUE_TEMPLATE/config.yml") == {"blank_issues_enabled": True}
    text = "".join(path.read_text() for path in FORMS)
    pages = {*re.findall(r"[\w/]+\.md\b", text)}
    assert {"docs/questions.md", "SECURITY.md"} <= pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []
    in_run_folder = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/run-folder.md").read_text(), re.MULTILINE)
    named = {*re.findall(r"\w+\.(?:jsonl?|toml)\b", text)}
    assert {"error.json", "environment.json", "config.toml"} <= named <= {*in_run_folder}


def test_the_citation_has_what_its_format_asks_for() -> None:
    """By version 1.2.0 of the Citation File Format."""
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= {*citation}
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == project()["name"]
    assert citation["license"] in project()["license"].split(" AND ")
    assert citation["type"] == "software"
    assert all(author["name"] for author in citation["authors"])


def test_the_container_for_development_begins_with_the_quickstart() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    shell, script = container["postCreateCommand"].split()
    assert (shell, script) == ("bash", "pretrain_scripts/quickstart.sh")
    assert (ROOT / script).is_file()
    python = container["image"].rpartition(":")[2]
    assert f"Programming Language :: Python :: {python}" in project()["classifiers"]
