"""The vision tower against a second, plain one; packing, recomputation, epsilon and initial values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3train.errors import UserError
from k3train.model.seeds import named_generator
from k3train.model.vision import VisionModel, merge_patches
from k3train.model.vision_init import initial_vision, initialize_vision
from k3train.ops.items import Items
from k3train.vision_config import VisionConfig
from k3train.vision_shapes import Grid, check_grid, parameters, patches
from offload.manager import ActivationManager
from tests.unit.model import plain_vision
from tests.unit.model.saved import backward, manager

TINY = VisionConfig(
    enabled=True, depth=2, hidden_size=24, num_heads=3, head_dim=12, ffn_size=40, grid_size=6, rope_max=16,
    max_patches=64,
)  # fmt: skip
OUT = 20
GRIDS: list[Grid] = [(1, 4, 6), (1, 4, 6), (3, 2, 4), (1, 6, 6), (2, 8, 2)]


def build(vision: VisionConfig = TINY, seed: int = 5) -> VisionModel:
    """An FP64 model whose attention and norms are far from their initial values."""
    model = VisionModel(vision, OUT, torch.float64)
    initialize_vision(model, seed, init_std=0.3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def make_patches(grids: list[Grid], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(patches, grids)), 588, generator=generator, dtype=torch.float64)


def named(model: VisionModel) -> dict[str, Tensor]:
    return {f"vision.{name}": parameter for name, parameter in model.named_parameters()}


def gradients(
    model: VisionModel, x: Tensor, grids: list[Grid] = GRIDS, keeper: ActivationManager | None = None
) -> list[Tensor]:
    """Gradients of every parameter for a loss that weighs each output differently."""

    def loss() -> Tensor:
        output, _ = model(x, grids)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
        return (output * weight).sum()

    model.zero_grad()
    backward(loss, keeper)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_output_and_gradients_equal_a_plain_forward_from_the_specification(attention: str) -> None:
    model = build(replace(TINY, attention=attention))
    weights = named(model)
    x = make_patches(GRIDS).requires_grad_()
    ours, sizes = model(x, GRIDS)
    theirs = plain_vision.forward(TINY, weights, x, GRIDS)
    assert sizes == [6, 6, 2, 9, 4]
    assert ours.shape == (27, OUT)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = [x, *weights.values()]
    ours_grads = torch.autograd.grad((ours * weight).sum(), inputs)
    their_grads = torch.autograd.grad((theirs * weight).sum(), inputs)
    for name, mine, other in zip(["patches", *weights], ours_grads, their_grads, strict=True):
        assert other.abs().max() > 1e-3, f"{name} has hardly any say in the loss"
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_an_item_is_the_same_alone_and_in_any_pack(attention: str) -> None:
    model = build(replace(TINY, attention=attention))
    items = make_patches(GRIDS).split([patches(grid) for grid in GRIDS])
    alone = [model(item, [grid])[0] for item, grid in zip(items, GRIDS, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 1, 3, 0, 2]):
        packed, sizes = model(torch.cat([items[i] for i in order]), [GRIDS[i] for i in order])
        for i, part in zip(order, packed.split(sizes), strict=True):
            torch.testing.assert_close(part, alone[i], rtol=0, atol=1e-12)


def test_a_patch_reaches_every_token_of_its_item_and_no_other() -> None:
    model = build()
    x = make_patches(GRIDS)
    before, sizes = model(x, GRIDS)
    x[48] += 1  # the first patch of the clip of three frames, item 2
    after, _ = model(x, GRIDS)
    moved = [change.abs().amax(1) for change in (after - before).split(sizes)]
    assert all(change.max() == 0 for item, change in enumerate(moved) if item != 2)
    assert moved[2].min() > 1e-6


def test_frames_of_a_clip_are_told_apart_by_their_place_in_time() -> None:
    model = build()
    x = make_patches([(2, 4, 4)])
    forward, _ = model(x, [(2, 4, 4)])
    swapped, _ = model(x.roll(16, 0), [(2, 4, 4)])
    assert (forward - swapped).abs().max() > 1e-3
    as_images = torch.stack([model(part, [(1, 4, 4)])[0] for part in x.split(16)]).mean(0)
    assert (forward - as_images).abs().max() > 1e-3


def test_merging_by_hand() -> None:
    items = Items.pack([(2, 2, 4)], torch.device("cpu"))
    x = torch.arange(16.0).view(16, 1) * torch.tensor([1.0, 100.0])
    merged = merge_patches(x, items, 2)
    first = torch.tensor([0, 1, 4, 5]) + 4.0  # frames 8 apart, averaged
    assert merged[0].tolist() == torch.stack((first, 100 * first), -1).flatten().tolist()
    assert merged[1, ::2].tolist() == (first + 2).tolist()


def test_no_items_give_no_embeddings() -> None:
    output, sizes = build()(torch.zeros(0, 588), [])
    assert (output.shape, output.dtype, sizes) == ((0, OUT), torch.float64, [])


def test_patches_are_cast_to_the_dtype_of_the_tower() -> None:
    model = VisionModel(TINY, OUT, torch.bfloat16)
    initialize_vision(model, 5, init_std=0.3)
    output, _ = model(make_patches(GRIDS).float(), GRIDS)
    exact = VisionModel(TINY, OUT, torch.float64)
    exact.load_state_dict(model.state_dict())
    expected, _ = exact(make_patches(GRIDS), GRIDS)
    assert output.dtype == torch.bfloat16
    assert (output.double() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit(dtype: torch.dtype) -> None:
    model = VisionModel(TINY, OUT, dtype)
    initialize_vision(model, 5, init_std=0.3)
    expected = gradients(model, make_patches(GRIDS))
    assert len(expected) == len(list(model.parameters()))
    rules = (
        {"vit.layer": "recompute"},
        {"vit.norm": "recompute", "vit.qkv": "recompute", "vit.activation": "recompute"},
    )
    for each in rules:
        found = gradients(model, make_patches(GRIDS), keeper=manager(model.parameters(), **each))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), each


def test_recomputation_keeps_only_the_inputs_of_the_blocks() -> None:
    model = build(replace(TINY, depth=6))
    keeper = manager(model.parameters(), **{"vit.layer": "recompute"})
    gradients(model, make_patches(GRIDS), keeper=keeper)
    assert keeper.saved["vit.layer"] == 6 * sum(map(patches, GRIDS)) * TINY.hidden_size * 8
    # The test's own loss is the other.
    assert keeper.saved.keys() == {"vit.input", "vit.layer", "vit.projector", "other"}


def test_epsilon_is_pinned() -> None:
    x = 1e-3 * torch.ones(1, TINY.hidden_size, dtype=torch.float64)
    model = VisionModel(TINY, OUT, torch.float64)
    initialize_vision(model, 1, init_std=0.02)
    norms = [module for module in model.modules() if type(module).__name__ == "RMSNorm"]
    assert len(norms) == 2 * TINY.depth + 2
    for norm in norms:
        width = norm.weight.shape[0]
        got = norm(x[:, :1].expand(1, width))
        # Mean square 1e-6: torch's own choices would give 0.94 (1.2e-7), 0.011 (2^-7) or 1 (FP64).
        torch.testing.assert_close(got, torch.full_like(got, 1e-3 / math.sqrt(1e-6 + 1e-5)))


def test_initial_values_depend_on_names_alone() -> None:
    first, second = VisionModel(TINY, OUT, torch.float32), VisionModel(TINY, OUT, torch.float32)
    torch.manual_seed(77)
    torch.randn(13)
    initialize_vision(first, 3, 0.02)
    for name, parameter in reversed(list(second.named_parameters())):
        path = f"vision.{name}"
        value = initial_vision(path, parameter, 0.02, named_generator(path, 3, parameter.device))
        parameter.data.copy_(value)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    initialize_vision(second, 4, 0.02)
    again = dict(second.named_parameters())
    changed = {n for n, p in first.named_parameters() if not torch.equal(p, again[n])}
    assert changed == {n for n, p in first.named_parameters() if p.dim() > 1}
    matrices = [p for p in first.parameters() if p.dim() > 1]
    assert len({p.flatten()[0].item() for p in matrices}) == len(matrices)


def test_initial_spread_by_site() -> None:
    vision = replace(TINY, hidden_size=128, head_dim=64, ffn_size=256)
    model = VisionModel(vision, 256, torch.float32)
    initialize_vision(model, 3, 0.02)
    for name, parameter in named(model).items():
        spread = parameter.std().item() if parameter.dim() > 1 else None
        if ".mlp." in name or ".projector.proj." in name:
            assert spread == pytest.approx(math.sqrt(2 / parameter.shape[1]), rel=0.02), name
        elif spread is None:
            assert parameter.unique().tolist() == [1.0], name
        else:
            assert spread == pytest.approx(0.02, rel=0.03), name


def test_names_and_shapes_are_those_that_planning_lists() -> None:
    built = [(name, tuple(parameter.shape)) for name, parameter in named(build()).items()]
    assert built == [(entry.name, entry.shape) for entry in parameters(TINY, OUT)]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((1, 3, 4), r"item 1: grid \(t, h, w\) = \(1, 3, 4\): 3 x 4 does not divide by vision.merge=2; pad"),
        ((1, 4, 5), r"pad to multiples of 28 pixels"),
        ((1, 0, 4), r"every side must be at least 1; resize the item to at least 28 pixels a side"),
        ((0, 2, 2), r"every side must be at least 1"),
        ((5, 2, 2), r"5 frames exceed vision.max_frames=4; cut the clip"),
        ((1, 2, 18), r"a side exceeds vision.rope_max=16; scale the item down"),
        ((1, 10, 8), r"80 patches exceed vision.max_patches=64; scale the item down"),
    ],
)
def test_a_grid_that_cannot_work_is_refused(grid: Grid, message: str) -> None:
    grids = [(1, 2, 2), grid]
    with pytest.raises(UserError, match=message):
        build()(torch.zeros(4 + abs(patches(grid)), 588), grids)


def test_grids_and_patches_that_disagree_are_refused() -> None:
    with pytest.raises(UserError, match="the grids of 5 items need 140 patches, and 139 are given"):
        build()(make_patches(GRIDS)[1:], GRIDS)
    check_grid(TINY, (4, 4, 4))
