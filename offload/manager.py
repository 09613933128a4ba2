"""Everything that a model saves for backward, where a policy says that it lies meanwhile.

A forward runs inside `forward(key)`, its backward inside `backward(key)`; what autograd saves in the former
goes through here (`torch.autograd.graph.saved_tensors_hooks`). The site that is named where a storage is
saved first decides: it stays, is kept as FP8, moves to a tier, or is computed again. A storage is stored
once, however many views of it are saved and whoever saves them, and given up with the last user.

Bytes on their way out, and bytes brought back ahead of their use, are bounded by a window each. When the
former is full, the compute stream waits for the oldest copy; what is still in there when its backward comes
is used as it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .entry import Codec, Entry, Handle, Scope, Stored
from .leaving import Leaving
from .ledger import Ledger
from .policy import Policy, Storage
from .recompute import Region, tensors_of
from .sites import NOWHERE, Place, activated


class Tiers(Protocol):
    """Where bytes go that leave the device; see `offload.tiers`."""

    def put(self, tier: str, source: Tensor) -> Stored | None:
        """Start to store uint8 [n] on a tier or the next that may stand in; None: it has to stay."""
        ...

    def used(self) -> dict[str, int]:
        """Bytes on each tier now."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Packer(Protocol):
    """What becomes of the tensors that are saved."""

    def pack(self, tensor: Tensor) -> Any:
        """What stands for the tensor: the tensor, or something with `unpack`."""
        ...

    def milestone(self) -> Any:
        """The same for a place in the forward without a tensor; None: nothing is run again to get there."""
        ...


class ActivationManager:
    """One rank's. Used by one thread at a time: the one of the forwards, and autograd's in a backward."""

    def __init__(
        self,
        policy: Policy,
        tiers: Tiers,
        *,
        parameters: Iterable[Tensor],
        device: torch.device,
        codec: Codec,
        coded: torch.dtype,
        window: int,
        smallest: int,
        held: str = "other",
        random: bool = True,
    ) -> None:
        """Start with nothing held.

        Args:
            parameters: tensors whose storages are never touched.
            codec: of what the policy keeps in FP8.
            coded: the only dtype that is kept in FP8: the model's; statistics in other ones stay exact.
            window: bytes that may be on their way in each direction.
            smallest: bytes below which a storage is left alone.
            held: site of what is kept between forwards.
            random: whether functions that run again may draw random numbers, as dropout does.
        """
        self._tiers, self._codec, self._coded = tiers, codec, coded
        self.rule = cache(policy.storage)
        """Storage of a site."""
        self._device, self._window, self._smallest = device, window, smallest
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.ledger = Ledger(tiers.used)
        self.saved: dict[str, int] = {}
        """Bytes of the storages that each site saved since `begin_step`."""
        self._held = held
        self.has_randomness = random
        self._entries: dict[int, _Known] = {}
        self._results: dict[int, _Result] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._scopes: dict[Hashable, Scope] = {}
        self._current: Scope | None = None
        self._queue: deque[Scope] = deque()
        self._leaving = Leaving(self.ledger, window)
        self._ahead_bytes = 0
        self._thread = threading.local()

    # Forward

    @contextmanager
    def forward(self, key: Hashable) -> Iterator[None]:
        """What is saved inside is of scope `key`."""
        assert key not in self._scopes, f"{key} has not been through its backward"
        scope = self._scopes[key] = Scope(key)
        with self.hooks(_Storing(self, scope)):
            yield
        # A result that lives on is like any other tensor to those who save it later.
        self._results.clear()
        self._names.clear()

    @contextmanager
    def hooks(self, packer: Packer) -> Iterator[None]:
        """Let `packer` have what this thread saves meanwhile."""
        with (
            activated(self),
            self.packing(packer),
            torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack),
        ):
            yield

    @contextmanager
    def packing(self, packer: Packer) -> Iterator[None]:
        """Put `packer` before the present one."""
        self._stack.append(packer)
        try:
            yield
        finally:
            self._stack.pop()

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook."""
        if not self._is_left_alone(tensor):
            return self._stack[-1].pack(tensor)
        # With its history, a result would hold the very node that saves it.
        return tensor.detach()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """See `sites.Keeper`."""
        with self.at(self.place.inner(name)):
            yield

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Be at a place of the model."""
        before = self.place
        self._thread.place = place
        try:
            yield
        finally:
            self._thread.place = before

    def named(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        """See `sites.Keeper`."""
        full = self.place.region(name).site
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._names.get(storage._cdata)
            if known is None or known[0].expired():
                self._names[storage._cdata] = StorageWeakRef(storage), full

    def milestone(self) -> Callable[[], None]:
        """See `sites.Keeper`."""
        marks = [packer.milestone() for packer in self._stack]
        return partial(_reach, [mark for mark in marks if mark is not None])

    def region(
        self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...], keep_results: bool
    ) -> Any:
        """See `sites.Keeper`."""
        place = self.place.region(name)
        with self.at(place):
            if not self.rule(place.site).recompute or not torch.is_grad_enabled():
                return function(*inputs)
            region = Region(self, place, function, inputs)
            result = region.first_run(inputs)
        if not keep_results:
            self._note_results(region, inputs, tensors_of(result))
        return result

    def _note_results(self, region: Region, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
        given = {value.untyped_storage()._cdata for value in inputs if isinstance(value, Tensor)}
        for index, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                known = _Result(StorageWeakRef(storage), tensor._version, region, index)
                self._results[storage._cdata] = known

    def result_of(self, tensor: Tensor) -> Any:
        """A handle on the result of a region that a tensor lies in, or None."""
        known = self._results.get(tensor.untyped_storage()._cdata)
        if known is None or known.storage.expired() or known.version != tensor._version:
            return None
        return known.region.result(known.number, tensor)

    @property
    def _stack(self) -> list[Packer]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        return self._thread.stack  # type: ignore[no-any-return]

    @property
    def place(self) -> Place:
        """Where in the model this thread is."""
        return getattr(self._thread, "place", NOWHERE)

    def _is_left_alone(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return True
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return True
        storage = tensor.untyped_storage()
        return storage.nbytes() < self._smallest or storage._cdata in self._parameters

    # Storages

    def handle(self, tensor: Tensor, scope: Scope | None) -> Handle:
        """A handle on a tensor, whose storage is stored now unless it is already."""
        storage = tensor.untyped_storage()
        known = self._entries.get(storage._cdata)
        entry = None if known is None or known.storage.expired() else known.entry()
        if entry is None or known is None or known.version != tensor._version:
            entry = self._store(tensor)
        return Handle(entry, tensor, scope)

    def _store(self, tensor: Tensor) -> Entry:
        site = self._name_of(tensor)
        entry = Entry(self.ledger, site, tensor)
        self.saved[site] = self.saved.get(site, 0) + entry.nbytes
        self._know(tensor, entry)
        rule = self.rule(site)
        if rule.fp8 and tensor.dtype == self._coded:
            entry.encode(self._codec)
        if rule.tier is not None:
            self._send(entry, rule)
        return entry

    def _send(self, entry: Entry, rule: Storage) -> None:
        assert rule.tier is not None
        entry.send(self._tiers.put(rule.tier, entry.content), self._leaving)
        if entry.parcel is not None:
            self._leaving.add(entry)

    def _know(self, tensor: Tensor, entry: Entry) -> None:
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = _Known(StorageWeakRef(storage), tensor._version, ref(entry))

    def _name_of(self, tensor: Tensor) -> str:
        known = self._names.get(tensor.untyped_storage()._cdata)
        if known is not None and not known[0].expired():
            return known[1]
        return self.place.site

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor for later forwards as its site says; the answer gives it back."""
        if self._is_left_alone(tensor):
            return lambda: tensor
        with self.at(Place(name=self._held)):
            handle = self.handle(tensor, None)

        def get() -> Tensor:
            found = handle.tensor()
            # Those who save it next shall find that it is stored.
            self._know(found, handle.entry)
            if not handle.entry.pending.keys() & {self._current}:
                handle.entry.drop()
            return found

        return get

    # Backward

    @contextmanager
    def backward(self, key: Hashable) -> Iterator[None]:
        """The backward of scope `key` runs inside."""
        self._enter(self._scopes[key])
        yield
        self._leave()

    def release(self, key: Hashable) -> None:
        """The backward of `key` is far away: give up what has been copied out by now."""
        self._leaving.release()

    def prefetch(self, key: Hashable) -> None:
        """The backward of `key` comes soon."""
        scope = self._scopes[key]
        self._line_up(scope)
        self._queue.append(scope)
        self._advance()

    def used(self, handle: Handle) -> None:
        """Backward has got a tensor from its handle."""
        scope = handle.scope
        if scope is not None and scope is not self._current:
            # Under a schedule that does not say when a backward begins.
            if self._current is not None:
                self._leave()
            self._enter(scope)
        entry = handle.entry
        is_last = handle.use()
        self._not_ahead(entry)
        if is_last:
            entry.drop()
            if not entry.pending:
                self._leaving.stay(entry)
        self._leaving.settle()
        self._advance()

    def _enter(self, scope: Scope) -> None:
        self._current = scope
        if scope in self._queue:
            self._queue.remove(scope)
        else:
            self._line_up(scope)
        self._queue.appendleft(scope)
        self._advance()

    @staticmethod
    def _line_up(scope: Scope) -> None:
        scope.following = len(scope.entries) - 1

    def _leave(self) -> None:
        """The current scope has been through its backward."""
        scope, self._current = self._current, None
        assert scope is not None
        if scope in self._queue:
            self._queue.remove(scope)
        for reference in scope.entries:
            entry = reference()
            if entry is not None:
                entry.pending.pop(scope, None)
                self._not_ahead(entry)
                entry.drop()
        del self._scopes[scope.key]

    def _not_ahead(self, entry: Entry) -> None:
        if entry.is_ahead:
            entry.is_ahead = False
            self._ahead_bytes -= entry.sent

    def _advance(self) -> None:
        """Bring back what is needed next, as far as the window has room."""
        while self._queue:
            scope = self._queue[0]
            while scope.following >= 0:
                entry = scope.entries[scope.following]()
                if entry is not None and entry.pending.get(scope) and not self._bring(entry, scope):
                    return
                scope.following -= 1
            self._queue.popleft()

    def _bring(self, entry: Entry, scope: Scope) -> bool:
        """Whether an entry is here, on its way, or need not be moved; False: the window is full."""
        is_leaving = entry in self._leaving
        if entry.is_ahead or entry.parcel is None or not (entry.is_away or is_leaving):
            return True
        if is_leaving and scope is self._current:
            # It is used before anything else leaves: the other window has had room for it.
            self._leaving.stay(entry)
            return True
        if self._ahead_bytes and self._ahead_bytes + entry.sent > self._window:
            return False
        if is_leaving:
            self._leaving.stay(entry)
        else:
            entry.fetch()
        entry.is_ahead = True
        self._ahead_bytes += entry.sent
        return True

    # Steps

    def mark(self, operation: str) -> None:
        """An operation of the schedule has ended."""
        self.ledger.mark(operation)

    def begin_step(self, *, record: bool = False) -> None:
        """Start a step's counts; with `record`, `ledger.series` too."""
        self.saved = {}
        self.ledger.peak.clear()
        self.ledger.series = [] if record else None

    def close(self) -> None:
        """Give the tiers back; nothing may be held any more."""
        self.end_step()
        self._tiers.close()

    def end_step(self) -> None:
        """Forget whatever a step left behind, as one does that was broken off."""
        if self._current is not None:
            self._leave()
        self._queue.clear()
        self._leaving.clear()
        self._ahead_bytes = 0
        self._scopes.clear()
        self._results.clear()
        self._names.clear()
        self._entries = {key: known for key, known in self._entries.items() if known.entry() is not None}


class _Known(NamedTuple):
    """A storage on the device and the entry that has its bytes."""

    storage: StorageWeakRef
    version: int
    entry: ref[Entry]


class _Result(NamedTuple):
    """A storage that a region's result lies in."""

    storage: StorageWeakRef
    version: int
    region: Region
    number: int


class _Storing:
    """Stores what a forward saves."""

    def __init__(self, manager: ActivationManager, scope: Scope) -> None:
        self._manager, self._scope = manager, scope

    def pack(self, tensor: Tensor) -> Any:
        """See `Packer`."""
        found = self._manager.result_of(tensor)
        if found is not None:
            return found
        return _Saved(self._manager, self._manager.handle(tensor, self._scope))

    def milestone(self) -> None:
        """See `Packer`."""


class _Saved:
    """A tensor in a graph of autograd."""

    __slots__ = ("_handle", "_manager")

    def __init__(self, manager: ActivationManager, handle: Handle) -> None:
        self._manager, self._handle = manager, handle

    def unpack(self) -> Tensor:
        """See `recompute.Kept`."""
        tensor = self._handle.tensor()
        self._manager.used(self._handle)
        return tensor


def _reach(marks: Iterable[Any]) -> None:
    for mark in marks:
        mark.unpack()


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.unpack()  # type: ignore[no-any-return]
