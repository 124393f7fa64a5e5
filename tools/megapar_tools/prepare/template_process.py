"""Chat templates are rendered in a process of their own: no template hangs a preparation or fills the memory."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megapar.base.errors import starting

SECONDS = 10.0
"""CPU seconds of one rendering. A usual one takes less than a hundredth."""
MEMORY_BYTES = 1 << 30
LETTERS = 1 << 26
"""The most letters of a text."""
_CHILD = Path(__file__).with_name("template_child.py")


class TemplateError(Exception):
    """A template refuses a conversation, or it fails. The message says which of both, and why."""


class TemplateProcess:
    """A process that renders templates, started with the first text. Any thread may ask it.

    A process that was ended, by its limit of time or otherwise, is started again for the next text.
    """

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.read_clock = False
        """Whether a template has read the clock so far (strftime_now)."""

    def check(self, source: str) -> None:
        """Raise TemplateError if `source` is no template."""
        self._answer({"source": source, "marks": ["", ""]})

    def render(self, source: str, variables: Mapping[str, Any], marks: Sequence[str], now: datetime) -> str:
        """Return the text of the template `source`, with `marks` around what stands between generation tags.

        The template sees `variables`, of JSON's types, and `now` as the time of its clock.
        """
        request = {"source": source, "marks": list(marks), "now": now.isoformat(), "letters": LETTERS}
        answer = self._answer(request | {"variables": dict(variables)})
        self.read_clock |= answer["read_clock"]
        return answer["text"]

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        # As in transformers, a template sees only the type of what JSON has no form for, such as a date of Arrow.
        line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode()
        with self._lock:
            answer = self._exchange(line)
        for kind in ("refused", "fails"):
            if kind in answer:
                words = "refuses it" if kind == "refused" else kind
                raise TemplateError(f"{words}: {' '.join(answer[kind].split())[:500]}")
        return answer

    def _exchange(self, line: bytes) -> dict[str, Any]:
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # an interrupted exchange would leave its answer to the next request
            self._stop()
            raise
        if answer.endswith(b"\n"):
            return json.loads(answer)
        code = process.wait()
        self._stop()
        if code == -signal.SIGPROF:
            return {"fails": f"takes more than {self._seconds:g} seconds of the processor"}
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return {"fails": f"the process that renders it ended with {how}"}

    def _started(self) -> "subprocess.Popen[bytes]":
        # -P: a module beside the program must not stand for one of Python's.
        command = [sys.executable, "-P", str(_CHILD), str(self._seconds), str(MEMORY_BYTES)]
        with starting("the process that renders chat templates", "end other processes"):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        return process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what it did not read
                pipe.close()
