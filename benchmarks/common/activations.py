"""Memory and time of forward and backward, round by round over several ways to hold activations.

Letters: b batch, s sequence.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from k3train.ops.packing import Packing

OUT_OF_MEMORY = "out of memory"


@dataclass
class Samples:
    """What was measured of one way."""

    seconds: list[float] = field(default_factory=list)
    resting: int = 0
    """Bytes on the device before the step."""
    peak: int = 0
    """The most during it."""
    failed: str = ""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        times = " ".join(f"{value:.3f}" for value in self.seconds) or "-"
        return self.failed or f"{times} s, peak {self.peak / 1e9:.1f} GB, before {self.resting / 1e9:.1f} GB"

    @property
    def activations(self) -> int:
        """Bytes that the step needed beyond what lay there."""
        return self.peak - self.resting


def batches(count: int, b: int, s: int, vocabulary: int, device: torch.device) -> list[dict[str, Any]]:
    """Micro-batches of random tokens, each row one document."""
    generator = torch.Generator().manual_seed(s)
    found = []
    for _ in range(count):
        tokens = torch.randint(vocabulary, (b, s + 1), generator=generator).to(device)
        found.append(
            {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": torch.ones(b, s, device=device),
                "sample_ids": torch.arange(b, device=device),
                "packing": Packing.single(b, s, device),
            }
        )
    return found


def measure(step: Callable[[], None], samples: Samples, *, warm_up: bool) -> None:
    """One step, whose time counts unless it warms up; running out of memory ends the row, not the run."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        samples.resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    if not fits(step):
        samples.failed = OUT_OF_MEMORY
        return
    if cuda:
        samples.peak = max(samples.peak, torch.cuda.max_memory_allocated())
    if not warm_up:
        samples.seconds.append(time.perf_counter() - start)


def fits(step: Callable[[], None]) -> bool:
    """Whether a step ends within the device's memory."""
    try:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True


def release() -> None:
    """Give back what nobody uses, to the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def longest(works: Callable[[int], bool], start: int, limit: int, grain: int, seconds: float) -> int:
    """The largest multiple of `grain` up to `limit` that works: doubled from `start`, then the gap halved.

    0 where none does. Ends with what is known when `seconds` are over.
    """
    end = time.monotonic() + seconds
    good, bad, tried = 0, 0, start
    while time.monotonic() < end and tried > good:
        if works(tried):
            good = tried
        else:
            bad = tried
        tried = (good + bad) // 2 // grain * grain if bad else min(2 * good, limit)
    return good
