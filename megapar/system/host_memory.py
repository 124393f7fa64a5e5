"""The memory of this host that processes can still take."""

import re
from pathlib import Path

_LIMIT = "sys/fs/cgroup/memory.max"
_USED = "sys/fs/cgroup/memory.current"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that processes of this host can take without swapping, within the limit of its control group.

    None if the system does not tell. `root` is where its files are.
    """
    found = []
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        free_kib = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if free_kib:
            found.append(int(free_kib[1]) * 1024)
    limit, used = root / _LIMIT, root / _USED
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        found.append(max(int(limit.read_text()) - int(used.read_text()), 0))
    return min(found, default=None)
