"""The vision tower on CUDA against the FP64 one on CPU, and the variable-length attention kernel.

Letters: L patches, H heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch

from k3train.model.vision import VisionModel
from k3train.model.vision_init import initialize_vision
from k3train.ops import backends
from k3train.ops.item_attention import item_attention
from k3train.ops.items import Items
from k3train.vision_config import VisionConfig
from k3train.vision_shapes import patches
from tests.gpu.test_ops import compare, normal, relative, usable
from tests.unit.ops.test_vision_ops import make_share

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GRIDS = [(1, 8, 6), (1, 8, 6), (3, 4, 10), (1, 2, 2), (1, 20, 14)]
SMALL = VisionConfig(depth=3, hidden_size=256, num_heads=3, head_dim=128, ffn_size=512, grid_size=16)


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_item_attention(backend: str) -> None:
    usable("item_attention", backend)
    length = sum(map(patches, GRIDS))
    here, there = (Items.pack(GRIDS, torch.device(device)) for device in ("cpu", "cuda"))
    compare(
        lambda *x: item_attention(*x, there, backend),
        lambda *x: item_attention(*x, here, "reference"),
        [normal(length, 3, 128, seed=i) for i in range(3)],
        bound=1e-2,
        grad_bound=1.5e-2,
    )


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_pieces_of_items_and_all_of_their_keys(backend: str) -> None:
    usable("item_attention", backend)
    here, there = (make_share(device) for device in ("cpu", "cuda"))
    compare(
        lambda *x: backends.call("item_attention", backend, x[0], *x, there),
        lambda *x: backends.call("item_attention", "reference", x[0], *x, here),
        [normal(rows, 3, 128, seed=i) for i, rows in enumerate((22, 46, 46))],
        bound=1e-2,
        grad_bound=1.5e-2,
    )


def test_the_tower_in_bf16() -> None:
    model = VisionModel(SMALL, 320, torch.bfloat16)
    initialize_vision(model, 1, 0.05)
    exact = VisionModel(SMALL, 320, torch.float64).cpu()
    exact.load_state_dict(model.state_dict())
    x = normal(sum(map(patches, GRIDS)), 588, seed=0)
    output, _ = model(x.cuda(), GRIDS)
    expected, _ = exact(x.double(), GRIDS)
    weight = normal(*expected.shape, seed=1)
    output.backward(weight.cuda())
    expected.backward(weight.double())
    assert relative(output, expected) < 2e-2
    for (name, mine), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert relative(mine.grad, other.grad) < 6e-2, name


def test_the_tower_does_not_wait_for_the_device() -> None:
    model = VisionModel(SMALL, 320, torch.bfloat16)
    initialize_vision(model, 1, 0.02)
    x = normal(sum(map(patches, GRIDS)), 588, seed=0).cuda()
    model(x, GRIDS)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x, GRIDS)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
