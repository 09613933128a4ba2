"""Block FP8: its bytes, its error, and what it does with numbers at the edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload import fp8
from offload.fp8 import reference
from offload.fp8.layout import ALIGNMENT, GROUP, code_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = (1, 127, 128, 129, 255, 256, 257, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 200)


def numbers(numel: int, dtype: torch.dtype, *, spread: float = 2.0, seed: int = 0) -> Tensor:
    """Normal numbers, each block at a magnitude of its own: 2 to a normal number times `spread`."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-numel // fp8.BLOCK)
    x = torch.randn(blocks, fp8.BLOCK, generator=generator)
    return (x * 2 ** (spread * torch.randn(blocks, 1, generator=generator))).flatten()[:numel].to(dtype)


def amax_of_block(x: Tensor) -> Tensor:
    """The largest magnitude beside each element, FP64 [n]."""
    padded = torch.zeros(-(-x.numel() // fp8.BLOCK) * fp8.BLOCK, dtype=torch.float64)
    padded[: x.numel()] = x.double().abs()
    return padded.view(-1, fp8.BLOCK).amax(1).repeat_interleave(fp8.BLOCK)[: x.numel()]


def bound(x: Tensor) -> Tensor:
    """What the package promises, FP64 [n]."""
    limit = torch.maximum(x.double().abs() / 16, amax_of_block(x) * 2**-18).clamp(min=2**-126)
    return limit + 2**-25 if x.dtype is torch.float16 else limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_error_is_bounded_and_the_largest_survives(numel: int, dtype: torch.dtype) -> None:
    x = numbers(numel, dtype)
    stored = fp8.encode(x)
    assert stored.shape == (fp8.encoded_nbytes(numel),) and stored.dtype is torch.uint8
    y = fp8.decode(stored, numel, dtype)
    assert y.shape == x.shape and y.dtype is dtype
    error = (x.double() - y.double()).abs()
    assert (error <= bound(x)).all()
    largest = x.double().abs() == amax_of_block(x)
    assert (error[largest] <= amax_of_block(x)[largest] * 2**-19).all()
    if dtype is not torch.float32:
        assert torch.equal(x[largest], y[largest])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.5, 8.0, 60.0])
def test_a_second_encoding_changes_no_byte(dtype: torch.dtype, spread: float) -> None:
    x = numbers(32 * GROUP + 77, torch.float32, spread=spread, seed=3)
    if dtype is torch.float16:
        x = x.clamp(-6e4, 6e4)
        x = torch.where(amax_of_block(x) < 2**-6, 1.0, x)
    x = x.to(dtype)
    x = torch.where(x.isfinite(), x, 0)
    stored = fp8.encode(x)
    assert torch.equal(fp8.encode(fp8.decode(stored, x.numel(), dtype)), stored)
    assert torch.equal(fp8.encode(x), stored)


def test_codes_are_the_nearest_that_the_scale_allows() -> None:
    x = numbers(4 * GROUP, torch.float32, seed=1)
    stored = fp8.encode(x)
    split = code_bytes(x.numel())
    scales = stored[split:].clone().view(torch.float32).double().repeat_interleave(fp8.BLOCK)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()].unique()
    reached = stored[:split].view(torch.float8_e4m3fn).double()
    nearest = (x.double() / scales)[:, None].sub(every).abs().amin(1)
    # 1 / scale and the product are rounded, so that a tie may go either way.
    assert ((x.double() / scales - reached).abs() <= nearest * (1 + 1e-4)).all()
    assert ((scales * 448 <= amax_of_block(x)) & (scales * 448 >= amax_of_block(x) * (1 - 2**-18))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_and_spoils_its_block_alone(dtype: torch.dtype, value: float) -> None:
    x = numbers(3 * fp8.BLOCK + 5, dtype)
    for place in (fp8.BLOCK + 7, 3 * fp8.BLOCK + 4):
        x[place] = value
    stored = fp8.encode(x)
    y = fp8.decode(stored, x.numel(), dtype)
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[fp8.BLOCK : 2 * fp8.BLOCK] = spoilt[3 * fp8.BLOCK :] = True
    assert torch.equal(y.isnan(), spoilt) and y[~spoilt].isfinite().all()
    assert torch.equal(fp8.encode(y), stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_their_signs(dtype: torch.dtype) -> None:
    x = torch.zeros(300, dtype=dtype)
    x[7] = -0.0
    y = fp8.decode(fp8.encode(x), 300, dtype)
    assert torch.equal(y, x) and torch.equal(y.signbit(), x.signbit())
    assert fp8.encode(x[:0]).numel() == fp8.encoded_nbytes(0) == 0
    assert fp8.decode(fp8.encode(x[:0]), 0, dtype).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor([largest, -largest, 1e30, smallest, smallest / 2, -smallest / 2] + [0.0] * 122)
    tiny = torch.tensor([smallest, -smallest / 4, 2 * smallest, 3 * smallest, 1000 * smallest] + [0.0] * 123)
    x = torch.cat([x, tiny]).to(dtype)
    y = fp8.decode(fp8.encode(x), x.numel(), dtype)
    assert y.isfinite().all()
    assert ((x.double() - y.double()).abs() <= bound(x)).all()
    assert (y[[4, 5, 129]] == 0).all() and y[130] == x[130]


def test_every_finite_bfloat16_with_its_neighbours() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns[patterns.isfinite()]
    stored = fp8.encode(x)
    y = fp8.decode(stored, x.numel(), x.dtype)
    assert ((x.double() - y.double()).abs() <= bound(x)).all()
    assert torch.equal(fp8.encode(y), stored)


@pytest.mark.parametrize("numel", LENGTHS)
def test_layout_is_aligned_dense_and_without_chance(numel: int) -> None:
    nbytes = fp8.encoded_nbytes(numel)
    blocks = -(-numel // fp8.BLOCK)
    assert nbytes % ALIGNMENT == code_bytes(numel) % ALIGNMENT == 0
    assert numel + 4 * blocks <= nbytes < numel + 4 * blocks + 2 * ALIGNMENT
    x = numbers(numel, torch.bfloat16)
    longer = torch.cat([x, x.new_zeros(code_bytes(numel) - numel)])
    assert torch.equal(fp8.encode(x)[: code_bytes(numel)], fp8.encode(longer)[: code_bytes(numel)])
    # Bytes behind the end do no harm: tiers round up.
    room = torch.full((nbytes + 304,), 255, dtype=torch.uint8)
    room[4 : nbytes + 4] = fp8.encode(x)
    assert torch.equal(fp8.decode(room[4:], numel, x.dtype), fp8.decode(fp8.encode(x), numel, x.dtype))


def test_wrong_arguments_are_bugs() -> None:
    x = numbers(256, torch.bfloat16)
    for wrong in (x.view(2, 128), x[::2], x.double(), x.int()):
        with pytest.raises(AssertionError):
            fp8.encode(wrong)
    with pytest.raises(AssertionError, match="take more than 256 bytes"):
        fp8.decode(torch.zeros(256, dtype=torch.uint8), 256, torch.bfloat16)


def test_the_cpu_has_the_reference_and_says_why() -> None:
    device = torch.device("cpu")
    assert fp8.implementation(device) == "reference"
    assert fp8.triton_refuses(device) == "runs on cuda tensors, not cpu"
    x = numbers(1000, torch.bfloat16)
    assert torch.equal(fp8.encode(x), reference.encode(x))
