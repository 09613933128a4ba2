"""The most memory that tensors take in some code: the allocator's count on a GPU, storages on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(function: Callable[[], Any]) -> int:
    """Bytes that were allocated at most while the function ran, beyond what was there before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveStorages() as storages:
        function()
    return storages.peak


class LiveStorages(TorchDispatchMode):
    """Counts storages that operators make, from when they are first seen until they are freed.

    What an operator makes for itself inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(storage) for storage in _storages((args, kwargs))} - self._seen
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in self._seen | known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, size = id(storage), storage.nbytes()
        self._seen.add(name)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._free, name, size)

    def _free(self, name: int, size: int) -> None:
        self._seen.discard(name)
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
