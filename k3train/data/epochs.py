"""Documents packed whole into windows, anew every epoch: what samples with two costs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .joint import Segment, pack
from .packed import Sample
from .skips import Skips

# A window whose documents have all turned bad gives its place to the next one.
TRIES = 100


class EpochWindows(ABC):
    """Sample `i`: whole documents, as many as fit `max_tokens` and `max_patches`.

    Every epoch packs the documents in another order; `seed` None keeps their own.
    """

    def __init__(
        self, name: str, skips: Skips, documents: int, max_tokens: int, max_patches: int, seed: int | None
    ) -> None:
        self.name, self.skips = name, skips
        self.documents = documents
        self.max_tokens, self.max_patches = max_tokens, max_patches
        self.seed = seed
        # First sample of each epoch packed so far; how many an epoch has depends on its order.
        self._starts = [0]
        self._epoch = -1

    def __getitem__(self, index: int) -> Sample:
        """A dict of arrays with tokens, labels [s] int64, loss_mask [s] float32 and sample_id."""
        while self._starts[-1] <= index:
            self._pack(len(self._starts) - 1)
            self._starts.append(self._starts[-1] + self.windows)
        epoch = bisect_right(self._starts, index) - 1
        self._pack(epoch)
        first = index - self._starts[epoch]
        for number in range(first, first + TRIES):
            sample = self._sample(self._segments_of(number % self.windows))
            if sample["loss_mask"].any():
                return sample | {"sample_id": index}
        raise UserError(f"{self.name}: none of {TRIES} samples is usable ({self.skips.summary()})")

    @property
    def windows(self) -> int:
        """Samples of the epoch that was packed last."""
        return len(self._ends)

    @abstractmethod
    def _segments(self, order: npt.NDArray[np.int64]) -> Iterator[Segment]:
        """What is packed, when the documents stand in `order`."""

    @abstractmethod
    def _sample(self, segments: list[tuple[int, int, int]]) -> Sample:
        """The sample of (document, start, stop) of a window."""

    def _pack(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        order = np.arange(self.documents)
        if self.seed is not None:
            random = np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, epoch])
            order = random.permutation(self.documents)
        packed = list(pack(self._segments(order), self.max_tokens, self.max_patches))
        self._flat = np.array([segment[:3] for window in packed for segment in window], np.int64)
        self._ends = np.cumsum([len(window) for window in packed])
        self._epoch = epoch

    def _segments_of(self, window: int) -> list[tuple[int, int, int]]:
        first = int(self._ends[window - 1]) if window else 0
        return [
            (document, start, stop)
            for document, start, stop in self._flat[first : self._ends[window]].tolist()
        ]
