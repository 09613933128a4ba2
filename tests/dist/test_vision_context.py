"""The vision tower over a context group against one rank: features, gradients, recomputation, bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3train.vision_config import VisionConfig
from k3train.vision_shapes import Grid, patches, tokens
from tests.dist.launch import run_workers

VISION = VisionConfig(
    enabled=True, depth=2, hidden_size=24, num_heads=3, head_dim=12, ffn_size=40, grid_size=6, rope_max=64,
    max_patches=1024,
)  # fmt: skip
OUT, ROWS, COLUMNS = 20, 2, 96
STARTS = {2: (0, 33, 96), 4: (0, 20, 47, 48, 96)}
"""Uneven; of four ranks, one has hardly a column, and of most parts no feature."""

CASES: dict[str, list[list[Grid]]] = {
    "mixed": [[(1, 12, 16), (1, 4, 6), (1, 4, 6), (3, 2, 4), (1, 6, 6), (2, 8, 2)]],
    "one large clip": [[(4, 16, 12)]],
    "more than ranks": [[(1, 4, 4)] * 7],
    "fewer than ranks": [[(1, 8, 2), (1, 2, 2)]],
    "fewer rows than ranks": [[(1, 4, 24)]],
    "parts and none": [[(1, 12, 4), (2, 4, 4), (1, 2, 6)], [], [(1, 10, 10)]],
}
BUNDLES = {"parts and none": [[[0, 2], [1]], [], [[0]]]}

RULES: dict[str, tuple[int, dict[str, str]]] = {
    "layer": (2, {"vit.layer": "recompute"}),
    "core": (2, {"vit.core": "recompute"}),
    "both": (3, {"vit.layer": "recompute", "vit.core": "recompute"}),
    "others": (1, {"vit.norm": "recompute", "vit.qkv": "recompute", "vit.activation": "recompute"}),
}
"""By name how often keys and values travel, and what is run again."""


def model() -> Any:
    """The same everywhere, FP64, with parameters of a size that all have a say."""
    from k3train.model.vision import VisionModel

    made = VisionModel(VISION, OUT, torch.float64)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return made


def batches(case: str) -> list[dict[str, Any]]:
    """Of whole rows; features stand anywhere in them, also across a border, and in the order of places."""
    random = torch.Generator().manual_seed(5)
    made = []
    for grids in CASES[case]:
        count = sum(tokens(VISION, grid) for grid in grids)
        places = torch.randperm(ROWS * COLUMNS, generator=random)[:count]
        made.append(
            {
                "grids": grids,
                "patches": torch.randn(
                    sum(map(patches, grids)), 588, generator=random, dtype=torch.float64
                ).requires_grad_(),
                "image_positions": places.sort().values,
            }
        )
    return made


def weights(index: int) -> Tensor:
    """By which what stands in a micro-batch's whole rows enters the loss: [b, S, o]."""
    random = torch.Generator().manual_seed(40 + index)
    return torch.randn(ROWS, COLUMNS, OUT, generator=random, dtype=torch.float64)


class Chunk(nn.Module):
    """Stands in for the wrapped chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = model()

    def forward(self, *arguments: Any) -> Tensor:
        features: Tensor = self.vision(*arguments)[0]
        return features


def run(group: Any, case: str, starts: tuple[int, ...], keep: Any = None) -> dict[str, Any]:
    """What a tower puts into this rank's columns of each micro-batch, and its gradients.

    `keep`: makes an activation manager that leaves the given tensors alone.
    """
    from k3train.ops.packing import Packing
    from k3train.train.tower import Tower

    chunk: Any = Chunk()
    keeper = keep and keep(chunk.parameters())
    tower = Tower(VISION, chunk, group, OUT, group)
    read = batches(case)
    for batch in read:
        batch["packing"] = Packing.single(ROWS, COLUMNS, "cpu").shard(group, starts)
    bundles = BUNDLES.get(case) or [[list(range(len(batch["grids"])))] for batch in read]
    tower.load(read, bundles)
    start, stop = starts[group.rank()], starts[group.rank() + 1]
    placed, order = [], []
    for index, (batch, parts) in enumerate(zip(read, bundles, strict=True)):
        shapes = [tower.shape(index, part) for part in range(len(parts))]
        found = [forward(tower, index, part, keeper) for part in range(len(parts))]
        assert [tuple(each.shape) for each in found] == shapes and all(each.requires_grad for each in found)
        rows = torch.zeros(ROWS, stop - start, OUT, dtype=torch.float64)
        if parts:
            rows.view(-1, OUT)[batch["feature_positions"]] = torch.cat(found).detach()
            told = weights(index)[:, start:stop].flatten(0, 1)[batch["feature_positions"]]
            order.append((index, found, told.split([each.shape[0] for each in found])))
        else:
            assert batch["feature_positions"] is None
        placed.append(rows)
    # As in a pipeline, backwards come in another order than forwards.
    for index, found, told in order:
        for part, (features, gradient) in reversed(list(enumerate(zip(found, told, strict=True)))):
            backward(features, gradient, (index, part), keeper)
    if keeper:
        keeper.end_step()
    flops, imbalance = tower.flops, tower.imbalance
    tower.unload()
    gradients = [parameter.grad for parameter in chunk.parameters()]
    gradients += [batch["patches"].grad for batch in read if batch["grids"]]
    return {"placed": placed, "gradients": gradients, "flops": flops, "imbalance": imbalance}


def forward(tower: Any, index: int, part: int, keeper: Any) -> Tensor:
    if keeper is None:
        return tower.forward(index, part)  # type: ignore[no-any-return]
    with keeper.forward((index, part)):
        return tower.forward(index, part)  # type: ignore[no-any-return]


def backward(features: Tensor, gradient: Tensor, key: Any, keeper: Any) -> None:
    if keeper is None:
        features.backward(gradient)
        return
    with keeper.backward(key):
        features.backward(gradient)


def one_rank(case: str) -> dict[str, Any]:
    """The same without any group."""
    made, read = model(), batches(case)
    placed = []
    for index, batch in enumerate(read):
        rows = torch.zeros(ROWS, COLUMNS, OUT, dtype=torch.float64)
        if batch["grids"]:
            features, _ = made(batch["patches"], batch["grids"])
            flat = rows.view(-1, OUT).index_copy(0, batch["image_positions"], features)
            rows = flat.view_as(rows)
            (rows * weights(index)).sum().backward()
        placed.append(rows.detach())
    gradients = [parameter.grad for parameter in made.parameters()]
    gradients += [batch["patches"].grad for batch in read if batch["grids"]]
    return {"placed": placed, "gradients": gradients}


def worker(ranks: int) -> dict[str, Any]:
    """One process: what each of the tests below asserts."""
    from parallel.groups import initialize
    from parallel.topology import Topology

    group = initialize(Topology(context=ranks), timeout_minutes=1, seed=1).pg_collection.cp
    return {
        each.__name__: each(group, STARTS[ranks])
        for each in (values, pieces_of_the_model, traffic, recompute)
    }


def values(group: Any, starts: tuple[int, ...]) -> dict[str, Any]:
    """Largest differences by case, of what is placed and of gradients, over the largest value."""
    import torch.distributed as dist

    from k3train.vision_shapes import train_flops

    found = {}
    for case in CASES:
        ours, theirs = run(group, case, starts), one_rank(case)
        start, stop = starts[group.rank()], starts[group.rank() + 1]
        errors = [
            [difference(mine, whole[:, start:stop])]
            for mine, whole in zip(ours["placed"], theirs["placed"], strict=True)
        ]
        gradients = []
        for mine, whole in zip(ours["gradients"], theirs["gradients"], strict=True):
            total = torch.zeros_like(whole) if mine is None else mine.clone()
            dist.all_reduce(total, group=group)
            assert whole.abs().max() > 1e-3
            gradients.append(difference(total, whole) / whole.abs().max().item())
        grids = [grid for each in CASES[case] for grid in each]
        assert ours["flops"] == train_flops(VISION, OUT, grids)
        found[case] = {
            "placed": max(max(each) for each in errors),
            "gradients": max(gradients),
            "parameters": [parameter is None for parameter in ours["gradients"]].count(True),
            "imbalance": ours["imbalance"],
        }
    return found


def difference(mine: Tensor, other: Tensor) -> float:
    assert mine.shape == other.shape
    return (mine - other).abs().max().item() if mine.numel() else 0.0


def recompute(group: Any, starts: tuple[int, ...]) -> dict[str, Any]:
    """Whether every gradient is the same bit for bit when regions run again, and their exchanges.

    Storages below `smallest` are left alone: on a rank with a small piece, or none, that is all of them.
    """
    from parallel.context.exchange import traffic as counted

    found: dict[str, Any] = {}
    for case in ("mixed", "fewer rows than ranks"):
        counted.clear()
        expected = run(group, case, starts)
        once = counted["vision.keys"]
        for name, (runs, rule) in RULES.items():
            for smallest in (0, 1 << 12):
                counted.clear()
                ours = run(group, case, starts, partial(keeper_of, rule, smallest))
                assert counted["vision.keys"] == runs * once, (case, name, smallest)
                pairs = [
                    (mine, other)
                    for values in ("placed", "gradients")
                    for mine, other in zip(ours[values], expected[values], strict=True)
                ]
                found[f"{case}, {name}, {smallest}"] = all(
                    mine is other if mine is None or other is None else torch.equal(mine, other)
                    for mine, other in pairs
                )
    return found


def keeper_of(rule: dict[str, str], smallest: int, own: Any) -> Any:
    from tests.unit.model.saved import manager

    made = manager(own, **rule)
    made._smallest = smallest
    return made


def traffic(group: Any, starts: tuple[int, ...]) -> dict[str, Any]:
    """(counted, calculated) bytes of each exchange."""
    from k3train.vision_context import assign
    from parallel.context.exchange import traffic as counted

    found = {}
    rank, number = group.rank(), 8
    for case, microbatches in CASES.items():
        counted.clear()
        run(group, case, starts)
        keys = keys_back = features = features_back = 0
        bundles = BUNDLES.get(case) or [[list(range(len(grids)))] for grids in microbatches]
        for batch, parts in zip(batches(case), bundles, strict=True):
            target = torch.bucketize(
                batch["image_positions"] % COLUMNS, torch.tensor(starts[1:-1]), right=True
            ).split([tokens(VISION, grid) for grid in batch["grids"]])
            for part in parts:
                found_here = assign(VISION, OUT, [batch["grids"][item] for item in part], group.size())
                for item, piece in found_here.pieces(rank):
                    others = len(found_here.members(item)) - 1
                    keys += others * piece.patches
                    keys_back += (patches(piece.grid) - piece.patches) if others else 0
                made = found_here.tokens(VISION.merge)
                for item, counts in zip(part, made, strict=True):
                    by_source = target[item].split(counts)
                    features += int((by_source[rank] != rank).sum())
                    features_back += sum(
                        int((each == rank).sum()) for source, each in enumerate(by_source) if source != rank
                    )
        row = VISION.depth * 2 * VISION.num_heads * VISION.head_dim * number
        found[case] = {
            "vision.keys": (counted["vision.keys"], keys * row),
            "vision.keys.backward": (counted["vision.keys.backward"], keys_back * row),
            "vision.features": (counted["vision.features"], features * OUT * number),
            "vision.features.backward": (counted["vision.features.backward"], features_back * OUT * number),
        }
    return found


def pieces_of_the_model(group: Any, starts: tuple[int, ...]) -> dict[str, Any]:
    """The model without the tower, under each backend, cut as `borders` say: difference of each piece."""
    from k3train.model.vision import VisionModel
    from k3train.ops.items import Share
    from k3train.vision_context import Assignment

    grids: list[Grid] = [(2, 8, 4), (1, 4, 4), (1, 6, 6)]
    ranks = group.size()
    borders = {
        2: ((0, 2, 8), (0, 0, 4), (0, 4, 6)),
        4: ((0, 0, 2, 6, 8), (0, 0, 4, 4, 4), (0, 2, 2, 2, 6)),
    }[ranks]
    share = Share(Assignment(tuple(grids), borders, (1.0,) * ranks), group)
    x = torch.randn(
        sum(map(patches, grids)), 588, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = {}
    for attention in ("sdpa", "reference"):
        made = model()
        other = VisionModel(replace(VISION, attention=attention), OUT, torch.float64)
        other.load_state_dict(made.state_dict())
        whole, sizes = made(x, grids)
        items = [
            each.unflatten(0, grid)
            for each, grid in zip(x.split(list(map(patches, grids))), grids, strict=True)
        ]
        own = [
            items[item][:, p.first : p.stop].flatten(0, 2)
            for item, p in share.assignment.pieces(group.rank())
        ]
        ours, counts = other(torch.cat(own), grids, share)
        expected = [
            features[p.first // 2 * p.grid[2] // 2 : p.stop // 2 * p.grid[2] // 2]
            for item, p in share.assignment.pieces(group.rank())
            for features in [whole.split(sizes)[item]]
        ]
        assert counts == [each.shape[0] for each in expected]
        found[attention] = difference(ours, torch.cat(expected))
    return found


Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=STARTS)
def found(request: pytest.FixtureRequest) -> Found:
    return run_workers("tests.dist.test_vision_context:worker", request.param, {"ranks": request.param})


def test_features_and_gradients_equal_one_rank(found: Found) -> None:
    for each in found:
        for case, errors in each["values"].items():
            assert errors["placed"] < 1e-12, case
            assert errors["gradients"] < 1e-12, case
            assert errors["imbalance"] >= 1
    assert [each["values"]["one large clip"]["imbalance"] for each in found] == [1.0] * len(found)
    # Nothing is without a gradient on any rank, be it all zeros: backward is a collective.
    assert all(errors["parameters"] == 0 for each in found for errors in each["values"].values())


def test_pieces_in_any_order_of_ranks_under_each_backend(found: Found) -> None:
    assert all(error < 1e-12 for each in found for error in each["pieces_of_the_model"].values())


def test_recomputation_changes_no_bit_and_leaves_nobody_waiting(found: Found) -> None:
    for each in found:
        assert len(each["recompute"]) == 16
        assert all(each["recompute"].values()), each["recompute"]


def test_bytes_are_those_of_the_formula(found: Found) -> None:
    for each in found:
        for case, exchanges in each["traffic"].items():
            for name, (counted, calculated) in exchanges.items():
                assert counted == calculated, (case, name)
    for name in ("vision.keys", "vision.features"):
        forward_sum, back = (
            sum(each["traffic"]["mixed"][f"{name}{suffix}"][0] for each in found)
            for suffix in ("", ".backward")
        )
        assert forward_sum == back > 0
