"""Forward-only weights in the gradient slots, which are lent without allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel.zero2.borrow import LentWeights
from parallel.zero2.rotator import Rotator
from parallel.zero2.store import DeviceStore, Key


class Chunk:
    """As much of `ChunkGradients` as a rotator needs."""

    def __init__(self, index: int, numel: int) -> None:
        self.index, self.numel, self.shards, self.pieces = index, numel, [], {}
        self.slot: torch.Tensor | None = None

    def bind(self, slot: torch.Tensor) -> None:
        self.slot = slot

    def park(self) -> None:
        self.slot = None


def rotator(*sizes: int) -> Rotator:
    made = Rotator(DeviceStore(), torch.device("cpu"))
    for index, numel in enumerate(sizes):
        chunk: Any = Chunk(index, numel)
        made.register(chunk)
    return made


def model(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    half = nn.Linear(5, 3).to(torch.bfloat16)
    return [nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)).eval(), nn.Linear(7, 5), half]


def test_chunks_compute_in_the_slots_what_they_did_outside() -> None:
    inputs = torch.randn(4, 7)
    expected, taught = inputs, model(3)
    for chunk in taught:
        expected = chunk(expected.to(next(chunk.parameters()).dtype))
    slots = rotator(512, 600)
    lent = LentWeights(taught, slots)
    memory = slots.borrow()
    spans = [range(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in memory]
    for _ in range(2):
        held = inputs
        for number in range(3):
            with lent.lend(number, number + 1 if number < 2 else None) as chunk:
                held = chunk(held.to(next(chunk.parameters()).dtype))
                for tensor in (*chunk.parameters(), *chunk.buffers()):
                    assert tensor.data_ptr() in spans[number % 2]
            assert all(p.untyped_storage().nbytes() <= 8 for p in chunk.parameters())
        assert torch.equal(held, expected)
    assert [slot.data_ptr() for slot in slots.borrow()] == [slot.data_ptr() for slot in memory]
    assert slots.device_bytes() == 2 * 600 * 4


def test_weights_are_replaced() -> None:
    slots = rotator(512)
    lent = LentWeights(model(1), slots)
    lent.update(1, model(2)[1])
    with lent.lend(1) as chunk:
        assert torch.equal(chunk.weight, model(2)[1].weight)


def test_gradients_and_lent_weights_take_turns() -> None:
    slots = rotator(512)
    lent = LentWeights(model(1), slots)
    slots.begin(0)
    with pytest.raises(AssertionError, match="never summed"), lent.lend(0):
        pass


def test_what_was_copied_ahead_is_copied_again_behind_another_s_turn() -> None:
    slots = rotator(512)
    teacher, reference = LentWeights(model(1), slots), LentWeights(model(2), slots)
    with teacher.lend(0, 1):
        pass
    with reference.lend(1):
        pass
    with teacher.lend(1) as chunk:
        assert torch.equal(chunk.weight, model(1)[1].weight)


def test_what_does_not_fit_or_collides_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"chunk 0 of the forward-only model has \d+ bytes and a gradient slot"
    ):
        LentWeights(model(1), rotator(10))
    lent = LentWeights(model(1), rotator(512))
    with pytest.raises(AssertionError, match="share a slot"), lent.lend(0, 2):
        pass


def test_a_store_copies_the_first_part_and_adds_the_others() -> None:
    store, key = DeviceStore(), Key(0, 0, 0)
    store.allocate(key, 3, torch.device("cpu"))
    for _ in range(2):
        store.reset([key])
        with pytest.raises(AssertionError, match="nothing has been accumulated"):
            store.view(key)
        store.accumulate(key, torch.tensor([1.0, 2.0, 3.0]))
        store.accumulate(key, torch.tensor([1.0, 1.0, 1.0])).wait()
        store.scale([key], 2.0)
        assert store.view(key).tolist() == [4.0, 6.0, 8.0]
    out = torch.empty(3)
    store.fetch(key, out)
    assert out.tolist() == [4.0, 6.0, 8.0] and store.device_bytes() == 12
