"""Handles the signals to stop a run and to end it.

SIGTERM and SIGUSR1 (Slurm's --signal=USR1@120) ask the run to stop: it saves at the end of a step and exits with 75. A
second request, SIGINT (Ctrl-C) and SIGHUP end the run at once. The exit code is then 128 plus the signal's number.
Before the first step there is nothing to save, so SIGTERM ends the run at once as well. SIGUSR2 prints the position of
each rank.

A signal ignored at the start of the program (by nohup, or for a shell's background job) stays ignored.
"""

import contextlib
import os
import select
import signal
import time
from types import FrameType

from megapar.launch.reporting import Interrupted

ASKING = (signal.SIGTERM, signal.SIGUSR1)
ENDING = (signal.SIGINT, signal.SIGHUP)
HANDLED = (*ASKING, *ENDING, signal.SIGUSR2)
# One request often arrives twice at the same time: from the launcher or the scheduler, and by the process group.
_SAME_REQUEST_SECONDS = 1.0


class Signals:
    """The signals received so far. Made in the main thread.

    Python runs a handler only when the main thread returns to Python. A collective may delay that for minutes. So each
    signal's number is also written to a pipe, `reader`, for another thread. Whichever thread reads a number judges it:
    each signal is judged once, without delay. With `raises` the main thread's handler raises Interrupted for a signal
    to end at once.
    """

    def __init__(self, raises: bool = True):
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self.reader, False)
        self.armed = False  # True from the first step on: a request is followed at the end of a step
        self.request = ""  # the name of the first signal that asked the run to stop
        self.ending = 0  # the number of the signal that ends this process at once; 0 for none
        self.wants_table = False  # SIGUSR2 has asked for the position of each rank
        self._asked_at = 0.0
        self._raises = raises
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in HANDLED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # the local launcher forks its ranks with them blocked

    def wake(self) -> None:
        """Wake up the reader of the pipe."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader as well
            os.write(self._writer, b"\0")

    def asked_within(self, seconds: float) -> bool:
        """Whether a signal asks the run to stop or to end. Waits for one for so many seconds."""
        end = time.monotonic() + seconds
        while True:
            select.select([self.reader], [], [], max(0.0, end - time.monotonic()))
            self.judge()
            if self.request or self.ending or time.monotonic() >= end:
                return bool(self.request or self.ending)

    def judge(self) -> None:
        """Judge all signals so far."""
        try:
            numbers = os.read(self.reader, 64)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGUSR2:
                self.wants_table = True
            elif number in ENDING:
                self.ending = self.ending or number
            elif number in ASKING:
                self._judge_request(number)

    def _judge_request(self, number: int) -> None:
        """Take a signal of ASKING for a request, for the repetition of one, or for the end of the process."""
        again = self.request != "" and time.monotonic() - self._asked_at > _SAME_REQUEST_SECONDS
        if again or (number == signal.SIGTERM and not self.armed):
            self.ending = self.ending or number
        elif not self.request:
            self.request = signal.Signals(number).name
            self._asked_at = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.judge()
        self.wake()
        if self.ending and self._raises:
            self._raises = False  # once: what runs while the stack unwinds must not be interrupted again
            raise Interrupted(self.ending)
