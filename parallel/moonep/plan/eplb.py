"""Periodic re-placement from loads of the past, to compare with: the idea of DeepSeek's EPLB.

Letters: R ranks, E experts, P = E/R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import Backend
from .types import stay


class Eplb:
    """Copies of the experts that were busiest lately; rows of an expert are split evenly over its copies.

    Not exactly balanced: the loads of a step differ from those of the past. One object for each layer.
    """

    name, balanced = "eplb", False

    def __init__(self, *, every: int = 100, slots: int = 2, move_homes: bool = False) -> None:
        """Re-place after each `every` observations, with `slots` copies on a rank beside its P experts.

        `move_homes` packs every expert anew, as EPLB does where weights stay where they are put. A rank may
        then compute more than P experts of others: such an allocation can be compared, not planned.
        """
        assert every >= 1 and slots >= 0
        self.every, self.slots, self.move_homes = every, slots, move_homes
        self._memory: dict[str, Tensor] = {}

    def __call__(self, counts: Tensor, backend: Backend) -> Tensor:
        load = counts.sum(0, dtype=torch.int32)
        if not self._memory:
            return stay(load, counts.shape[0])
        holders = self._memory["holders"].to(counts.device)
        copies = holders.sum(0, dtype=torch.int32)
        before = holders.cumsum(0, dtype=torch.int32) - holders
        return holders * (load // copies + (before < load % copies))

    def observe(self, counts: Tensor) -> None:
        """Add the counts [R, E] of a step; waits for the device when it re-places."""
        memory = self.memory(counts.shape[0], counts.shape[1], counts.device)
        memory["loads"] += counts.sum(0, dtype=torch.int64)
        memory["seen"] += 1
        if int(memory["seen"]) % self.every == 0:
            memory["placed"].copy_(memory["loads"])
            memory["loads"].zero_()
            self.place()

    def place(self) -> None:
        """Deal the copies that the loads `placed` ask for on this many ranks; waits for the device."""
        holders = self._memory["holders"]
        loads = self._memory["placed"].tolist()
        found = placement(loads, holders.shape[0], self.slots, move_homes=self.move_homes)
        holders.copy_(torch.tensor(found, dtype=torch.int32))

    def memory(self, ranks: int, experts: int, device: torch.device) -> dict[str, Tensor]:
        """All that it knows, in tensors that it changes in place: keep them, and fill them to go on.

        `loads` int64 [E] since the last placement, `placed` int64 [E] that it was made from, `seen` int64 [],
        `holders` int32 [R, E], 1 where a rank has the expert: what `place` makes of `placed`.
        """
        if not self._memory:
            self._memory = {
                "loads": torch.zeros(experts, dtype=torch.int64, device=device),
                "placed": torch.zeros(experts, dtype=torch.int64, device=device),
                "seen": torch.zeros((), dtype=torch.int64, device=device),
                "holders": torch.eye(ranks, dtype=torch.int32, device=device).repeat_interleave(
                    experts // ranks, dim=1
                ),
            }
        return self._memory


def placement(load: list[int], ranks: int, slots: int, *, move_homes: bool = False) -> list[list[int]]:
    """Loads [E] to holders [R, E]: 1 where a rank has the expert, at home or in a slot."""
    places = len(load) // ranks
    slots = min(slots, places)
    wanted = _copies(load, ranks, ranks * slots)
    share = [rows / count for rows, count in zip(load, wanted, strict=True)]
    racks = [_Rack(rank, places + slots) for rank in range(ranks)]
    order = sorted(range(len(load)), key=lambda e: (-share[e], e))
    if not move_homes:
        for expert in order:
            racks[expert // places].add(expert, share[expert])
    for expert in order:
        for _ in range(0 if move_homes else 1, wanted[expert]):
            able = [rack for rack in racks if len(rack.held) < rack.room and expert not in rack.held]
            if able:  # for its first copy there always is one
                min(able, key=lambda rack: (rack.busy, rack.rank)).add(expert, share[expert])
    return [[int(expert in rack.held) for expert in range(len(load))] for rack in racks]


class _Rack:
    """What a rank holds while experts are packed, the largest first."""

    def __init__(self, rank: int, room: int) -> None:
        self.rank, self.room, self.busy = rank, room, 0.0
        self.held: set[int] = set()

    def add(self, expert: int, rows: float) -> None:
        self.held.add(expert)
        self.busy += rows


def _copies(load: list[int], ranks: int, extra: int) -> list[int]:
    """How many ranks should have each expert: one more for the busiest copy, `extra` times."""
    copies = [1] * len(load)
    for _ in range(extra):
        expert = max(range(len(load)), key=lambda e: (load[e] / copies[e] if copies[e] < ranks else -1, -e))
        if copies[expert] == ranks or not load[expert]:
            break
        copies[expert] += 1
    return copies
