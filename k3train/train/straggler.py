"""Which rank makes the others wait: own time of every rank, told along with what the ranks exchange anyway.

Own time is that of the table's operations and of reading data, without the waits between them. Ranks of one
pipeline stage do the same work and are compared with each other. Where each has one, a rank is compared
with its own usual share of the step, so that what grew slow is found, and not what was from the start.
Operations hold the exchanges of expert and context parallelism, in which fast ranks of a group wait for slow
ones: there a group stands out, not the rank in it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.groups import Groups

from ..config import Config

FIELDS = 2
"""Operations, data."""
HISTORY = 64
"""Reports that make a rank's usual share."""


@dataclass(frozen=True)
class Report:
    """Own times of all ranks in a step, seconds, and each over the median of its peers."""

    operations: list[float]
    data: list[float]
    ratios: list[float]

    @property
    def slowest(self) -> int:
        """The rank with the largest ratio."""
        return max(range(len(self.ratios)), key=self.ratios.__getitem__)

    def metrics(self) -> dict[str, float]:
        """As they are logged."""
        slowest = self.slowest
        return {"rank_time_max_over_median": self.ratios[slowest], "rank_time_slowest": slowest}

    def describe(self, rank: int) -> str:
        """A rank's share of the step, in words."""
        return (
            f"{self.ratios[rank]:.2f} times the median of its peers: {self.operations[rank]:.3f} s in "
            f"operations, {self.data[rank]:.3f} s for data"
        )


def compare(
    operations: Sequence[float], data: Sequence[float], stages: Sequence[int], work: Sequence[float]
) -> Report:
    """Own times of all ranks against their peers'.

    Args:
        stages: pipeline rank of each rank.
        work: usual own time of each pipeline rank, in any unit; read where each has one rank.
    """
    own = [first + second for first, second in zip(operations, data, strict=True)]
    alone = len(set(stages)) == len(stages)
    if alone:
        own = [seconds / work[stage] for seconds, stage in zip(own, stages, strict=True)]
    peers: dict[int, list[float]] = {}
    for seconds, stage in zip(own, stages, strict=True):
        peers.setdefault(0 if alone else stage, []).append(seconds)
    # The lower one of two: the slower of two ranks is compared with the faster.
    medians = {place: statistics.median_low(times) for place, times in peers.items()}
    ratios = [
        seconds / max(medians[0 if alone else stage], 1e-9)
        for seconds, stage in zip(own, stages, strict=True)
    ]
    return Report(list(operations), list(data), ratios)


class Stragglers:
    """Collects own times and names ranks that stay slow."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self.groups, self.fault = groups, config.fault
        topology = groups.topology
        self.ranks = topology.world_size
        self.stages = [topology.coordinates(rank)["pipeline"] for rank in range(self.ranks)]
        self._shares: deque[list[float]] = deque(maxlen=HISTORY)
        self._streaks = [0] * self.ranks

    @property
    def active(self) -> bool:
        """Whether there is anybody to compare, and anybody asked."""
        return self.ranks > 1 and self.fault.straggler_ratio > 0

    def exchange(self, stop: bool, operations: float, data: float) -> tuple[bool, Report]:
        """Whether any rank was asked to stop, and the own times of all; one all-reduce over all ranks."""
        told = torch.zeros(1 + FIELDS * self.ranks, dtype=torch.float64)
        told[0] = stop
        place = 1 + FIELDS * self.groups.rank
        told[place : place + FIELDS] = torch.tensor([operations, data], dtype=torch.float64)
        told = told.to(self.groups.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        first, *times = told.tolist()
        own = [sum(times[place : place + FIELDS]) for place in range(0, len(times), FIELDS)]
        middle = max(statistics.median_low(own), 1e-9)
        self._shares.append([seconds / middle for seconds in own])
        work = [0.0] * len(own)
        for rank, stage in enumerate(self.stages):
            work[stage] = max(statistics.median(shares[rank] for shares in self._shares), 1e-9)
        return bool(first), compare(times[::FIELDS], times[1::FIELDS], self.stages, work)

    def judge(self, report: Report) -> list[tuple[int, str]]:
        """Ranks that have become, or are no longer, slow for good, with what to say of them."""
        found = []
        for rank, ratio in enumerate(report.ratios):
            slow, before = ratio >= self.fault.straggler_ratio, self._streaks[rank]
            self._streaks[rank] = before + 1 if slow else 0
            if slow and before + 1 == self.fault.straggler_reports:
                found.append((rank, f"is slow in {before + 1} reports in a row, {report.describe(rank)}"))
            if not slow and before >= self.fault.straggler_reports:
                found.append((rank, f"is no longer slow, {report.describe(rank)}"))
        return found
