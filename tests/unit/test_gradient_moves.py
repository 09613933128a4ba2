"""What gradient sums below the device move, against the bytes of a real store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3train import gradient_moves, step_end
from k3train.config import (
    ClusterConfig,
    Config,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from k3train.layout import layout_of
from k3train.schedule import layer_cuts, pipeline_table, with_bursts
from k3train.step_time import BACKLOG, estimate
from k3train.weight_sums import rank_sums
from offload.files.engine import ThreadEngine, Transfer
from offload.gradients import ShelvedGradients
from offload.shelf import BUFFERS, FileShelf, HostShelf
from parallel.pipeline.table import REDUCE

NUMEL, KEYS = 1 << 16, 6 * BUFFERS


class Counting(ThreadEngine):
    """Counts bytes of files."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = self.written_bytes = 0

    def write(self, file: int, offset: int, memory: Tensor) -> Transfer:
        self.written_bytes += memory.nbytes
        return super().write(file, offset, memory)

    def read(self, file: int, offset: int, memory: Tensor) -> Transfer:
        self.read_bytes += memory.nbytes
        return super().read(file, offset, memory)


def step(store: ShelvedGradients, sums: int, times_back: int) -> None:
    store.reset(range(KEYS))
    for _ in range(sums):
        for key in range(KEYS):
            store.accumulate(key, torch.ones(NUMEL)).wait()
    for _ in range(times_back):
        for key in range(KEYS):
            out = torch.empty(NUMEL)
            store.request(key)
            store.fetch(key, out)
            assert out[0] == sums


@pytest.mark.parametrize(("sums", "times_back"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_bytes_are_those_of_a_real_store(tier: str, sums: int, times_back: int, tmp_path: Path) -> None:
    engine = Counting()
    kept = (
        HostShelf(pinned=False)
        if tier == "host"
        else FileShelf(tmp_path, engine, pinned=False, fallback=False, warn=print)
    )
    store = ShelvedGradients(kept)
    for key in range(KEYS):
        store.allocate(key, NUMEL, torch.device("cpu"))
    step(store, sums, times_back)
    before = dict(store.moved), engine.read_bytes, engine.written_bytes
    step(store, sums, times_back)
    planned = gradient_moves.moves(4 * NUMEL * KEYS, sums, times_back, tier)
    assert store.moved["in"] - before[0]["in"] == planned.out
    assert store.moved["out"] - before[0]["out"] == planned.back
    # A page of header on each vector; what is still in a buffer need not be read.
    read, kept_bytes = engine.read_bytes - before[1], 4 * NUMEL * BUFFERS * (sums - 1 + times_back)
    assert planned.read - kept_bytes * (tier == "nvme") <= read <= 1.02 * planned.read
    assert engine.written_bytes - before[2] == pytest.approx(planned.written, rel=0.02)


def config(store: str = "host", name: str = "adamw", **cluster: float) -> Config:
    return Config(
        run=RunConfig(microbatches=8),
        model=ModelConfig(vocab_size=4096, num_layers=8, mtp_layers=0),
        parallel=ParallelConfig(zero=2, pipeline=2, virtual=4, data=4),
        offload=OffloadConfig(gradients=store, nvme_dir="disk"),
        optim=OptimConfig(name=name),
        cluster=replace(ClusterConfig(), **cluster),
    )


def test_sums_are_those_of_the_table() -> None:
    for virtual, group in ((1, None), (2, None), (4, 4)):
        asked = config()
        asked = replace(asked, parallel=replace(asked.parallel, virtual=virtual, microbatch_group=group))
        table = with_bursts(asked, pipeline_table(asked, layout_of(asked)))
        counted = sum(op.kind == REDUCE for op in table.ranks[0])
        assert gradient_moves.sums_in_a_step(asked) == counted


def test_adamw_reads_twice_what_two_slots_cannot_hold() -> None:
    def times(asked: Config, data: int) -> int:
        asked = replace(asked, parallel=replace(asked.parallel, data=data))
        topology = layout_of(asked)
        return gradient_moves.fetches(
            asked, topology, rank_sums(asked, topology, layer_cuts(asked, topology))
        )

    assert [times(config(), data) for data in (1, 2, 4)] == [2, 1, 1]
    assert times(config(name="muon_per_head"), 1) == 1


def test_the_last_sum_and_a_backlog_are_in_the_step() -> None:
    fast, slow = config(host_gbps=1e6), config(host_gbps=1e-3)
    topology = layout_of(slow)
    cuts = layer_cuts(slow, topology)
    found = gradient_moves.seconds(slow, topology, rank_sums(slow, topology, cuts))
    assert found.beside == pytest.approx(found.last * 15), "16 sums, one of them exposed"
    assert step_end.backlog(slow, topology, cuts, found.beside + 1).seconds == 0
    quick, late = estimate(fast), estimate(slow)
    assert BACKLOG not in quick.parts
    pipeline = quick.seconds - sum(part.seconds for part in step_end.parts(fast, topology, cuts).values())
    assert late.parts[BACKLOG] == pytest.approx(found.beside - pipeline, rel=1e-6)
    assert late.parts["gradient_offload"] == pytest.approx(found.last + found.back)
    assert sum(late.parts.values()) == pytest.approx(late.seconds)


def test_a_disk_is_read_and_written_for_every_sum_but_the_first() -> None:
    asked = config("nvme", host_gbps=1e6, nvme_read_gbps=2.0, nvme_write_gbps=1.0)
    topology = layout_of(asked)
    ranks = rank_sums(asked, topology, layer_cuts(asked, topology))
    moved, spent = (of(asked, topology, ranks) for of in (gradient_moves.of_step, gradient_moves.seconds))
    shards = moved.back
    assert moved == pytest.approx((4 * shards, shards, 4 * shards, 4 * shards))
    assert spent.beside + spent.last == pytest.approx(shards * (3 / 2 + 4) / 1e9)
    assert spent.back == pytest.approx(shards / 2e9, rel=1e-3)
