"""Ends processes with their parent."""

import ctypes
import os
import signal
import sys


def end_with_parent(parent: int) -> bool:
    """Make the kernel kill this process when its parent ends, also while it is stopped. Linux only.

    `parent` is the parent's process number. The kernel counts its forking thread as the parent. Returns False if
    the parent has ended already: nothing would kill this process then.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    return os.getppid() == parent
