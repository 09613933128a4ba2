"""The order of passes through peer memory, on threads that share their staging; and why it is refused."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.moonep.transport import peer
from parallel.moonep.transport.peer import PeerTransport

RANKS, PLACES = 3, 2
STAGING = 2 * (RANKS - 1) * 512  # parts of the smallest size
CPU = torch.device("cpu")


class Idle:
    """A stream or an event: here every copy is over when it returns."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Idle:
        return self


class Handle:
    """Memory of all ranks, and a barrier at which no rank arrives in step with the others."""

    world_size = RANKS

    def __init__(self, rank: int, memories: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self._memories, self._barrier = rank, memories, barrier
        self._lag = random.Random(rank)

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memories[rank].view(shape)

    def barrier(self) -> None:
        time.sleep(self._lag.choice([0, 0, 1e-3]))
        self._barrier.wait(timeout=20)
        time.sleep(self._lag.choice([0, 0, 1e-3]))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[PeerTransport], Any]], list[Any]]:
    """Runs a function on every rank at once, each with its transport; what each returned."""
    idle = Idle()
    monkeypatch.setattr(torch.cuda, "Stream", Idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: idle)
    monkeypatch.setattr(peer.symmetric_memory, "rendezvous", lambda memory, handle: handle)
    lanes: list[Any] = [[] for _ in range(RANKS)]
    for _ in range(2):
        memories = [torch.zeros(STAGING, dtype=torch.uint8) for _ in range(RANKS)]
        barrier = threading.Barrier(RANKS)
        for rank in range(RANKS):
            handle: Any = Handle(rank, memories, barrier)
            lanes[rank].append(peer._Lane(handle, memories[rank]))
    monkeypatch.setattr(peer, "_lanes", lambda group, device, staging: tuple(lanes[group]))

    def run(function: Callable[[PeerTransport], Any]) -> list[Any]:
        results: list[Any] = [None] * RANKS

        def work(rank: int) -> None:
            group: Any = rank
            results[rank] = function(PeerTransport(group, CPU))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


def rows_of(rank: int, count: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(count, 17, generator=generator, dtype=torch.float64)


def test_ragged_rows_in_many_passes(together: Any) -> None:
    draw = random.Random(0)
    rounds = [[[draw.choice([0, 1, 9, 30]) for _ in range(RANKS)] for _ in range(RANKS)] for _ in range(12)]

    def exchange(transport: PeerTransport) -> list[Tensor]:
        found, rank = [], transport.rank
        for number, counts in enumerate(rounds):
            most = max(counts[r][d] for r in range(RANKS) for d in range(RANKS) if r != d)
            rows = rows_of(rank, sum(counts[rank]), number)
            received = [row[rank] for row in counts]
            found.append(transport.exchange(rows, counts[rank], received, most=most).wait())
            found.append(transport.gather(torch.tensor([rank, number])))
        return found

    results = together(exchange)
    for number, counts in enumerate(rounds):
        sent = [rows_of(rank, sum(counts[rank]), number).split(counts[rank]) for rank in range(RANKS)]
        for rank in range(RANKS):
            arrived, gathered = results[rank][2 * number : 2 * number + 2]
            assert torch.equal(arrived, torch.cat([pieces[rank] for pieces in sent]))
            assert gathered.tolist() == [[each, number] for each in range(RANKS)]


def test_experts_and_their_gradients(together: Any) -> None:
    wanted = [[2, 4, 5], [], [0, 2]]

    def borrow(transport: PeerTransport) -> tuple[list[Tensor], list[list[Tensor]]]:
        own = [rows_of(transport.rank, 20, 50 + place) for place in range(PLACES)]
        slots = transport.fetch_experts(wanted, own).wait()
        gradients = [slot * 10 + transport.rank for slot in slots]
        return slots, transport.return_gradients(wanted, gradients, PLACES, own[0]).wait()

    results = together(borrow)
    experts = [rows_of(each // PLACES, 20, 50 + each % PLACES) for each in range(RANKS * PLACES)]
    for rank, (slots, home) in enumerate(results):
        assert all(torch.equal(slot, experts[each]) for slot, each in zip(slots, wanted[rank], strict=True))
        for place in range(PLACES):
            expert = rank * PLACES + place
            borrowers = [other for other in range(RANKS) if expert in wanted[other]]
            assert len(home[place]) == len(borrowers)
            for gradient, other in zip(home[place], borrowers, strict=True):
                assert torch.equal(gradient, experts[expert] * 10 + other)


def test_more_than_two_ranks_have_to_know_the_most(together: Any) -> None:
    def exchange(transport: PeerTransport) -> str:
        with pytest.raises(AssertionError, match="pass `most`"):
            transport.exchange(torch.zeros(3, 1), [1] * 3, [1] * 3)
        with pytest.raises(AssertionError, match="2 rows between two ranks, said to be at most 1"):
            transport.exchange(torch.zeros(6, 1), [2] * 3, [2] * 3, most=1)
        return "refused"

    assert together(exchange) == ["refused"] * RANKS


@pytest.mark.parametrize("length", [1, 2, 5, 100])
def test_parts_of_a_message(length: int) -> None:
    pieces = [torch.arange(count, dtype=torch.uint8) + 10 * count for count in (3, 0, 5, 1, 7)]
    whole, found = torch.cat(pieces), torch.zeros(16, dtype=torch.uint8)
    for begin in range(0, 16, length):
        for place, piece in peer.cut(pieces, begin, length):
            assert 0 <= place < place + len(piece) <= length
            found[begin + place : begin + place + len(piece)] += piece
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ([("a", 0), ("b", 1)], "reaches the GPUs of one host, and the ranks are on 2"),
        (
            [("a", 0), ("a", 0)],
            "two ranks have the same device number: let every rank see all GPUs of its host",
        ),
        ([("a", 0), ("a", 1)], "GPU 0 cannot reach the memory of GPU 1 (rank 0)"),
    ],
)
def test_why_not(monkeypatch: pytest.MonkeyPatch, where: list[tuple[str, int]], reason: str) -> None:
    answers = iter([where])

    def gather(into: list[Any], value: Any, group: Any) -> None:
        into[:] = next(answers, [value] * len(where))

    monkeypatch.setattr(peer.dist, "get_world_size", lambda group: len(where))
    monkeypatch.setattr(peer.dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    group: Any = None
    assert peer._apart(group, torch.device("cuda", 0)) == reason
