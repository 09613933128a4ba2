"""Where a rank's gradient shards are kept: the protocol that ZeRO-2 uses, and the store on the device.

A shard is FP32 and one-dimensional: this rank's part of one bucket of one gradient buffer of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Key(NamedTuple):
    """Name of a shard."""

    chunk: int
    buffer: int
    """Among the chunk's buffers, dense ones first."""
    bucket: int


class Ticket(Protocol):
    """Something that has been started."""

    def wait(self) -> None:
        """What is done next, on the host and on the device's current stream, comes after it."""
        ...


class GradientStore(Protocol):
    """Keeps sums of gradient shards from one burst to the next, until the optimizer has read them."""

    resident: bool
    """Whether shards lie in the device's memory, where `view` shows them."""

    def allocate(self, key: Key, numel: int, device: torch.device) -> None:
        """Make room for a shard whose parts will come from `device`."""
        ...

    def reset(self, keys: Iterable[Key]) -> None:
        """Forget what was accumulated: the next part is the first one."""
        ...

    def accumulate(self, key: Key, part: Tensor) -> Ticket:
        """Add a part to a shard; `part` may be overwritten once the ticket has been waited for."""
        ...

    def request(self, key: Key) -> None:
        """`fetch` of this shard is going to be called: start to read, if that takes long."""
        ...

    def fetch(self, key: Key, out: Tensor) -> None:
        """Write a shard into `out`, FP32 of its size on its device."""
        ...

    def view(self, key: Key) -> Tensor:
        """The shard itself; only of a resident store."""
        ...

    def scale(self, keys: Iterable[Key], factor: Tensor | float) -> None:
        """Multiply shards by a factor, before they are fetched next or now."""
        ...

    def device_bytes(self) -> int:
        """Bytes of device memory that the store holds."""
        ...


class StreamTicket:
    """Work that has been put on the current CUDA stream; nothing to wait for on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.current_stream().record_event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Let the current stream go on behind it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class DeviceStore:
    """Shards in device memory."""

    resident = True

    def __init__(self) -> None:
        self._shards: dict[Key, Tensor] = {}
        self._fresh: set[Key] = set()

    def allocate(self, key: Key, numel: int, device: torch.device) -> None:
        """See `GradientStore`."""
        self._shards[key] = torch.zeros(numel, dtype=torch.float32, device=device)
        self._fresh.add(key)

    def reset(self, keys: Iterable[Key]) -> None:
        """See `GradientStore`."""
        self._fresh.update(keys)

    def accumulate(self, key: Key, part: Tensor) -> Ticket:
        """See `GradientStore`."""
        if key in self._fresh:
            self._fresh.discard(key)
            self._shards[key].copy_(part)
        else:
            self._shards[key].add_(part)
        return StreamTicket(part.device)

    def request(self, key: Key) -> None:
        """Nothing to read."""

    def fetch(self, key: Key, out: Tensor) -> None:
        """See `GradientStore`."""
        out.copy_(self.view(key))

    def view(self, key: Key) -> Tensor:
        """See `GradientStore`."""
        assert key not in self._fresh, f"nothing has been accumulated in {key}"
        return self._shards[key]

    def scale(self, keys: Iterable[Key], factor: Tensor | float) -> None:
        """See `GradientStore`."""
        for key in keys:
            self.view(key).mul_(factor)

    def device_bytes(self) -> int:
        """See `GradientStore`."""
        return sum(shard.nbytes for shard in self._shards.values())
