"""AdamW's moments and FP32 master weights on a shelf, and on the device for a window of parameters at a time.

A window is one vector on the shelf: for each of its parameter shards the master weights, if it has any of its
own, and the two moments. While a window is updated the next one comes in and the one before goes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.shelf import FileShelf, Shelf

MOMENTS = ("exp_avg", "exp_avg_sq")
FP32_BYTES = 4


@dataclass(frozen=True)
class Held:
    """A parameter shard's part of a window."""

    inner: Any
    """torch's, or a fused AdamW."""
    main: Tensor
    has_master: bool
    """Whether `main` is a copy of the model's weights, and not a view of them."""

    @property
    def numel(self) -> int:
        """Of all its vectors together."""
        return self.main.numel() * (len(MOMENTS) + self.has_master)

    def tensors(self) -> list[Tensor]:
        """What is kept, in the order in which it lies in the window."""
        state = self.inner.state[self.main]
        return [*([self.main] if self.has_master else []), *(state[name] for name in MOMENTS)]


class StateWindow:
    """Parameter shards that are updated together."""

    def __init__(self, number: int, held: list[Held]) -> None:
        self.number, self.held = number, held
        self.sizes = [each.main.numel() for each in held]
        self.numel = sum(each.numel for each in held)

    @property
    def mains(self) -> list[Tensor]:
        """The parameter shards."""
        return [each.main for each in self.held]

    def point(self, vector: Tensor) -> None:
        """Let every tensor be its part of `vector`."""
        start = 0
        for each, size in zip(self.held, self.sizes, strict=True):
            for tensor in each.tensors():
                tensor.data = vector[start : start + size]
                start += size

    def park(self) -> None:
        """Let no tensor hold memory; to read one gives NaN."""
        for each, size in zip(self.held, self.sizes, strict=True):
            for tensor in each.tensors():
                tensor.data = torch.full((), float("nan")).expand(size)

    def collect(self, vector: Tensor) -> None:
        """Copy every tensor into its part of `vector`."""
        start = 0
        for each, size in zip(self.held, self.sizes, strict=True):
            for tensor in each.tensors():
                vector[start : start + size].copy_(tensor)
                start += size


class StateWindows:
    """Moves windows between a shelf and two device buffers."""

    def __init__(self, shelf: Shelf, window_bytes: int, device: torch.device) -> None:
        self._shelf, self._limit, self._device = shelf, window_bytes // FP32_BYTES, device
        self._windows: list[StateWindow] = []
        self._buffers: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def cut(self, parameters: list[Held]) -> list[StateWindow]:
        """Windows of parameter shards, each below the limit, or of one shard."""
        windows: list[list[Held]] = []
        room = 0
        for held in parameters:
            if not windows or held.numel > room:
                windows.append([])
                room = self._limit
            windows[-1].append(held)
            room -= held.numel
        made = [StateWindow(len(self._windows) + index, held) for index, held in enumerate(windows)]
        self._windows += made
        return made

    def fill(self) -> None:
        """Move everything to the shelf, moments as zero; after the last `cut`."""
        for window in self._windows:
            self._shelf.reserve(window.number, window.numel)
        for window in self._windows:
            for each in window.held:
                state = each.inner.state[each.main]
                for name in MOMENTS:
                    state[name] = torch.zeros(each.main.numel(), dtype=torch.float32)
                if isinstance(each.inner, torch.optim.Adam | torch.optim.AdamW):
                    state["step"] = torch.tensor(0.0)
            window.collect(self._shelf.blank(window.number))
            self._put(window)
        largest = max((window.numel for window in self._windows), default=0)
        self._buffers = [torch.empty(largest, device=self._device) for _ in range(min(2, len(self._windows)))]

    @property
    def device_bytes(self) -> int:
        """Of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def stream(self, windows: list[StateWindow]) -> Iterator[StateWindow]:
        """Each window in turn, its tensors on the device; what the caller makes of them is kept."""
        going: tuple[StateWindow, Any] | None = None
        arrived = self._bring(windows[0], 0) if windows else None
        for index, window in enumerate(windows):
            following = windows[index + 1 : index + 3]
            vector, ready = arrived  # type: ignore[misc]
            if following:
                arrived = self._bring(following[0], (index + 1) % 2)
            for later in following[1:]:
                self._shelf.request(later.number)
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            window.point(self._buffers[index % 2][: window.numel])
            yield window
            if going is not None:
                self._keep(*going)
            going = window, self._send(window, index % 2, vector)
        if going is not None:
            self._keep(*going)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Everything in host memory, parameter shards too, for a checkpoint to read or replace."""
        places = {}
        for window in self._windows:
            if isinstance(self._shelf, FileShelf):
                window.point(self._shelf.open(window.number).clone())
                self._shelf.release(window.number)
            for each in window.held:
                if not each.has_master:
                    places[each.main] = each.main.data
                    each.main.data = each.main.data.cpu()
        try:
            yield
        finally:
            for window in self._windows:
                window.collect(self._shelf.blank(window.number))
                self._put(window)
            for main, place in places.items():
                place.copy_(main.data)
                main.data = place

    def _bring(self, window: StateWindow, buffer: int) -> tuple[Tensor, Any]:
        """Copy a window to the device: (its vector on the host, event)."""
        vector = self._shelf.open(window.number)
        target = self._buffers[buffer][: window.numel]
        if self._stream is None:
            target.copy_(vector)
            return vector, None
        with torch.cuda.stream(self._stream):
            target.copy_(vector, non_blocking=True)
            return vector, self._stream.record_event()

    def _send(self, window: StateWindow, buffer: int, vector: Tensor) -> Any:
        """Copy a window back to the host: an event."""
        source = self._buffers[buffer][: window.numel]
        if self._stream is None:
            vector.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            vector.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _keep(self, window: StateWindow, sent: Any) -> None:
        if sent is not None:
            sent.synchronize()
        self._put(window)

    def _put(self, window: StateWindow) -> None:
        """The host's vector is whole: keep it, and let go of the device's copies."""
        self._shelf.commit(window.number)
        if isinstance(self._shelf, FileShelf):
            window.park()
        else:
            window.point(self._shelf.open(window.number))
