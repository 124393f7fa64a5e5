"""Writes report.html into the folder of a run that has ended."""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megapar.base.errors import reason_of
from megapar.system.say import tell
from megapar.train.doors import write_report


class ReportAtEnd:
    """A context manager around a run: it writes the report when the run is over, however it ended.

    `run_dir` is set when it is known. Another run's folder is left alone, and so is one that has no steps.
    """

    run_dir: Path | None = None

    def __init__(self) -> None:
        self._process = os.getpid()

    def __enter__(self) -> "ReportAtEnd":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ranks that the launcher has forked leave it too.
        if self.run_dir is None or os.getpid() != self._process:
            return
        try:
            if (self.run_dir / "metrics.jsonl").exists():
                write_report(self.run_dir)
        except Exception as failure:  # the run's exit code stays what it is
            with suppress(OSError):
                tell(f"{self.run_dir / 'report.html'} not written: {reason_of(failure.__cause__ or failure)}")
