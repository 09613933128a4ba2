"""The activation manager on small graphs: gradients do not change by a bit, wherever saved tensors lie."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload import fp8
from offload.errors import OffloadError
from offload.manager import ActivationManager
from offload.policy import Policy
from offload.sites import named, region, site

CPU = torch.device("cpu")
WIDTH, ROWS, LAYERS = 32, 24, 4


class Parcel:
    """Bytes on a tier that can only be used as the protocol says."""

    def __init__(self, tier: Tier, source: Tensor) -> None:
        self._tier, self._source, self._bytes = tier, source, source.clone()
        self._fetched: Tensor | None = None
        tier.held += source.numel()

    def wait_stored(self) -> None:
        self._tier.waits += not self._tier.is_done
        self._source = None  # type: ignore[assignment]

    def is_stored(self) -> bool:
        return self._tier.is_done

    def fetch(self) -> None:
        self._tier.fetches += self._fetched is None
        self._fetched = self._bytes.clone()

    def take(self) -> Tensor:
        if self._tier.lost:
            raise OffloadError("lost")
        if self._fetched is None:
            self.fetch()
        found, self._fetched = self._fetched, None
        assert found is not None
        return found

    def free(self) -> None:
        self._tier.held -= self._bytes.numel()


class Tier:
    """A tier that counts."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity, self.held, self.fetches, self.lost = capacity, 0, 0, False
        self.is_done, self.waits = True, 0

    def put(self, tier: str, source: Tensor) -> Parcel | None:
        if self.held + source.numel() > self.capacity:
            return None
        return Parcel(self, source)

    def used(self) -> dict[str, int]:
        return {"host": self.held}


class Block(nn.Module):
    """Every kind of annotation, with views, a residual, dropout, and one tensor saved by two operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, bank: Tensor) -> Tensor:
        named("bank.rows", bank)
        y: Tensor = region("block", self._run, x, bank, keep_results=True)
        return y

    def _run(self, x: Tensor, bank: Tensor) -> Tensor:
        normed = region("norm", self.norm, x)
        with site("block.product"):
            product = self.first(normed)
        gate, up = product.chunk(2, dim=-1)
        activated = region("activation", self._activate, gate, up)
        with site("block.output"):
            return x + self.second(activated) * bank.sigmoid() + bank * x.tanh()

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.dropout(gate.sigmoid() * up, 0.25, train=True)


SITES = ("bank.rows", "block", "norm", "activation", "block.product", "block.output", "other", "mtp.norm")
STORAGES = ("keep", "host", "recompute", "recompute+host")


def storages(name: str) -> tuple[str, ...]:
    return STORAGES if name.rpartition(".")[2] in ("block", "norm", "activation") else STORAGES[:2]


class Model:
    """Layers over two micro-batches in flight, with a part whose names have a prefix."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS)).double()
        self.inputs = [torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def run(self, data: Tensor) -> Tensor:
        bank, x = data.tanh(), data
        for layer in self.layers[:-1]:
            x = layer(x, bank)
        with site("mtp"):
            return self.layers[-1](x, bank).square().sum()

    def gradients(self, manager: ActivationManager | None, *, nested: bool = True) -> list[Tensor]:
        """Of two micro-batches, the second backward before the first or one behind the other."""
        torch.manual_seed(1)
        losses = []
        for number, data in enumerate(self.inputs):
            if manager is None:
                losses.append(self.run(data))
            else:
                with manager.forward(number):
                    losses.append(self.run(data))
        order = (1, 0) if nested else (0, 1)
        for number in order:
            if manager is None:
                losses[number].backward()
                continue
            manager.prefetch(number)
            with manager.backward(number):
                losses[number].backward()
        found = [*(parameter.grad for parameter in self.layers.parameters()), *(x.grad for x in self.inputs)]
        for tensor in (*self.layers.parameters(), *self.inputs):
            tensor.grad = None
        return [tensor for tensor in found if tensor is not None]


def build(
    model: Model, sites: dict[str, str], tier: Tier, *, window: int = 20_000, smallest: int = 1
) -> ActivationManager:
    return ActivationManager(
        Policy.read(sites),
        tier,
        parameters=model.layers.parameters(),
        device=CPU,
        codec=fp8,
        coded=torch.float64,
        window=window,
        smallest=smallest,
    )


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Tensor]:
    return model.gradients(None)


@pytest.fixture(autouse=True)
def no_cycles() -> Iterator[None]:
    """Memory must come back by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) == 6 * LAYERS + 2
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_empty(manager: ActivationManager, tier: Tier) -> None:
    assert tier.held == 0
    assert manager.ledger.now() == {"device": 0, "fp8": 0, "window": 0, "host": 0}


@pytest.mark.parametrize("seed", range(24))
def test_any_policy_leaves_every_bit(seed: int, model: Model, expected: list[Tensor]) -> None:
    random = np.random.default_rng(seed)
    sites = {name: str(random.choice(storages(name))) for name in SITES if random.random() < 0.8}
    sites["*"] = str(random.choice(STORAGES[:2]))
    tier = Tier(int(random.choice([0, 30_000, 1 << 30])))
    manager = build(model, sites, tier, window=int(random.choice([1, 9_000, 60_000, 1 << 30])))
    for nested in (True, False):
        manager.begin_step()
        assert_equal(model.gradients(manager, nested=nested), expected)
        assert_empty(manager, tier)
        manager.end_step()


def test_nothing_is_saved_by_a_recomputed_function(model: Model, expected: list[Tensor]) -> None:
    held = {}
    for name, sites in {
        "keep": {},
        "block": {"block": "recompute", "mtp.block": "recompute"},
        "activation": {"activation": "recompute", "mtp.activation": "recompute"},
    }.items():
        manager = build(model, sites, Tier())
        manager.begin_step()
        assert_equal(model.gradients(manager), expected)
        held[name] = manager.ledger.peak["device"], dict(manager.saved)
    row = ROWS * WIDTH * 8
    # Of each micro-batch: the bank row, saved by its tanh first, what enters blocks, and the last result.
    blocks = {"other": 2 * row, "block": 2 * 3 * row, "mtp.block": 2 * row, "mtp": 2 * row}
    assert held["block"][1] == blocks
    gone = held["keep"][0] - held["activation"][0]
    # sigmoid(gate), its product with `up`, the mask's product, for each block of two micro-batches.
    assert gone >= 2 * LAYERS * 3 * (2 * row)


def test_a_storage_is_stored_once(model: Model) -> None:
    tier = Tier()
    manager = build(model, {"*": "host"}, tier, window=1)
    data = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with manager.forward("only"):
        x = data * 1
        with site("first.site"):
            left, right = x.chunk(2, dim=-1)
            y = left * right
        with site("second.site"):
            z = (x.t() @ x).sum() + (y * y).sum() + x.view(-1).square().sum()
    whole = ROWS * WIDTH * 8
    assert manager.saved == {"first.site": whole, "second.site": whole // 2}
    assert tier.held == whole + whole // 2
    with manager.backward("only"):
        z.backward()
    del x, y, left, right, z
    assert_empty(manager, tier)


def test_parameters_small_tensors_and_integers_are_left_alone(model: Model) -> None:
    tier = Tier()
    manager = build(model, {"*": "host"}, tier, window=1, smallest=2000)
    weight = model.layers[0].first.weight
    small, index = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True), torch.arange(400) % 4
    with manager.forward("only"):
        (small @ weight.t()).index_select(0, index[:4]).square().sum()
    assert manager.saved == {"other": 4 * 4 * WIDTH * 8}, (
        "its square keeps the product, whose factors are small or parameters"
    )


def test_a_change_in_place_is_noticed(model: Model) -> None:
    for sites in ({}, {"*": "host"}):
        manager = build(model, sites, Tier(), window=1 << 30)
        data = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        with manager.forward("only"):
            x = data * 1
            y = x.square().sum()
            x.add_(1)
        with manager.backward("only"), pytest.raises(RuntimeError, match="changed in place since"):
            y.backward()


def test_the_windows_bound_what_is_on_the_device(model: Model) -> None:
    row = ROWS * WIDTH * 8
    for window in (0, 4 * row, 16 * row):
        tier = Tier()
        manager = build(model, {"*": "host"}, tier, window=window)
        manager.begin_step(record=True)
        model.gradients(manager)
        # And the newest, and the one that is being saved, or used; the largest has four rows.
        assert manager.ledger.peak["device"] <= window + 2 * 4 * row
        assert manager.ledger.peak["window"] <= window + 2 * 4 * row


def test_what_has_not_left_is_not_fetched(model: Model) -> None:
    tier = Tier()
    manager = build(model, {"*": "host"}, tier, window=1 << 30)
    model.gradients(manager)
    assert tier.fetches == 0
    narrow = build(model, {"*": "host"}, tier, window=0)
    model.gradients(narrow)
    assert tier.fetches > 10


def test_backward_waits_for_no_copy_out(model: Model, expected: list[Tensor]) -> None:
    tier = Tier()
    manager = build(model, {"*": "host"}, tier, window=1 << 30)
    tier.is_done = False
    assert_equal(model.gradients(manager), expected)
    assert tier.waits == tier.fetches == 0
    held = manager.ledger.now()
    assert held["device"] == held["host"] == tier.held > 0, "nobody wants it, but it is being copied"
    tier.is_done = True
    assert_equal(model.gradients(manager), expected)
    assert tier.waits == 0
    assert_empty(manager, tier)


def test_copies_that_outlive_their_tensors_count_in_the_window(model: Model, expected: list[Tensor]) -> None:
    row = ROWS * WIDTH * 8
    tier = Tier()
    manager = build(model, {"*": "host"}, tier, window=40 * row)
    tier.is_done = False
    for _ in range(3):
        manager.begin_step()
        assert_equal(model.gradients(manager, nested=False), expected)
        assert manager.ledger.peak["device"] <= 40 * row + 2 * 4 * row
        assert manager.ledger.now()["device"] > 0
    assert tier.waits > 0
    manager.end_step()
    assert_empty(manager, tier)


def test_a_row_is_held_between_forwards(model: Model) -> None:
    tier = Tier()
    manager = build(model, {"*": "host"}, tier, window=0)
    leaf = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with manager.forward(0):
        row = leaf * 2
        first = row.square().sum()
        get = manager.hold(row)
    del row
    stored = tier.held
    with manager.forward(1):
        again = get().requires_grad_()
        second = again.pow(3).sum()
    assert tier.held == stored, "it is the same row"
    value = again.detach().clone()
    with manager.backward(1):
        second.backward()
    assert torch.equal(again.grad, 3 * value.square())  # type: ignore[arg-type]
    del again, second
    with manager.backward(0):
        first.backward()
    assert torch.equal(get(), leaf * 2)
    del first, get
    assert_empty(manager, tier)


def test_without_announced_backwards(model: Model, expected: list[Tensor]) -> None:
    """As under a schedule that knows nothing of the manager."""
    tier = Tier()
    manager = build(model, {"*": "host", "activation": "recompute"}, tier, window=9_000)
    torch.manual_seed(1)
    losses = []
    for number, data in enumerate(model.inputs):
        with manager.forward(number):
            losses.append(model.run(data))
    while losses:
        losses.pop().backward()
    found = [*(parameter.grad for parameter in model.layers.parameters()), *(x.grad for x in model.inputs)]
    for tensor in (*model.layers.parameters(), *model.inputs):
        tensor.grad = None
    assert_equal(found, expected)  # type: ignore[arg-type]
    manager.end_step()
    assert_empty(manager, tier)


def test_a_lost_block_is_an_error_and_a_full_tier_is_not(model: Model, expected: list[Tensor]) -> None:
    tier = Tier(capacity=0)
    assert_equal(model.gradients(build(model, {"*": "host"}, tier, window=0)), expected)
    tier = Tier()
    tier.lost = True
    manager = build(model, {"*": "host"}, tier, window=0)
    with pytest.raises(OffloadError, match="lost"):
        model.gradients(manager)
    for tensor in (*model.layers.parameters(), *model.inputs):
        tensor.grad = None
    manager.end_step()


def test_a_function_that_saves_something_else_again_is_refused(model: Model) -> None:
    calls: list[int] = []

    def fickle(x: Tensor) -> Tensor:
        calls.append(1)
        return x.square() if len(calls) == 1 else x * 2

    manager = build(model, {"fickle": "recompute"}, Tier())
    data = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with manager.forward(0):
        y = region("fickle", fickle, data * 1).sum()
    with manager.backward(0), pytest.raises(AssertionError, match="fickle saved 1 tensors, and 0"):
        y.backward()


def test_annotations_do_nothing_without_a_manager(model: Model, expected: list[Tensor]) -> None:
    def hooked(pack: Callable[[Tensor], Any]) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            model.run(model.inputs[0])

    seen: list[Tensor] = []
    hooked(lambda tensor: seen.append(tensor) or tensor)
    assert len(seen) > LAYERS * 8
    assert_equal(model.gradients(None), expected)


def test_fp8_is_a_rounding(model: Model, expected: list[Tensor]) -> None:
    found = {}
    for storage in ("fp8", "fp8+host"):
        tier = Tier()
        manager = build(model, {"*": storage}, tier, window=0)
        manager._coded = torch.float32
        manager.begin_step()
        assert_equal(model.gradients(manager), expected)
        assert manager.ledger.peak["fp8"] == 0, "the dtype is another one"
        found[storage] = model_in_float32(storage, tier)
        assert tier.held == 0
    exact = model_in_float32("keep", Tier())
    assert_equal(found["fp8"], found["fp8+host"])
    for one, other in zip(found["fp8"], exact, strict=True):
        error = (one - other).norm() / other.norm()
        assert 0 < error < 0.1, "four bits of a mantissa: 3 % at each of a few places"


def model_in_float32(storage: str, tier: Tier) -> list[Tensor]:
    model = Model()
    model.layers.float()
    model.inputs = [data.detach().float().requires_grad_() for data in model.inputs]
    manager = build(model, {"*": storage}, tier, window=0)
    manager._coded = torch.float32
    return model.gradients(manager)
