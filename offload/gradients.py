"""Gradient shards below the device: sums in host memory or in a file, added up beside the computation.

Fits `parallel.zero2.store.GradientStore`. A part comes from the device, or on a CPU from the slot itself; one
thread adds parts to what a shelf keeps, in the order of their arrival, so that sums are the same on any tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Never

import torch
from torch import Tensor

from .shelf import Shelf

STAGED = 2
"""Parts of one size that may be on their way from the device at once."""


class ShelvedGradients:
    """A gradient store over a shelf. Factors are kept apart and applied to what is fetched."""

    resident = False

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._worker = ThreadPoolExecutor(1, "gradients")
        self._fresh: set[Hashable] = set()
        self._factors: defaultdict[Hashable, list[Tensor | float]] = defaultdict(list)
        self._pending: list[Future[Any]] = []
        self._staging: defaultdict[int, list[_Staging]] = defaultdict(list)
        self.moved = {"in": 0, "out": 0}
        """Bytes that were accumulated and fetched."""

    def allocate(self, key: Hashable, numel: int, device: torch.device) -> None:
        """See `GradientStore`."""
        self._shelf.reserve(key, numel)
        self._fresh.add(key)

    def reset(self, keys: Iterable[Hashable]) -> None:
        """See `GradientStore`."""
        for key in keys:
            self._fresh.add(key)
            self._factors.pop(key, None)

    def accumulate(self, key: Hashable, part: Tensor) -> _AddTicket | _CopyTicket:
        """See `GradientStore`."""
        is_first = key in self._fresh
        self._fresh.discard(key)
        self.moved["in"] += part.nbytes
        if not part.is_cuda:
            return _AddTicket(self._submit(self._add, key, part, is_first))
        staging = self._staged(part)
        staging.memory.copy_(part, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
        staging.added = self._submit(self._add_copied, key, staging.memory, is_first, copied)
        return _CopyTicket(copied)

    def request(self, key: Hashable) -> None:
        """See `GradientStore`."""
        self._submit(self._shelf.request, key)

    def fetch(self, key: Hashable, out: Tensor) -> None:
        """See `GradientStore`. Raises OffloadError if the sum was lost."""
        assert key not in self._fresh, f"nothing has been accumulated in {key}"
        vector = self._submit(self._shelf.open, key).result()
        out.copy_(vector, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if out.is_cuda else None
        self._submit(self._release, key, copied)
        for factor in self._factors[key]:
            out.mul_(factor)
        self.moved["out"] += out.nbytes

    def view(self, key: Hashable) -> Never:
        """Shards are not on the device."""
        raise AssertionError(f"{key} is not in device memory")

    def scale(self, keys: Iterable[Hashable], factor: Tensor | float) -> None:
        """See `GradientStore`."""
        for key in keys:
            self._factors[key].append(factor)

    def device_bytes(self) -> int:
        """None of the device's."""
        return 0

    def _submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call; what failed since the last one is raised here."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            future.result()
        future = self._worker.submit(call, *args)
        self._pending.append(future)
        return future

    @torch.no_grad()
    def _add(self, key: Hashable, part: Tensor, is_first: bool) -> None:
        if is_first:
            self._shelf.blank(key).copy_(part)
        else:
            self._shelf.open(key).add_(part)
        self._shelf.commit(key)

    def _add_copied(self, key: Hashable, part: Tensor, is_first: bool, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        self._add(key, part, is_first)

    def _release(self, key: Hashable, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._shelf.release(key)

    def _staged(self, part: Tensor) -> _Staging:
        """Pinned memory for a part, free again once it was added."""
        pool = self._staging[part.numel()]
        if len(pool) < STAGED:
            pool.append(_Staging(torch.empty(part.numel(), dtype=torch.float32, pin_memory=True)))
        else:
            pool.append(pool.pop(0))
        if pool[-1].added is not None:
            pool[-1].added.result()
        return pool[-1]


class _Staging:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.added: Future[Any] | None = None


class _AddTicket:
    """The part itself is read by the thread."""

    def __init__(self, added: Future[Any]) -> None:
        self._added = added

    def wait(self) -> None:
        """Wait for the sum."""
        self._added.result()


class _CopyTicket:
    """The part has been copied off the device."""

    def __init__(self, copied: torch.cuda.Event) -> None:
        self._copied = copied

    def wait(self) -> None:
        """Let the current stream go on behind the copy."""
        torch.cuda.current_stream().wait_event(self._copied)
