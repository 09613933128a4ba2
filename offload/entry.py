"""A storage that autograd has saved parts of, wherever its bytes are, and handles on tensors in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .ledger import Ledger

CHANGED = (
    "a tensor that was saved for backward at {site} has been changed in place since: "
    "it is at version {now}, version {then} was saved"
)


class Stored(Protocol):
    """Bytes on a tier; see `offload.tiers`."""

    def wait_stored(self) -> None: ...

    def is_stored(self) -> bool: ...

    def fetch(self) -> None: ...

    def take(self) -> Tensor: ...

    def free(self) -> None: ...


class Survivors(Protocol):
    """Who keeps memory that is still being copied when its entry goes; see `leaving`."""

    def outlive(self, parcel: Stored, content: Tensor, place: str) -> None: ...


class Codec(Protocol):
    """Lossy storage of floating-point numbers as bytes; see `offload.fp8`."""

    def encode(self, source: Tensor) -> Tensor: ...

    def decode(self, buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor: ...


class Entry:
    """One storage: on the device as it was, on the device in FP8, or on a tier and at times back from there.

    Whoever holds a handle holds the entry; with the last one its bytes are given up everywhere.
    """

    __slots__ = (
        "__weakref__", "_base", "_codec", "code", "dtype", "is_ahead", "ledger", "nbytes", "parcel",
        "pending", "sent", "site", "source", "survivors", "version",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, site: str, tensor: Tensor) -> None:
        self.ledger, self.site, self.dtype = ledger, site, tensor.dtype
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.source: Tensor | None = whole(tensor)
        self.code: Tensor | None = None
        self.parcel: Stored | None = None
        self.pending: dict[Scope, int] = {}
        """Handles that a scope's backward has still to use."""
        self.is_ahead = False
        """Brought back before it was asked for."""
        self.sent = 0
        """Bytes that its tier was given."""
        self.survivors: Survivors | None = None
        self._codec: Codec | None = None
        self._base: Tensor | None = None
        ledger.add("device", self.nbytes)

    def encode(self, codec: Codec) -> Tensor:
        """Its bytes in FP8, from now on; what is on the device may go."""
        assert self.source is not None
        self._codec = codec
        self.code = codec.encode(self.source.view(self.dtype))
        self.ledger.add("fp8", self.code.numel())
        self._forget_source()
        return self.code

    def send(self, parcel: Stored | None, survivors: Survivors) -> None:
        """Note that `content` is being copied to a tier; None: no tier takes it."""
        if parcel is not None:
            self.parcel, self.survivors = parcel, survivors
            self.sent = self.content.numel()

    @property
    def content(self) -> Tensor:
        """What of it is on the device, as a tier takes it: uint8 [n]."""
        content = self.source if self.code is None else self.code
        assert content is not None
        return content

    @property
    def is_away(self) -> bool:
        """Whether nothing of it is on the device."""
        return self.source is None and self.code is None and self._base is None

    def leave(self) -> None:
        """Give up its memory on the device: the current stream goes on behind the copy to its tier."""
        assert self.parcel is not None
        self.parcel.wait_stored()
        if self.source is not None:
            self._check_version()
            self._forget_source()
        if self.code is not None:
            self.ledger.add("fp8", -self.code.numel())
            self.code = None

    def fetch(self) -> None:
        """Start to bring it back."""
        assert self.parcel is not None
        self.parcel.fetch()

    def restored(self) -> Tensor:
        """uint8 [nbytes] on the device. Raises OffloadError if its tier has lost it."""
        if self.source is not None:
            self._check_version()
            return self.source
        if self._base is None:
            self._base = self._brought_back()
            self.ledger.add("window", self.nbytes)
        return self._base

    def _brought_back(self) -> Tensor:
        if self.code is not None:
            stored = self.code
        else:
            assert self.parcel is not None
            stored = self.parcel.take()
        if self._codec is None:
            return stored[: self.nbytes]
        numel = self.nbytes // self.dtype.itemsize
        return self._codec.decode(stored, numel, self.dtype).view(torch.uint8)

    def drop(self) -> None:
        """Forget what was brought back; handles out there keep their own hold of it."""
        if self._base is not None:
            self._base = None
            self.ledger.add("window", -self.nbytes)

    def _check_version(self) -> None:
        assert self.source is not None
        if self.source._version != self.version:
            now, then = self.source._version, self.version
            raise RuntimeError(CHANGED.format(site=self.site, now=now, then=then))

    def _forget_source(self) -> None:
        self.source = None
        self.ledger.add("device", -self.nbytes)

    def __del__(self) -> None:
        self.drop()
        if self.parcel is not None and not self.is_away:
            # The memory must not be used anew while it is being copied.
            assert self.survivors is not None
            self.survivors.outlive(self.parcel, self.content, "device" if self.code is None else "fp8")
            return
        if self.source is not None:
            self._forget_source()
        if self.code is not None:
            self.ledger.add("fp8", -self.code.numel())
        if self.parcel is not None:
            self.parcel.free()


class Scope:
    """What one forward of a model chunk saved for its backward."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.entries: list[ref[Entry]] = []
        """In the order in which they were saved."""
        self.following = -1
        """Index of the next entry to bring back; they come in the opposite order."""

    def add(self, entry: Entry) -> None:
        """One more handle of an entry."""
        if self not in entry.pending:
            entry.pending[self] = 0
            self.entries.append(ref(entry))
        entry.pending[self] += 1


class Handle:
    """A tensor that was saved: part of an entry."""

    __slots__ = ("_is_used", "_part", "entry", "scope")

    def __init__(self, entry: Entry, tensor: Tensor, scope: Scope | None) -> None:
        self.entry, self.scope, self._part = entry, scope, Part.of(tensor)
        self._is_used = False
        if scope is not None:
            scope.add(entry)

    def tensor(self) -> Tensor:
        """The tensor, over whatever memory its entry has on the device now."""
        return self._part.over(self.entry.restored())

    def use(self) -> bool:
        """Note that backward has asked for it: whether it was the scope's last handle of its entry."""
        if self._is_used or self.scope is None or self.scope not in self.entry.pending:
            return False
        self._is_used = True
        self.entry.pending[self.scope] -= 1
        if self.entry.pending[self.scope]:
            return False
        del self.entry.pending[self.scope]
        return True


class Part(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Part:
        """Of a tensor."""
        return Part(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: Tensor) -> Tensor:
        """The tensor, over uint8 [bytes of such a storage]."""
        return storage.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def whole(tensor: Tensor) -> Tensor:
    """uint8 [bytes of the storage] of a tensor, which knows of later changes in place as it does."""
    numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((numel,), (1,), 0).view(torch.uint8)
