"""Micro-batches for one data-parallel rank, read ahead by a thread, resumed exactly.

Letters: b micro-batch, s sequence.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from .packed import Sample

Batch = dict[str, torch.Tensor]
POLL_SECONDS = 0.1
# A read that hangs on a dead file system must not hold up the exit.
JOIN_SECONDS = 5.0


class Dataset(Protocol):
    """Anything that maps a sample's index to its arrays."""

    def __getitem__(self, index: int) -> Sample: ...


class BatchLoader:
    """Endless micro-batches: tokens, labels [b, s] int64, loss_mask [b, s] float32, sample_ids [b] int64.

    Of samples with images, also what `collate` says.

    A step takes the next micro_batch_size * num_microbatches * data_parallel_size samples. Rank r takes the
    r-th contiguous share of them, so the ranks' shares, joined, are the same list for every layout.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        prefetch: int = 2,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        assert micro_batch_size > 0 and num_microbatches > 0 and prefetch > 0
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.num_microbatches = num_microbatches
        self.data_parallel_rank = data_parallel_rank
        self.global_batch_size = micro_batch_size * num_microbatches * data_parallel_size
        self.consumed_samples = consumed_samples
        self.prefetch = prefetch
        self._microbatch = 0
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(prefetch)
        self._close: weakref.finalize | None = None
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch. Raises what reading it raised, now and on every later call."""
        if self._error is not None:
            raise self._error
        if self._close is None:
            self._start()
        batch = self._queue.get()
        if isinstance(batch, BaseException):
            self._error = batch
            raise batch
        self._microbatch += 1
        if self._microbatch == self.num_microbatches:
            self._microbatch = 0
            self.consumed_samples += self.global_batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the next micro-batch stands."""
        return {"consumed_samples": self.consumed_samples, "microbatch": self._microbatch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`. `microbatch` above 0 asks for the layout that saved it."""
        assert state["microbatch"] < self.num_microbatches
        self.close()
        self.consumed_samples = state["consumed_samples"]
        self._microbatch = state["microbatch"]

    def close(self) -> None:
        """End the reading thread; reading on starts another one at the same place."""
        if self._close is not None:
            self._close()
        self._close = None
        self._error = None
        self._queue = queue.Queue(self.prefetch)

    def _start(self) -> None:
        b, num_microbatches = self.micro_batch_size, self.num_microbatches
        first = self.consumed_samples + self.data_parallel_rank * b * num_microbatches
        ids = _sample_ids(first, self._microbatch, b, num_microbatches, self.global_batch_size)
        stop = threading.Event()
        thread = threading.Thread(
            target=_read_ahead, args=(self.dataset, ids, self._queue, stop), name="batches", daemon=True
        )
        # Also at the interpreter's exit, where a thread inside torch would crash it. The thread holds no
        # reference to the loader, so that a forgotten loader ends it too.
        self._close = weakref.finalize(self, _end, thread, stop)
        thread.start()


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into one micro-batch.

    Samples with images add patches [n, 3*14*14] float32 and grids [i, 3] int64 of all rows, and
    image_positions int64 into the b*s tokens; with answers, also answer_positions.
    """
    stacked = {
        key: torch.from_numpy(np.stack([sample[key] for sample in samples]))
        for key in ("tokens", "labels", "loss_mask")
    }
    stacked["sample_ids"] = torch.tensor([sample["sample_id"] for sample in samples])
    for key in ("patches", "grids"):
        if key in samples[0]:
            stacked[key] = torch.from_numpy(np.concatenate([sample[key] for sample in samples]))
    s = samples[0]["tokens"].size
    for key in ("image_positions", "answer_positions"):
        if key in samples[0]:
            moved = [row * s + sample[key] for row, sample in enumerate(samples)]
            stacked[key] = torch.from_numpy(np.concatenate(moved))
    return stacked


def _sample_ids(first: int, microbatch: int, b: int, num_microbatches: int, stride: int) -> Iterator[range]:
    while True:
        start = first + microbatch * b
        yield range(start, start + b)
        microbatch += 1
        if microbatch == num_microbatches:
            microbatch = 0
            first += stride


def _read_ahead(
    dataset: Dataset,
    ids: Iterator[range],
    output: queue.Queue[Batch | BaseException],
    stop: threading.Event,
) -> None:
    for indices in ids:
        item: Batch | BaseException
        try:
            item = collate([dataset[index] for index in indices])
        except BaseException as error:
            item = error
        while not stop.is_set():
            try:
                output.put(item, timeout=POLL_SECONDS)
                break
            except queue.Full:
                continue
        if stop.is_set() or isinstance(item, BaseException):
            return


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
