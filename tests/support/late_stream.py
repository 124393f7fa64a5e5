"""A side stream that does its work as late as a device may."""

from collections.abc import Callable

import torch

from megapar.system.side_stream import Reached, SideStream


class LateStream(SideStream):
    """Does its work when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._queued: list[Callable[[], None]] = []
        self.done = 0

    def queue(self, work: Callable[[], None]) -> Reached:
        self._queued.append(work)
        return LateEnd(self, len(self._queued))

    def do(self, number: int) -> None:
        """Do the work up to the given one, in the order of the stream."""
        for work in self._queued[self.done : number]:
            work()
        self.done = max(self.done, number)


class LateEnd(Reached):
    """An end of work of a late stream."""

    def __init__(self, stream: LateStream, number: int):
        super().__init__()
        self._stream = stream
        self._number = number

    def wait(self) -> None:
        self._stream.do(self._number)

    synchronize = wait


class NotAwaited(LateStream):
    """The work of the functions whose names contain `skipped` is not waited for."""

    def __init__(self, skipped: str) -> None:
        super().__init__()
        self._skipped = skipped

    def queue(self, work: Callable[[], None]) -> Reached:
        end = super().queue(work)
        return Reached() if self._skipped in work.__qualname__ else end
