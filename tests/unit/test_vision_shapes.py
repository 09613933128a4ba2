from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

import conf
from k3train import vision_shapes as shapes
from k3train.model.vision import VisionModel
from k3train.model.vision_init import initialize_vision
from k3train.vision_config import VisionConfig
from tests.unit.test_architecture import ROOT, heavy_chains

MOONVIT = VisionConfig()
SMALL = VisionConfig(depth=3, hidden_size=64, num_heads=3, head_dim=32, ffn_size=160, grid_size=8)


def test_parameters_equal_the_published_sizes() -> None:
    counts = shapes.count_by_kind(MOONVIT, 7168)
    assert counts == {"vision": 401_214_464, "projector": 46_144_512}
    assert round(counts["vision"] / 1e6, 1) == 401.2
    assert round(counts["projector"] / 1e6, 1) == 46.1


def test_shapes_equal_the_released_checkpoint() -> None:
    shape = {entry.name: entry.shape for entry in shapes.parameters(MOONVIT, 7168)}
    block = "vision.tower.encoder.blocks.26."
    assert shape["vision.tower.patch_embed.proj.weight"] == (1024, 3 * 14 * 14)
    assert shape["vision.tower.patch_embed.pos_emb.weight"] == (64, 64, 1024)
    assert (shape[block + "wqkv.weight"], shape[block + "wo.weight"]) == ((4608, 1024), (1024, 1536))
    assert (shape[block + "mlp.fc0.weight"], shape[block + "mlp.fc1.weight"]) == ((4096, 1024), (1024, 4096))
    assert shape["vision.projector.proj.0.weight"] == (4096, 4096)
    assert shape["vision.projector.proj.2.weight"] == (7168, 4096)
    assert shape["vision.projector.post_norm.weight"] == (7168,)
    assert len(shape) == 2 + 27 * 6 + 1 + 3


def test_tokens_of_an_item() -> None:
    assert shapes.tokens(MOONVIT, (1, 256, 256)) == 16384
    assert shapes.tokens(MOONVIT, (4, 16, 20)) == 80
    assert shapes.patches((4, 16, 20)) == 1280


@pytest.mark.parametrize("grid", [(1, 4, 6), (3, 2, 4)])
def test_flops_equal_those_that_torch_counts(grid: shapes.Grid) -> None:
    model = VisionModel(replace(SMALL, attention="reference"), 96, torch.float32)
    initialize_vision(model, 1, 0.02)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(shapes.patches(grid), 588), [grid])
    counts = shapes.forward_flops(SMALL, 96, grid)
    _, h, w = grid
    resize = 2 * 8 * 64 * h * (8 + w)  # of the grid of positions, left out of the formula
    assert counter.get_total_flops() == sum(counts.values()) + resize
    assert shapes.image_cost(SMALL, 96, grid) == sum(counts.values())
    assert shapes.train_flops(SMALL, 96, [grid, grid]) == 6 * sum(counts.values())


def test_cost_grows_with_the_square_of_the_patches() -> None:
    once, twice = (shapes.forward_flops(MOONVIT, 7168, (1, side, 64)) for side in (64, 128))
    assert twice["vision_core"] == 4 * once["vision_core"]
    assert twice["vision_projection"] == 2 * once["vision_projection"]
    frames = shapes.forward_flops(MOONVIT, 7168, (2, 64, 64))
    assert {**frames, "projector": 0.0} == {**twice, "projector": 0.0}
    assert frames["projector"] == once["projector"]
    # At the largest image attention is the most of it: 4 L C against 4 d C + 2 d f of linears.
    largest = shapes.forward_flops(MOONVIT, 7168, (1, 256, 256))
    assert largest["vision_core"] / largest["vision_projection"] == pytest.approx(2 * 65536 * 1536 / 14680064)


def saved_bytes(vision: VisionConfig, grids: list[shapes.Grid]) -> int:
    """Bytes that autograd holds after a forward in FP32, parameters apart."""
    model = VisionModel(vision, 96, torch.float32)
    initialize_vision(model, 1, 0.02)
    held: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    x = torch.randn(sum(map(shapes.patches, grids)), 588)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, grids)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for place, (size, _) in held.items() if place not in own)


def test_planning_vision_loads_no_torch() -> None:
    for path in ("k3train/vision_config.py", "k3train/vision_shapes.py"):
        assert heavy_chains(ROOT, path) == []


@pytest.mark.parametrize("name", ["none", "tiny", "moonvit_v2"])
def test_shipped_towers_are_valid(name: str) -> None:
    given = yaml.safe_load((Path(conf.__file__).parent / f"vision/{name}.yaml").read_text())
    vision = VisionConfig(**given)
    assert vision.enabled == (name != "none")
    assert vision.head_dim % 4 == 0 and vision.rope_max >= vision.grid_size
    if name == "moonvit_v2":
        shape = {key.name for key in fields(vision)} - {"enabled"}
        assert all(getattr(vision, key) == getattr(MOONVIT, key) for key in shape)
    if name == "tiny":
        assert sum(shapes.count_by_kind(vision, 256).values()) < 250_000
