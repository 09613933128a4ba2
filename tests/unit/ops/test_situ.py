import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from k3train.ops.situ import situ_glu

BACKENDS = ("lean", "reference")


def make_input(rows: int = 5, f: int = 7, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(rows, 2 * f, generator=generator, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_comes_first(backend: str) -> None:
    output = situ_glu(torch.tensor([[2.0, 3.0]]), backend=backend)
    assert output.item() == pytest.approx(4 * 0.46211716 * 0.88079708 * 25 * 0.11942730, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounded_by_one_hundred(backend: str) -> None:
    output = situ_glu(make_input(scale=1e4), backend=backend)
    assert 99 < output.abs().max() <= 100


def test_tends_to_swiglu() -> None:
    x = make_input(scale=3.0)
    gate, up = x.chunk(2, -1)
    swiglu = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(situ_glu(x, 1e5, 1e5), swiglu, rtol=1e-7, atol=1e-9)
    tiny = 1e-4 * x
    gate, up = tiny.chunk(2, -1)
    torch.testing.assert_close(situ_glu(tiny), torch.nn.functional.silu(gate) * up, rtol=1e-7, atol=0)


def test_gradients_by_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda x: situ_glu(x, backend="lean"), make_input(scale=6.0))


def test_lean_equals_reference_and_keeps_its_input_only() -> None:
    x = make_input(scale=4.0)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lean = situ_glu(x, backend="lean")
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    reference = situ_glu(x, backend="reference")
    assert torch.equal(lean, reference)
    torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), x) for o in (lean, reference)])


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    x = make_input(scale=3.0).bfloat16()
    assert torch.equal(situ_glu(x), situ_glu(x.float()).bfloat16())


INTERPRETED = """
import torch
from k3train.ops.situ.reference import situ_glu as reference
from k3train.ops.situ.triton import situ_glu as fused
for f in (5, 1500):
    x = (8 * torch.randn(2, 3, 2 * f, generator=torch.Generator().manual_seed(f))).requires_grad_()
    outputs = fused(x, 4.0, 25.0), reference(x, 4.0, 25.0)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=3e-5)
    grads = [torch.autograd.grad(o.sin().sum(), x)[0] for o in outputs]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)
"""


def test_triton_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
