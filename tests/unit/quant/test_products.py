"""Products on tensor cores for MX blocks: what reaches them, who is refused, what the plan says."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor

from k3train.config import QuantConfig
from k3train.errors import UserError
from k3train.ops import backends, grouped
from k3train.ops.grouped import Segments
from k3train.quant import products
from k3train.quant.formats import FORMATS, MXFP4, MXFP8_E4M3, ROUNDINGS, Format
from k3train.quant.mx import reference, te
from k3train.quant_plan import assumptions
from launch.compose import ready

BLOCK = 32


def transformer_engine(x: Tensor) -> Tensor:
    """[..., n] to MXFP8 and back with the library's scale: amax / 448, its exponent rounded up, in FP32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    ratio = blocks.abs().amax(-1) * torch.tensor(1 / 448)
    bits = ratio.view(torch.int32)
    # A mantissa rounds the exponent up; below 2^-126 half of the way is 2^-127 still.
    mantissa, exponent = bits & 0x7FFFFF, bits >> 23
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    scales = reference.scale_values((exponent + up.int()).to(torch.uint8))[..., None]
    elements = (blocks.double() / scales.double()).float()
    return (elements.to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def numbers() -> Tensor:
    """Blocks [1, n] of every size that BF16 has, their numbers as far apart as a factor of 2^20."""
    made = torch.Generator().manual_seed(0)
    exponents = torch.arange(-133, 119).repeat_interleave(4 * BLOCK).double()
    spread = exponents - 20 * torch.rand(len(exponents), generator=made).double()
    values = torch.randn(len(exponents), generator=made).double() * 2**spread
    return values.to(torch.bfloat16)[None]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3], ids=lambda fmt: fmt.name)
def test_rounded_numbers_lose_nothing_in_mxfp8(fmt: Format, rounding: str) -> None:
    seen = reference.fake_quantise(numbers(), fmt, rounding)
    assert seen.count_nonzero() > 1000
    assert torch.equal(transformer_engine(seen), seen.float())
    if fmt == MXFP4:
        for rule in ROUNDINGS:
            assert torch.equal(reference.fake_quantise(seen, MXFP8_E4M3, rule), seen)


def test_every_mxfp4_number_under_every_scale_is_one_of_mxfp8() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    largest = values[:8]
    for code in range(0, 252):
        scale = reference.scale_values(torch.tensor([code], dtype=torch.uint8)).double()
        kept = [values[values.abs() <= most].repeat(BLOCK)[:BLOCK] for most in largest]
        blocks = (torch.stack(kept).double() * scale).float()
        assert torch.equal(transformer_engine(blocks), blocks), code


def test_e5m2_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, BLOCK)
    x[0, :2] = torch.tensor([57344.0, 2.0**-14])
    assert torch.equal(reference.fake_quantise(x, FORMATS["mxfp8_e5m2"]), x)
    assert not torch.equal(transformer_engine(x), x)


class Fake(typing.NamedTuple):
    """Transformer Engine's part on a CPU: numbers go through MXFP8, products are FP32."""

    calls: list[list[int]]

    def library(self) -> te.Library:
        def split(rows: Tensor, splits: list[int]) -> list[Tensor]:
            assert rows.is_contiguous() and all(count % BLOCK == 0 for count in splits)
            self.calls.append(splits)
            return [transformer_engine(piece) for piece in rows.split(splits)]

        def multiply(
            left: typing.Sequence[Tensor], right: typing.Sequence[Tensor], output: Tensor, splits: list[int]
        ) -> None:
            pieces = [piece @ weight.t() for piece, weight in zip(right, left, strict=True)]
            output.copy_(torch.cat(pieces))

        return te.Library(transformer_engine, split, multiply)


@pytest.mark.parametrize("counts", [[40, 0, 33, 7], [32, 64, 0, 96], [0, 0, 0, 0], [0, 0, 1, 0]])
def test_groups_are_rounded_up_and_cut_back(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake([])
    monkeypatch.setattr(te, "_library", fake.library)
    made = torch.Generator().manual_seed(1)
    rows = reference.fake_quantise(torch.randn(sum(counts), 64, generator=made), MXFP8_E4M3)
    weights = list(reference.fake_quantise(torch.randn(4, 96, 64, generator=made), MXFP4))
    segments = Segments.of(counts)
    found = te.multiply(rows, weights, segments)
    # FP32 sums of as many rows may come in another order.
    torch.testing.assert_close(found, grouped.multiply(rows, weights, segments), rtol=1e-5, atol=1e-5)
    assert fake.calls == [[-(-count // BLOCK) * BLOCK for count in counts if count]] * any(counts)


def test_a_wrong_product_is_found_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(te.Segments, "of", lambda counts, device: Segments(counts, torch.tensor(counts)))
    right = Fake([]).library()

    def scaled(
        left: typing.Sequence[Tensor], rows: typing.Sequence[Tensor], output: Tensor, n: list[int]
    ) -> None:
        right.multiply(left, [1.01 * piece for piece in rows], output, n)

    monkeypatch.setattr(te, "_library", lambda: right)
    assert te.trial() is None
    monkeypatch.setattr(te, "_library", lambda: right._replace(multiply=scaled))
    assert te.trial() == "a trial product is off by 1.0e-02 of its norm"

    def broken() -> te.Library:
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(te, "_library", broken)
    assert te.trial() == "a trial product failed: no kernel image is available"


def native() -> backends.Backend:
    return next(backend for backend in backends.candidates(products.OPERATOR) if backend.name == "te")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), "needs compute capability 10.0 or higher, below 12.0; this device has 9.0"),
        ((12, 0), "needs compute capability 10.0 or higher, below 12.0; this device has 12.0"),
        ((10, 0), "transformer_engine is not installed"),
    ],
)
def test_other_devices_are_refused(
    capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(backends, "_import_failure", lambda module: "transformer_engine is not installed")
    assert native().refuses("cuda", torch.bfloat16) == reason
    assert products.resolve(QuantConfig(), "cpu", torch.bfloat16) is grouped.multiply


def test_a_failed_trial_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    monkeypatch.setattr(backends, "_import_failure", lambda module: None)
    for told in ("a trial product failed: x", None):
        monkeypatch.setattr(backends, "_tried", lambda module, trial, told=told: told)
        assert native().refuses("cuda", torch.bfloat16) == told
    assert native().refuses("cuda", torch.float32) == "takes torch.bfloat16, not torch.float32"


def test_what_was_asked_for_and_cannot_be_had_is_refused() -> None:
    with pytest.raises(UserError, match=r"quant\.products=te: runs on cuda tensors, not cpu; use auto or e"):
        products.resolve(QuantConfig(products="te"), "cpu", torch.bfloat16)
    odd = QuantConfig(activation_format="mxfp8_e5m2")
    assert products.resolve(odd, "cpu", torch.bfloat16) is grouped.multiply
    with pytest.raises(UserError, match="rows in none do not fit into mxfp8_e4m3 without loss"):
        products.resolve(QuantConfig(products="te", activation_format="none"), "cpu", torch.bfloat16)
    qat = ["recipe=tiny", "parallel=single", "vision=none", "quant=mxfp4_qat", "quant.products=te"]
    with pytest.raises(UserError, match=r"quant\.products=te.*weights in mxfp8_e5m2 do not fit"):
        ready([*qat, "quant.weight_format=mxfp8_e5m2"], inputs=False)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["quant=none"], None),
        ([], "emulated in bfloat16: cluster.gpu=h200 is not known to have tensor cores for MX blocks"),
        (["cluster.gpu=gb200"], "run in MXFP8 through Transformer Engine where `k3train doctor` finds"),
        (["quant.products=emulated"], "emulated in bfloat16: quant.products=emulated"),
        (["quant.products=te"], "through Transformer Engine: quant.products=te"),
        (["quant.activation_format=none"], "emulated in bfloat16: rows in none do not fit into mxfp8_e4m3"),
        (["model.dtype=float32"], "emulated in float32: tensor cores for MX blocks are used from bfloat16"),
    ],
)
def test_the_plan_says_where_products_run(overrides: list[str], said: str | None) -> None:
    config = ready(["recipe=h200_small", "run.device=auto", "quant=mxfp4_qat", *overrides], inputs=False)
    found = assumptions(config)
    assert found == [] if said is None else len(found) == 1 and said in found[0]
