"""The CPU route changes nothing where CUDA is available, and refuses to come too late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

INERT = """
import sys, torch
import torch.distributed
torch.cuda.is_available = lambda: True
owners = {"torch": torch, "torch.cuda": torch.cuda, "torch.cuda.nvtx": torch.cuda.nvtx,
          "Tensor": torch.Tensor, "torch.distributed": torch.distributed}
before = {name: dict(vars(owner)) for name, owner in owners.items()}
from parallel.cpu import enable_cpu
answer = enable_cpu()
changed = [f"{name}.{key}" for name, owner in owners.items()
           for key in before[name].keys() | vars(owner).keys()
           if before[name].get(key) is not vars(owner).get(key)]
print(answer, sorted(changed), "megatron.core" in sys.modules)
"""

ACTIVE = """
import sys, torch
from parallel.cpu import enable_cpu
compile_before = torch.compile
print(enable_cpu(), enable_cpu())
print(torch.zeros(2, device="cuda").device, torch.cuda.current_device(), torch.zeros(1).type())
print(torch.zeros(1).type(torch.int32).dtype, torch.zeros(1).double().type(), torch.compile is compile_before)
from megatron.core.transformer.moe import token_dispatcher
print(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 4]), as_numpy=True))
"""

LATE = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
from parallel.cpu import enable_cpu
try:
    enable_cpu()
except RuntimeError as error:
    print(error)
"""


def _python(program: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_inert_with_cuda() -> None:
    assert _python(INERT) == ["False [] False"]


def test_redirects_without_cuda() -> None:
    assert _python(ACTIVE) == [
        "True True",
        "cpu cpu torch.cuda.FloatTensor",
        "torch.int32 torch.cuda.DoubleTensor True",
        "[3, 4]",
    ]


def test_refuses_to_come_after_megatron() -> None:
    assert _python(LATE) == ["parallel.cpu.enable_cpu() must run before megatron.core is imported"]
