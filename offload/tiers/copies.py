"""Copies beside the computation: one stream out of a device, one into it. On a CPU they are done at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

Mark = torch.cuda.Event | None
"""A point in a stream's work; None is long past."""


class Copies:
    """Runs copies in two queues. A copy begins behind the marks that it is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._out, self._in = (torch.cuda.Stream(device) if self._on_gpu else None for _ in range(2))

    def mark(self) -> Mark:
        """Where the current stream stands."""
        return torch.cuda.current_stream(self.device).record_event() if self._on_gpu else None

    def hold(self, mark: Mark) -> None:
        """Let the current stream go on behind a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def out(self, copy: Callable[[], object], *behind: Mark) -> Mark:
        """Queue what `copy` does from the device, return its end."""
        return self._queue(self._out, copy, behind)

    def into(self, copy: Callable[[], object], *behind: Mark) -> Mark:
        """Queue what `copy` does to the device, return its end."""
        return self._queue(self._in, copy, behind)

    def finish(self) -> None:
        """Wait for all copies."""
        for stream in (self._out, self._in):
            if stream is not None:
                stream.synchronize()

    def _queue(
        self, stream: torch.cuda.Stream | None, copy: Callable[[], object], behind: tuple[Mark, ...]
    ) -> Mark:
        if stream is None:
            copy()
            return None
        for mark in behind:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            copy()
        return stream.record_event(torch.cuda.Event(blocking=True))


def is_past(mark: Mark) -> bool:
    """Whether the work before a mark is done."""
    return mark is None or mark.query()


def wait(mark: Mark) -> None:
    """Let this thread wait until the work before a mark is done."""
    if mark is not None:
        mark.synchronize()


class Arrival:
    """A tensor that a copy fills. The memory is that of the stream which is current here."""

    def __init__(self, nbytes: int, copies: Copies) -> None:
        self.target: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device=copies.device)
        self.ready = copies.mark()
        """The copy must begin behind it: the memory may have been in use before."""
        self._home = torch.cuda.current_stream(copies.device) if copies.device.type == "cuda" else None
        self._copies = copies

    def take(self, end: Mark) -> torch.Tensor:
        """The tensor, for the current stream, behind the end of the copy."""
        assert self.target is not None
        target, self.target = self.target, None
        self._copies.hold(end)
        self._hold_home(end)
        return target

    def drop(self, end: Mark) -> None:
        """Give the memory back, to be used again behind the end of the copy."""
        if self.target is not None:
            self._hold_home(end)
            self.target = None

    def _hold_home(self, end: Mark) -> None:
        if self._home is not None and end is not None:
            self._home.wait_event(end)
