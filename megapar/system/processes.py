"""Processes that must not outlive the one that started them."""

import ctypes
import os
import signal
import sys


def end_with_parent(parent: int) -> bool:
    """Make the kernel kill this process when its parent ends, also while it is stopped. Linux only.

    `parent` is the parent's process number. Its thread that started this process counts as the parent. Returns False if
    the parent has ended already: then nothing would kill this process.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    return os.getppid() == parent
