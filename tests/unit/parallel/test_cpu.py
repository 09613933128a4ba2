"""The CPU route changes nothing with CUDA present, and what megatron-core needs without."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

PROBE = """
import json, sys
import torch
import torch.distributed

OWNERS = {
    "torch": torch, "torch.cuda": torch.cuda, "torch.cuda.nvtx": torch.cuda.nvtx,
    "torch.Tensor": torch.Tensor, "torch.distributed": torch.distributed,
}

def snapshot():
    return {f"{owner}.{name}": value for owner in OWNERS for name, value in vars(OWNERS[owner]).items()}

def changed(before):
    after = snapshot()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))

real, torch.cuda.is_available = torch.cuda.is_available, lambda: True
from parallel.cpu import enable_cpu
before = snapshot()
answer = enable_cpu()
report = {"with_cuda": [answer, changed(before), "megatron" in sys.modules]}
torch.cuda.is_available = real
before = snapshot()
report["without"] = [enable_cpu(), changed(before), "megatron" in sys.modules]
report["again"] = enable_cpu()
report["wandb"] = "wandb" in sys.modules
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What `enable_cpu` did in a fresh process, first with CUDA feigned, then without."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = {**json.loads(run.stdout), "stderr": run.stderr}
    return report


def test_inert_with_cuda(probe: dict[str, Any]) -> None:
    assert probe["with_cuda"] == [False, [], False]


def test_takes_effect_without_cuda(probe: dict[str, Any]) -> None:
    enabled, changed, imported = probe["without"]
    assert enabled
    assert imported
    assert {"torch.cuda.current_device", "torch.cuda.Stream", "torch.zeros"} <= set(changed)
    assert "torch.compile" not in changed
    assert probe["again"] is True


def test_import_is_silent_and_leaves_wandb_importable(probe: dict[str, Any]) -> None:
    assert probe["stderr"] == ""
    assert not probe["wandb"]


TOO_LATE = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
from parallel.cpu import enable_cpu
enable_cpu()
"""


def test_too_late_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    run = subprocess.run([sys.executable, "-c", TOO_LATE], capture_output=True, text=True)
    assert run.returncode == 1
    assert "must run before megatron.core is imported" in run.stderr


def test_random_states_share_the_generator() -> None:
    from parallel.cpu import enable_cpu

    if not enable_cpu():
        pytest.skip("needs a machine without CUDA")
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("one", 11)
    torch.manual_seed(5)
    outside = torch.rand(2)
    torch.manual_seed(5)
    with tracker.fork("one"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), outside)
    with tracker.fork("one"):
        second = torch.rand(2)
    generator = torch.Generator().manual_seed(11)
    assert torch.equal(torch.cat((first, second)), torch.rand(4, generator=generator))


def test_split_sizes_become_lists() -> None:
    from parallel.cpu import _to_host

    splits = torch.tensor([3, 1])
    assert _to_host(splits, as_numpy=True) == [3, 1]
    assert _to_host(splits) is splits
    assert _to_host(None, as_numpy=True) is None
