"""What quantisation-aware training computes, against a plain layer of rounded weights."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from torch import Tensor

from k3train.config import QuantConfig
from k3train.ops.grouped import Segments, grouped_linear
from k3train.ops.situ import situ_glu
from k3train.quant import mx
from k3train.quant.mx import FORMATS, MXFP4, MXFP8_E4M3, ROUNDINGS
from k3train.quant.qat import ExpertQuantiser, _together
from launch.compose import ready
from parallel.moonep import EXACT, Codec, activate_backward

EXPERTS, ROWS, INPUTS, OUTPUTS = 4, 50, 64, 96


def weights(outputs: int = OUTPUTS, inputs: int = INPUTS) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [0.02 * torch.randn(outputs, inputs, generator=made) for _ in range(EXPERTS)]


def quantiser(**keys: typing.Any) -> ExpertQuantiser:
    return ExpertQuantiser(QuantConfig(recipe="mxfp4_qat", **keys), "cpu", torch.float32)


def test_gradients_go_straight_through() -> None:
    """Rounded leaves in a plain layer have, bit for bit, the gradients that QAT gives to the real ones."""
    qat, segments = quantiser(), Segments.of([20, 0, 13, 17])
    rows = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    real = [weight.requires_grad_() for weight in weights()]
    plain_rows = mx.fake_quantise(rows.detach(), MXFP8_E4M3).requires_grad_()
    rounded = [mx.fake_quantise(weight.detach(), MXFP4).requires_grad_() for weight in real]
    assert not torch.equal(rounded[0], real[0])

    ours = grouped_linear(qat.rows(rows), real, segments, seen=qat.weights)
    theirs = grouped_linear(plain_rows, rounded, segments)
    assert torch.equal(ours, theirs)
    grad = torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(3))
    ours.backward(grad)
    theirs.backward(grad)
    for one, other in zip([rows, *real], [plain_rows, *rounded], strict=True):
        assert one.grad is not None and torch.equal(one.grad, typing.cast(Tensor, other.grad))


def test_activation_sees_what_the_second_product_sees() -> None:
    """The weight of a row has the gradient <grad, rounded activation>; the activation's own is untouched."""
    made = torch.Generator().manual_seed(4)
    gate_up, grad = torch.randn(ROWS, 2 * INPUTS, generator=made), torch.randn(ROWS, INPUTS, generator=made)
    row_weights = torch.rand(ROWS, generator=made)
    plain = activate_backward(situ_glu, gate_up, grad, row_weights)
    ours = activate_backward(situ_glu, gate_up, grad, row_weights, quantiser().rows)
    rounded = mx.fake_quantise(situ_glu(gate_up), MXFP8_E4M3)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], rounded * row_weights[:, None])
    assert torch.equal(ours[2], (grad * rounded).sum(-1))
    assert not torch.equal(ours[2], plain[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_what_travels_becomes_what_is_seen_at_home(fmt: str, rounding: str, dtype: torch.dtype) -> None:
    qat = quantiser(weight_format=fmt, scale_rounding=rounding)
    home = [weight.to(dtype) for weight in weights()]
    packed = qat.pack(home)
    assert all(each.dtype == torch.uint8 and each.nbytes == qat.nbytes(home[0]) for each in packed)
    seen, arrived = qat.weights(home), qat.unpack(packed[1:3], home[0])
    assert all(map(torch.equal, arrived, seen[1:3]))
    assert seen[0].dtype == dtype and qat.unpack([], home[0]) == []


def test_packed_weights_are_3_8_times_smaller_than_bf16() -> None:
    weight = torch.empty(3072, 3584, dtype=torch.bfloat16, device="meta")
    assert weight.numel() * 2 / quantiser().nbytes(weight) == pytest.approx(3.76, abs=0.01)


def test_weights_are_rounded_once_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        mx, "fake_quantise", lambda *a, _do=mx.fake_quantise, **k: calls.append(1) or _do(*a, **k)
    )
    home = weights()
    for hold, expected in ((True, 4), (False, 5)):
        calls.clear()
        qat = quantiser(hold_weights=hold)
        with qat.held():
            first = qat.weights(home)
            assert (qat.weights(home)[0] is first[0]) == hold
            qat.weights(weights(INPUTS, OUTPUTS))
        home[0].data.mul_(2)  # as an optimizer does it, past the version counter
        with qat.held():
            assert torch.equal(qat.weights(home)[0], first[0] * 2)
        qat.weights(home)
        home[0].data.div_(2)
        assert len(calls) == expected


def test_neighbours_in_a_buffer_are_rounded_without_a_copy() -> None:
    buffer = torch.arange(EXPERTS * OUTPUTS * INPUTS, dtype=torch.float32)
    forwards = [piece.view(OUTPUTS, INPUTS) for piece in buffer.split(OUTPUTS * INPUTS)]
    for given in (forwards, forwards[::-1], forwards[1:3], forwards[::-2]):
        together, places = _together(given)
        assert together.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert all(torch.equal(together[place], each) for place, each in zip(places, given, strict=True))
        seen = quantiser().weights(given)
        assert all(
            torch.equal(one, mx.fake_quantise(each, MXFP4)) for one, each in zip(seen, given, strict=True)
        )
    qat = quantiser()
    with qat.held():
        seen = qat.weights(forwards[::-1])
    assert [each.storage_offset() for each in seen] == [place * OUTPUTS * INPUTS for place in range(EXPERTS)]


def test_weights_that_lie_unevenly_are_copied() -> None:
    buffer = torch.randn(4 * OUTPUTS * INPUTS, generator=torch.Generator().manual_seed(6))
    pieces = [piece.view(OUTPUTS, INPUTS) for piece in buffer.split(OUTPUTS * INPUTS)]
    for given in ([pieces[0], pieces[1], pieces[3]], [pieces[0], pieces[2].clone()]):
        together, places = _together(given)
        assert together.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        assert all(torch.equal(together[place], each) for place, each in zip(places, given, strict=True))


def test_rows_may_stay_as_they_are() -> None:
    rows = torch.randn(3, INPUTS)
    assert quantiser(activation_format="none").rows(rows) is rows
    assert EXACT.rows(rows) is rows
    codecs: list[Codec] = [EXACT, quantiser()]
    assert [codec.nbytes(rows) for codec in codecs] == [rows.nbytes, 3 * INPUTS * 17 // 32]


def test_the_recipe_is_what_a_release_holds() -> None:
    config = ready(["quant=mxfp4_qat"], inputs=False)
    assert config.quant == dataclasses.replace(QuantConfig(), recipe="mxfp4_qat")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.latent_size=40"],
            "model.latent_size=40: must be a multiple of 32, the block of quant.recipe",
        ),
        (["model.expert_ffn_size=80"], "model.expert_ffn_size=80: must be a multiple of 32"),
        (["model.num_experts=0"], "quant.recipe=mxfp4_qat: refused with model.num_experts=0: only routed"),
        (["quant.weight_format=nvfp4"], "quant.weight_format=nvfp4: valid are mxfp4"),
    ],
)
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ready(["quant=mxfp4_qat", *overrides], inputs=False)
