"""Layout invariance, exact resume, chunks of one step, and a reading thread that ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from k3train.data.loader import Batch, BatchLoader


class Numbers:
    """Sample i holds i, and counts how often it was read."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.fail_at:
            raise OSError(f"sample {index} is gone")
        self.reads.append(index)
        tokens = np.arange(4) + 10 * index
        return {
            "tokens": tokens,
            "labels": tokens + 1,
            "loss_mask": np.ones(4, np.float32),
            "sample_id": index,
        }


def loader(dataset: Numbers | None = None, rank: int = 0, size: int = 1, **changes: Any) -> BatchLoader:
    settings = {"micro_batch_size": 2, "num_microbatches": 4 // size} | changes
    return BatchLoader(dataset or Numbers(), data_parallel_rank=rank, data_parallel_size=size, **settings)


def ids(batches: list[Batch]) -> list[int]:
    return torch.cat([batch["sample_ids"] for batch in batches]).tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_joined_are_the_same_list_for_every_layout(size: int) -> None:
    loaders = [loader(rank=rank, size=size) for rank in range(size)]
    steps = []
    for _ in range(3):
        steps += [i for entry in loaders for i in ids(list(islice(entry, 4 // size)))]
    assert steps == list(range(24))
    assert {entry.consumed_samples for entry in loaders} == {24}


def test_batch_shapes_and_types() -> None:
    batch = next(loader())
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((2, 4), torch.int64),
        "labels": ((2, 4), torch.int64),
        "loss_mask": ((2, 4), torch.float32),
        "sample_ids": ((2,), torch.int64),
    }
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


@pytest.mark.parametrize("rank", [0, 1])
def test_resume_is_exact_at_every_offset(rank: int) -> None:
    straight = [ids([batch]) for batch in islice(loader(rank=rank, size=2), 12)]
    for offset in range(12):
        before = loader(rank=rank, size=2)
        for _ in range(offset):
            next(before)
        # Read-ahead must not count as consumed.
        state = before.state_dict()
        assert state == {"consumed_samples": offset // 2 * 8, "microbatch": offset % 2}
        after = loader(rank=rank, size=2)
        next(after)
        after.load_state_dict(state)
        assert [ids([batch]) for batch in islice(after, 12 - offset)] == straight[offset:]


def test_resume_with_another_global_batch_goes_on_behind_it() -> None:
    assert ids([next(loader(consumed_samples=6, num_microbatches=2))]) == [6, 7]


def test_a_reading_error_is_raised_again_and_again() -> None:
    entry = loader(Numbers(fail_at=5))
    assert ids(list(islice(entry, 2))) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="sample 5 is gone"):
            next(entry)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_threads_end_with_close_and_when_forgotten() -> None:
    gc.collect()
    before = len(reading_threads())
    entry = loader()
    next(entry)
    assert len(reading_threads()) == before + 1
    entry.close()
    assert len(reading_threads()) == before
    assert ids([next(entry)]) == [2, 3]
    del entry
    gc.collect()
    assert len(reading_threads()) == before


def test_the_interpreter_exits_with_a_thread_waiting() -> None:
    code = """
import numpy as np
from k3train.data.loader import BatchLoader
class Ones:
    def __getitem__(self, index):
        ones = np.ones(4)
        return {"tokens": ones, "labels": ones, "loss_mask": ones, "sample_id": index}
entry = BatchLoader(
    Ones(), micro_batch_size=2, num_microbatches=1, data_parallel_rank=0, data_parallel_size=1
)
print(next(entry)["sample_ids"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")
