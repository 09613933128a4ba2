"""The fused block-FP8 kernels against the reference, byte for byte, on the CPU and on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload import fp8
from offload.fp8 import reference
from offload.fp8.layout import GROUP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _fused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := fp8.triton_refuses(device):
        pytest.skip(reason)
    assert fp8.implementation(device) == "triton"


def numbers(numel: int, dtype: torch.dtype, spread: float) -> Tensor:
    """Blocks of normal numbers at magnitudes of their own, with what is special strewn in."""
    generator = torch.Generator().manual_seed(numel)
    blocks = -(-numel // fp8.BLOCK)
    x = torch.randn(blocks, fp8.BLOCK, generator=generator)
    x = (x * 2 ** (spread * torch.randn(blocks, 1, generator=generator))).flatten()[:numel].to(dtype)
    for place, value in enumerate((0.0, -0.0, torch.nan, torch.inf, -torch.inf)):
        x[place * 2003 % numel] = value
    return x


def equal(actual: Tensor, expected: Tensor) -> bool:
    """The same bits, but for those of a NaN."""
    if not actual.dtype.is_floating_point:
        return torch.equal(actual, expected)
    same = torch.equal(actual.isnan(), expected.isnan())
    return same and torch.equal(*(x.nan_to_num(0).view(torch.uint8) for x in (actual, expected)))


@pytest.mark.parametrize("spread", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_implementations_agree(dtype: torch.dtype, spread: float) -> None:
    for numel in (1, 3, 128, 255, 257, GROUP - 1, GROUP, GROUP + 1, 50 * GROUP + 333):
        x = numbers(numel, dtype, spread)
        expected = reference.encode(x)
        for stored in (fp8.encode(x.cuda()), reference.encode(x.cuda())):
            assert equal(stored.cpu(), expected)
        decoded = reference.decode(expected, numel, dtype)
        device = expected.cuda()
        for y in (fp8.decode(device, numel, dtype), reference.decode(device, numel, dtype)):
            assert equal(y.cpu(), decoded)
        assert equal(fp8.encode(fp8.decode(device, numel, dtype)), device) or dtype is torch.float16


def test_every_bfloat16_and_every_code() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert equal(fp8.encode(x.cuda()).cpu(), reference.encode(x))
    # Ties between neighbouring codes, at a scale of one.
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.stack(
        [codes[:-1], (codes[:-1] + codes[1:]) / 2, (codes[1:] - codes[:-1]) / 4 + codes[:-1]], 1
    )
    x = torch.cat([torch.tensor([448.0, -448.0]), ties.flatten()[:126]]).repeat(3)
    x[128 + 2 : 256], x[256 + 2 :] = -ties.flatten()[126:252], ties.flatten()[252:378]
    assert equal(fp8.encode(x.cuda()).cpu(), reference.encode(x))


def test_a_slice_at_an_odd_address() -> None:
    x = numbers(40 * GROUP, torch.bfloat16, 2.0).cuda()
    for start in (1, 3, 8, 129):
        part = x[start:-5]
        assert equal(fp8.encode(part), reference.encode(part))
        stored = torch.zeros(fp8.encoded_nbytes(part.numel()) + 64, dtype=torch.uint8, device="cuda")
        stored[4 : 4 + fp8.encoded_nbytes(part.numel())] = fp8.encode(part)
        assert equal(
            fp8.decode(stored[4:], part.numel(), x.dtype), reference.decode(stored[4:], part.numel(), x.dtype)
        )


def test_more_elements_than_32_bits_count() -> None:
    numel = 2**31 + 1000
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[-777:] = torch.linspace(-3, 5, 777, device="cuda")
    y = fp8.decode(fp8.encode(x), numel, x.dtype)
    expected = reference.decode(reference.encode(x[-1000:]), 1000, x.dtype)
    assert torch.equal(y[-1000:], expected) and not y[:-1000].any()
