"""Stand-ins for wandb and mlflow: they take the calls of the real ones' signatures (0.31, 3.17) and keep them on disk.

A plant puts them into sys.modules of a forked program. `history` reads what a curve has.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def _append(path: Path, record: Any) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


class WandbRun:
    """What wandb.init returns: it drops rows of steps behind its newest one, as W&B does."""

    def __init__(self, path: Path):
        self._path = path
        self.offline = False
        self.url = f"https://wandb.example/{path.stem}"

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        rows = history(self._path.parent, self._path.stem)
        if not rows or step is None or step >= rows[-1][0]:
            _append(self._path, [step, data])

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        _append(self._path.with_suffix(".finished"), exit_code)


def wandb(folder: Path) -> ModuleType:
    """A module that keeps the rows of each run id in `folder`."""
    module: Any = ModuleType("wandb")

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Any = None,
        config: dict[str, Any] | None = None,
        allow_val_change: bool | None = None,
        group: str | None = None,
        resume: str | None = None,
        settings: Any = None,
    ) -> WandbRun:
        assert project
        assert id
        assert resume == "allow"
        assert settings.console == "off"
        _append(folder / f"{id}.inits", [project, name, config])
        return WandbRun(folder / f"{id}.rows")

    module.init = init
    module.Settings = lambda **named: SimpleNamespace(**named)
    return module


def history(folder: Path, curve: str) -> list[Any]:
    """The rows of a curve: [step, numbers]."""
    path = folder / f"{curve}.rows"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curves(folder: Path) -> list[str]:
    """The ids of all curves, the oldest first."""
    return [path.stem for path in sorted(folder.glob("*.inits"), key=lambda path: path.stat().st_ctime_ns)]


def install(module: ModuleType) -> None:
    """Make `import` find the module, and find_spec too."""
    module.__spec__ = SimpleNamespace(name=module.__name__)  # type: ignore[assignment]
    sys.modules[module.__name__] = module
