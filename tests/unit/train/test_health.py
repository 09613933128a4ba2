"""What is wrong among machines, from what their ranks found out."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3train.fault_config import FaultConfig
from k3train.train import health
from k3train.train.health import Facts, UnhealthyError, compare, look

FACTS = [Facts(rank, f"node{rank // 2}", "h200", {"torch": "2.11"}, 700.0, 1, 1, 1.0) for rank in range(4)]
CLOCKS = [100.0, 100.1, 100.2, 100.1]


def test_equal_machines_are_well() -> None:
    assert compare(FACTS, CLOCKS, FaultConfig()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tflops": 400.0}, "rank 3 on node1 computes 400 TFLOP/s, the median 700 (fault.health_slow)"),
        ({"device": "h100"}, "rank 3 on node1 has h100, rank 0 h200"),
        ({"versions": {"torch": "2.10"}}, "rank 3 on node1 has torch 2.10, rank 0 2.11"),
    ],
)
def test_a_machine_that_differs_is_named(change: dict[str, object], said: str) -> None:
    assert compare([*FACTS[:3], replace(FACTS[3], **change)], CLOCKS, FaultConfig()) == [said]


def test_a_clock_that_is_off_is_named() -> None:
    (line,) = compare(FACTS, [100.0, 100.0, 100.0, 90.0], FaultConfig())
    assert line == "the clock of rank 3 on node1 is -10.0 s off; synchronise it"


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    facts = look(tmp_path / "run", 1, torch.device("cpu"))
    assert facts.rank == 1 and facts.tflops > 0 and facts.disk_free > 0
    assert list((tmp_path / "run").iterdir()) == [], "the file that was written is gone"


def test_a_wrong_product_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Tensor.__matmul__

    def slips(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = own(left, right)
        if left.dtype == torch.float32:
            product[5, 7] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", slips)
    with pytest.raises(
        UnhealthyError, match=r"rank 2 on .*: cpu computes a product of whole numbers wrongly"
    ):
        look(tmp_path, 2, torch.device("cpu"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnhealthyError, match="rank 0 on"):
        health.look(tmp_path / "file" / "run", 0, torch.device("cpu"))


def test_a_slow_or_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(health, "SLOWEST_DISK", 1 << 60)
    with pytest.raises(UnhealthyError, match=rf"^rank 3 on \S+: {tmp_path} takes \S+ MB a second$"):
        look(tmp_path, 3, torch.device("cpu"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnhealthyError, match=rf"^rank 3 on \S+: cannot write in {tmp_path}: No space left"):
        look(tmp_path, 3, torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_missing_or_in_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UnhealthyError, match=r"^rank 9 on \S+: torch sees 1 GPUs, not the 2 that its ranks"):
        health.of_rank(tmp_path, "auto")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UnhealthyError, match=r"^rank 9 on \S+: cuda:0 has 60.0 of 80.0 GiB free; another"):
        health.of_rank(tmp_path, "auto")
