"""The project's documents, and what is fenced in them."""

import re
from pathlib import Path

from tests.support.source_tree import ROOT

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def fenced(document: Path, language: str) -> list[str]:
    """The document's blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def fenced_commands(document: Path) -> list[str]:
    """Lines of the document's ```bash blocks, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", "".join(fenced(document, "bash"))).splitlines()
    return [line for line in lines if line and not line.startswith("#")]
