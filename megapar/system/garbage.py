"""Python's garbage collection between steps, at the same steps on all ranks.

Python collects whenever enough objects were made. That is at another time on each rank, and ranks wait for each other
in every layer, so a step would take the sum of their collections. After torchtitan's GarbageCollection.
"""

import gc
from types import TracebackType

EVERY = 50  # steps from one collection to the next


class GarbageCollection:
    """A context around training. No garbage is collected in it but by `after_step`."""

    def __init__(self) -> None:
        self._was_enabled = False
        self._others_froze = False
        self._frozen = False

    def __enter__(self) -> "GarbageCollection":
        self._was_enabled = gc.isenabled()
        self._others_froze = gc.get_freeze_count() > 0
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect garbage if `step` is a multiple of EVERY. After the first step of this process, freeze all objects.

        What the first step has made and imported lives as long as the run. Frozen, collections pass these objects over,
        and take milliseconds instead of half a second.
        """
        if not self._frozen:
            gc.collect()
            gc.freeze()
            self._frozen = True
        elif step % EVERY == 0:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._frozen and not self._others_froze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
