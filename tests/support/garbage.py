"""Garbage collection in a process of tests: what lasts is not looked at again and again.

Modules, collected tests and syntax trees are millions of objects. Each full collection looks at all of them, and in
files of short tests took a third of the time and more.
"""

import gc


def freeze() -> None:
    """Collect garbage, and leave all objects that are left out of later collections, here and in forks.

    A fork that collects garbage would write to, and so copy, every page of objects that it shares with this process.
    """
    gc.collect()
    gc.freeze()
