"""The Triton codec in Triton's interpreter, against the reference; tests/gpu/test_mx.py compiles it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import torch
from k3train.quant.mx import FORMATS, MXFP4, ROUNDINGS, reference, triton


def blocks(least):
    made = torch.Generator().manual_seed(5)
    exponents = torch.linspace(least, 120, 200).floor()
    x = torch.ldexp(torch.randn(200, 32, generator=made), exponents[:, None]).float()
    x[7, 3], x[100, 4], x[101, 5] = torch.inf, torch.nan, -torch.inf
    x[50], x[51] = 0.0, -0.0
    x[52] = torch.arange(32) / 4
    return x.view(4, 50, 32)


def same(a, b):
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.nan_to_num(7.0).view(kind), b.nan_to_num(7.0).view(kind))


# The interpreter makes something else of BF16's subnormal numbers, so BF16 starts above them.
for x in (blocks(-149), blocks(-90).bfloat16()):
    for rounding in ROUNDINGS:
        for fmt in FORMATS.values():
            expected = reference.fake_quantise(x, fmt, rounding)
            assert expected.isnan().sum() == 32
            assert same(triton.fake_quantise(x, fmt, rounding), expected), (fmt.name, rounding)
        packed = triton.to_bytes(x, MXFP4, rounding)
        assert torch.equal(packed, reference.to_bytes(x, MXFP4, rounding)), rounding
        unpacked = triton.from_bytes(packed, x.shape[1:], MXFP4, x.dtype)
        assert same(unpacked, reference.fake_quantise(x, MXFP4, rounding)), rounding
tail = torch.randn(2, 3, 40)
assert same(triton.fake_quantise(tail, MXFP4, "floor"), reference.fake_quantise(tail, MXFP4, "floor"))
assert triton.fake_quantise(torch.empty(0, 64), MXFP4, "floor").shape == (0, 64)
"""


def test_kernels_equal_the_reference_bit_for_bit() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    result = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
