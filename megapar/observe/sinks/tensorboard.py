"""Writes the numbers of a run to run_dir/tensorboard."""

import secrets
import threading
from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from megapar.base.errors import reason_of, storing
from megapar.observe.sinks.base import Line, RunInfo
from megapar.system.say import tell


class TensorBoard:
    """A sink. Its folder is opened with it. Raises StorageError if that cannot be done: the disk is the run's own."""

    name = "TensorBoard"

    def __init__(self, run: RunInfo):
        self._writer: SummaryWriter | None = None
        threading.excepthook = self._thread_failed
        folder = run.run_dir / "tensorboard"
        with storing(folder):
            # TensorBoard shows no step after this one of an earlier start. The file's name has random letters: who else
            # may write in the folder could put a link under a name of time, host and process.
            self._writer = SummaryWriter(
                str(folder), purge_step=run.first_step + 1, filename_suffix=f".{secrets.token_hex(4)}"
            )
        self._failed = False

    def open(self) -> str:
        """Nothing is left to do."""
        return ""

    def write(self, lines: Sequence[Line]) -> None:
        """Write the numbers of each line, those of tables apart."""
        assert self._writer is not None
        for line in lines:
            for key, value in line.items():
                if not isinstance(value, int | float) or key == "step":
                    continue
                try:
                    self._writer.add_scalar(key, value, line["step"])
                except OSError as error:  # of SummaryWriter's thread, which ends with its first error
                    self._tell(error)
                    return

    def close(self) -> None:
        """Write what is queued."""
        assert self._writer is not None
        try:
            self._writer.close()
        except OSError as error:
            self._tell(error)

    def abandon(self) -> None:
        """Nothing holds up the end of the process."""

    def _tell(self, error: BaseException | None) -> None:
        if not self._failed and self._writer is not None:
            self._failed = True
            tell(
                f"{self._writer.log_dir}: nothing more is written ({reason_of(error)}); the run goes on, "
                "with metrics.jsonl"
            )

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """A threading.excepthook: one line for a failure of SummaryWriter's thread, the trace of any other."""
        if failure.thread is None or type(failure.thread).__name__ != "_AsyncWriterThread":
            threading.__excepthook__(failure)
        # While SummaryWriter is made, its constructor raises the same error.
        elif self._writer is not None:
            self._tell(failure.exc_value)
