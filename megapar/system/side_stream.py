"""Work of a device beside its current stream, such as copies to and from host memory."""

from collections.abc import Callable

import torch


class Reached:
    """A point in the work of a side stream. Without `event` everything before it has been done already."""

    def __init__(self, event: torch.Event | None = None):
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for it. The host goes on."""
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether the device has come to it."""
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """A stream of `device` for work beside its current stream. The host's own work is done at once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.Stream | None = None

    def queue(self, work: Callable[[], None]) -> Reached:
        """Queue `work` behind what the current stream and this one have queued so far. Returns its end.

        Memory used by it may be freed or written once the current stream, or the host, has waited for that.
        """
        if self._device.type == "meta":
            return Reached()  # there is nothing to copy
        if self._device.type == "cpu":
            work()
            return Reached()
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work()
            return Reached(self._stream.record_event())
