"""The files of the project, and what their syntax trees say. Tests of the house and of documents read them."""

import ast
import gc
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megapar", "models", "kernels", "tools", "pretrain_scripts")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGES = ("megapar", "models/megapar_models", "kernels/megapar_kernels", "tools/megapar_tools")
LIBRARY = [path for path in SOURCES if path.relative_to(ROOT).as_posix().startswith(PACKAGES)]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    gc.disable()  # all that is made stays
    parsed = ast.parse(path.read_text(), str(path))
    gc.enable()
    gc.freeze()
    return parsed


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """a.b.c of an attribute expression, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""


@cache
def project() -> dict[str, Any]:
    """Return the table [project] of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of all that a file imports, at its top or inside functions: `from a import b` is a.b."""
    names: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative(path)}:{node.lineno}: imports are absolute"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)
