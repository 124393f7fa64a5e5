"""Prints how the code is made: sizes, comments, and shapes of statements, by package, from its syntax trees.

    python tools/code_figures.py [--json FILE]

Lines of code hold a token outside of comments and docstrings. Comments count wherever they stand, except those for
tools (noqa, type: ignore). Relative clauses count by the words of `RELATIVE` in docstrings: with many of them prose
sounds translated. `hops` counts the calls of our own functions from the training step to the first matrix product, and
their files, of one rank's first forward pass.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from megapar.launch.reporting import reported
from megapar.system.atomic_files import write_json

ROOT = Path(__file__).parent.parent
PACKAGES = {
    **{f"megapar/{path.parent.name}": path.parent.name for path in sorted((ROOT / "megapar").glob("*/__init__.py"))},
    "models": "models",
    "kernels": "kernels",
    "tools": "tools",
    "tests": "tests",
}
RELATIVE = re.compile(r"\b(that|which|whose|whom|where)\b", re.IGNORECASE)
FOR_TOOLS = ("type: ignore", "noqa", "fmt:", "!/")


@dataclass
class Figures:
    """Counts of a package. Lengths are in lines."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    docstring_lines: int = 0
    docstring_words: int = 0
    relative_clauses: int = 0
    classes: int = 0
    functions: int = 0
    typed_functions: int = 0
    longest_function: int = 0
    largest_file: int = 0
    conditional_expressions: int = 0
    paired_assignments: int = 0

    def add(self, path: Path) -> None:
        text = path.read_text()
        tree = ast.parse(text)
        docstrings = list(_docstrings(tree))
        lines = text.count("\n")
        self.files += 1
        self.lines += lines
        self.largest_file = max(self.largest_file, lines)
        for first, last, prose in docstrings:
            self.docstring_lines += last - first + 1
            self.docstring_words += len(prose.split())
            self.relative_clauses += len(RELATIVE.findall(prose))
        self._count_tokens(text, [(first, last) for first, last, _ in docstrings])
        for node in ast.walk(tree):
            self._count_node(node)

    def _count_tokens(self, text: str, docstrings: Sequence[tuple[int, int]]) -> None:
        inside = {line for first, last in docstrings for line in range(first, last + 1)}
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self.comments += not any(word in token.string for word in FOR_TOOLS)
            elif token.string.strip():
                code.update(range(token.start[0], token.end[0] + 1))
        self.code += len(code - inside)

    def _count_node(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions += 1
            self.typed_functions += node.returns is not None
            self.longest_function = max(self.longest_function, (node.end_lineno or 0) - node.lineno + 1)
        elif isinstance(node, ast.IfExp):
            self.conditional_expressions += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            self.paired_assignments += isinstance(node.targets[0], ast.Tuple)

    def per_100_lines(self, count: int) -> float:
        return 100 * count / max(self.lines, 1)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """First line, last line and text of each docstring, those under fields included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno, node.value.value


def count() -> dict[str, Figures]:
    """Figures by package."""
    found = {}
    for pattern, name in PACKAGES.items():
        paths = sorted(ROOT.glob(pattern)) if "*" in pattern else sorted((ROOT / pattern).rglob("*.py"))
        figures = Figures()
        for path in paths:
            figures.add(path)
        found[name] = figures
    return found


def hops() -> tuple[int, int]:
    """(calls, files) from `train_step` to the first matrix product of a forward pass."""
    import torch.nn.functional as F
    from megapar_models.build import build_stages
    from megapar_models.registry import validate

    from megapar.config.model_options import ModelConfig
    from megapar.config.options import Config, ParallelConfig, TrainConfig
    from megapar.declare import context
    from megapar.declare.batch import MicroBatch
    from megapar.declare.random import initialize
    from megapar.linear.products import MatrixProducts
    from megapar.step.step import train_step
    from megapar.train.trainer import assemble

    frames: list[FrameType] = []

    class Watched(MatrixProducts):
        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            if not frames:
                frames.extend(_ours(sys._getframe()))
            return F.linear(x, weight, bias)

    model = ModelConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)
    config = validate(Config(model, ParallelConfig(), TrainConfig(global_batch_size=1, seq_length=4)), 1)
    ctx = context.single()
    stages = build_stages(config, ctx)
    for stage in stages.values():
        for module in stage.modules():
            if hasattr(module, "products"):
                module.products = Watched()  # type: ignore[assignment]
    initialize(stages.values(), 1)
    state = assemble(config, ctx, stages)
    import torch

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    train_step(state, [MicroBatch.of_samples(tokens, tokens, torch.ones(1, 4), tokens[:, 0])])
    return len(frames), len({frame.f_code.co_filename for frame in frames})


def _ours(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the project's own functions from `train_step` on, innermost first."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__):
            yield frame
        if frame.f_code.co_name == "train_step":
            return
        frame = frame.f_back


def show(found: dict[str, Figures], steps: tuple[int, int]) -> None:
    """Print the table."""
    title = (
        "per 100 lines: comments, conditional expressions, paired assignments; per 1,000 words of docstrings: that ..."
    )
    table = Table(title=title)
    names = ("package", "files", "lines", "code", "doc lines", "classes", "functions", "longest", "largest file")
    for name in (*names, "typed", "comments", "x if c else y", "a, b = x, y", "that, which ..."):
        table.add_column(name, justify="left" if name == "package" else "right")
    for name, figures in found.items():
        counts = (figures.files, figures.lines, figures.code, figures.docstring_lines, figures.classes)
        sizes = (figures.functions, figures.longest_function, figures.largest_file)
        table.add_row(
            name,
            *(f"{count:,}" for count in (*counts, *sizes)),
            f"{figures.typed_functions / max(figures.functions, 1):.0%}",
            *(
                f"{figures.per_100_lines(count):.1f}"
                for count in (figures.comments, figures.conditional_expressions, figures.paired_assignments)
            ),
            f"{1000 * figures.relative_clauses / max(figures.docstring_words, 1):.1f}",
        )
    console = Console(width=170)
    console.print(table)
    console.print(f"from train_step to the first matrix product: {steps[0]} calls of our own in {steps[1]} files")


@dataclass(frozen=True)
class Options:
    """Count the code."""

    json: Path | None = None
    """Also write the figures to this file."""


def main() -> int:
    with reported():
        options = tyro.cli(Options)
        found = count()
        steps = hops()
        show(found, steps)
        if options.json:
            packages = {name: vars(figures) for name, figures in found.items()}
            write_json(options.json, {"packages": packages, "calls_to_first_product": steps[0], "files": steps[1]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
