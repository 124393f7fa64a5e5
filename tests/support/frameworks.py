"""The Python in which the frameworks run whose checkpoints are read, and the mark of tests that run one.

With MEGAPAR_FRAMEWORKS_PYTHON it is that of an environment of its own, with the extra `frameworks`: installed beside
accelerate and trl, DeepSpeed changes what these do.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import pytest

PYTHON = os.environ.get("MEGAPAR_FRAMEWORKS_PYTHON", sys.executable)
Test = TypeVar("Test", bound=Callable[..., None])


@cache
def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def runs(package: str, *, here: bool = False) -> Callable[[Test], Test]:
    """Mark a slow test that runs the framework `package`, such as megatron.core. It is skipped where that is not.

    With `here` the test's own processes import it.
    """
    where = "beside the tests" if here else "(MEGAPAR_FRAMEWORKS_PYTHON is a Python that has it)"
    reason = f"not run: needs {package}, in the extra `frameworks` {where}"
    absent = not _has(sys.executable if here else PYTHON, package.partition(".")[0])

    def mark(test: Test) -> Test:
        return pytest.mark.slow(pytest.mark.frameworks(pytest.mark.skipif(absent, reason=reason)(test)))

    return mark
