"""Huge pages for a process of tests: a fork copies a table of its pages, and they are 500 times fewer then.

With all tests imported, a process has 90,000 pages of 4 KiB. To fork it and to end the fork took 25 to 40 ms of a core.
In huge pages it is 6 ms. What is written later is torn into small pages again; after many tests it is about 10 ms. A
suite makes thousands of forks.
"""

import ctypes
from pathlib import Path

_SIZE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1


def use_huge_pages() -> None:
    """Put the memory that this process has written into huge pages. Where the system gives none, nothing changes."""
    maps = Path("/proc/self/maps")
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not maps.exists():
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps.read_text().splitlines():
        place, rights, _, _, _, *name = line.split()
        first, last = (int(word, 16) for word in place.split("-"))
        start, end = -(-first // _SIZE) * _SIZE, last // _SIZE * _SIZE
        if rights == "rw-p" and name in ([], ["[heap]"]) and end > start:
            madvise(start, end - start, _COLLAPSE)
