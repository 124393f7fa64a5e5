"""The two lanes of the suite, and the groups of tests that the README's command leaves out.

A group proves nothing about training. `--leave-out` leaves it out where the files that it depends on are as in the last
commit: tests/run.sh passes this word, `tests/run.sh --all` does not.
"""

import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType

from tests.support.source_tree import ROOT, imports

# Files that prove nothing about training: documents, benchmarks, rules of the code, tools, the tests' own support.
PROJECT = (
    *("test_benchmark", "test_benchmark_checkpoint", "test_benchmark_data", "test_benchmark_fp8", "test_calibrate"),
    "test_come_over",
    *(
        "test_command",
        "test_community_files",
        "test_dashboard",
        "test_docs",
        "test_docs_commands",
        "test_docs_picture",
        "test_docs_site",
    ),
    *("test_gpu_check", "test_house", "test_kernel_benchmarks", "test_lanes", "test_lanes_gpus"),
    *("test_other_frameworks", "test_plot_schedule", "test_status", "test_strategy_tables"),
    *("test_support_distributed", "test_support_program", "test_survey", "test_terminal"),
)


@dataclass(frozen=True)
class Group:
    """Test files, and patterns of the files that the tests depend on beside themselves and the modules they import.

    In a pattern `*` stands for slashes too.
    """

    tests: tuple[str, ...]
    patterns: tuple[str, ...]


GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        "documents": Group(
            ("test_docs_commands", "test_docs_site"),
            (
                *("README.md", "CONTRIBUTING.md", "docs/*", "mkdocs.yml", "pretrain_scripts/own_loop.py"),
                "tools/*docs*",
            ),
        ),
        "benchmarks": Group(
            (
                *("test_benchmark", "test_benchmark_checkpoint", "test_benchmark_data", "test_benchmark_fp8"),
                *("test_calibrate", "test_kernel_benchmarks"),
            ),
            ("tools/benchmark.py", "tools/benchmarks/*"),
        ),
        "checks of a machine with GPUs": Group(("test_gpu_check", "test_lanes_gpus"), ("tools/gpu_*", "tests/*")),
        "migration": Group(
            ("test_come_over", "test_other_frameworks"),
            (
                "tools/megapar_tools/migrate/*",
                "tools/from_*.py",
                "tools/migrate.py",
                "docs/coming-over.md",
                "docs/from-*.md",
            ),
        ),
        "makers of pages": Group(
            ("test_dashboard", "test_plot_schedule", "test_strategy_tables", "test_survey"),
            ("tools/megapar_tools/dashboard/*", "docs/choosing.md", "docs/survey.md", "tests/survey_page.py"),
        ),
        "the architecture's picture": Group(
            ("test_docs_picture",),
            (
                *(
                    "docs/images/architecture.svg",
                    "tests/test_house.py",
                    "megapar/*",
                    "models/*",
                    "kernels/*",
                    "tools/megapar_tools/*",
                ),
                *("tools/*", "pretrain_scripts/*"),
            ),
        ),
    }
)


def changed_files(root: Path = ROOT) -> set[str] | None:
    """Return the files that differ from the last commit, and those that are not in it and not ignored.

    Paths are relative to `root`. None if `root` is not the folder of a checkout with a commit, or there is no git.
    """
    try:
        top, diff, others = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout
            for words in (
                ("rev-parse", "--show-toplevel"),
                ("diff", "-z", "--name-only", "--no-renames", "HEAD"),
                ("ls-files", "-z", "--others", "--exclude-standard"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    if Path(top.rstrip("\n")).resolve() != root.resolve():
        return None
    return {name for name in (diff + others).split("\0") if name}


def file_of(module: str) -> str:
    """Return the file of a dotted name of ours, such as a function's, or the pattern of a package's files; else ""."""
    parts = module.split(".")
    while parts:
        for folder in ("", "models/", "kernels/", "tools/"):
            path = folder + "/".join(parts)
            if (ROOT / f"{path}.py").is_file():
                return f"{path}.py"
            if (ROOT / path).is_dir() and (ROOT / path / "__init__.py").is_file():
                return f"{path}/*"
        parts.pop()
    return ""


def patterns_of(group: Group) -> list[str]:
    """Return patterns of all files that a group depends on."""
    files = [f"tests/{name}.py" for name in group.tests]
    modules = {file_of(module) for file in files if (ROOT / file).exists() for module in imports(ROOT / file)}
    return [*files, *sorted(modules - {""}), *group.patterns]


def left_out(changed: Collection[str] | None) -> list[str]:
    """Return the names of the groups without a file among `changed`; none if `changed` is None."""
    if changed is None:
        return []
    return [
        name
        for name, group in GROUPS.items()
        if not any(fnmatch(file, pattern) for file in changed for pattern in patterns_of(group))
    ]


def told(groups: Collection[str]) -> Iterable[str]:
    """Yield the lines that say what was left out, and how to run it."""
    if groups:
        yield f"Left out, because their files are as in the last commit: tests of {', '.join(groups)}."
        yield "`bash tests/run.sh --all` runs them too."
