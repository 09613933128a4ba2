"""One rank of the GPU tests of balanced experts: a GPU each, NCCL beside peer memory.

Letters: R ranks, E experts, P = E/R at home on a rank, S tokens of a rank, K experts of a token.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.moonep import MoonEP, Segments
from parallel.moonep.transport import Pending, Transport, choose, open_transport
from parallel.moonep.transport.peer import PeerTransport
from tests.dist.moonep_worker import PLACES, Data, LoopMath, balanced, dense

STAGING = {"small": 48 << 10, "large": 4 << 20}
"""Bytes of staging memory: most messages take many passes, or one."""
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.float64)
LISTS = ("latent", "upstream", "weights", "w1", "w2", "choice")


def start(ranks: int) -> tuple[int, torch.device]:
    """Join the group; after two minutes without an end, every thread says where it is."""
    faulthandler.dump_traceback_later(120)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=3), device_id=device
    )
    return rank, device


def stop() -> None:
    torch.cuda.synchronize()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


# Transports: what arrives, against what was sent.


def transports(ranks: int, rounds: int) -> dict[str, Any]:
    """Every transport through the same rounds of random transfers; which ones delivered something wrong."""
    rank, device = start(ranks)
    group = dist.group.WORLD
    assert group is not None
    chosen = choose("auto", group, device)
    ways: dict[str, Transport] = {"collective": open_transport("collective", group, device)}
    ways |= {name: PeerTransport(group, device, staging) for name, staging in STAGING.items()}
    answers: dict[str, Any] = {"chosen": chosen.name, "reasons": chosen.reasons}
    for name, transport in ways.items():
        print(name, flush=True)
        results = [_Round(number, ranks, rank, device).run(transport) for number in range(rounds)]
        expected = [_Round(number, ranks, rank, device).expected() for number in range(rounds)]
        wrong = [
            f"round {number} {part}"
            for number, (found, wanted) in enumerate(zip(results, expected, strict=True))
            for part in wanted
            if not _same(found[part], wanted[part])
        ]
        answers[name] = wrong
    answers["spoilt"] = {name: _drop(ways[name], rank, device) for name in STAGING}
    stop()
    return answers


class _Round:
    """One round: sizes that all ranks know, contents that each rank can make for any other."""

    def __init__(self, number: int, ranks: int, rank: int, device: torch.device) -> None:
        self.number, self.ranks, self.rank, self.device = number, ranks, rank, device
        draw = random.Random(number)
        self.dtype = DTYPES[number % len(DTYPES)]
        self.shape = draw.choice([(), (1,), (7,), (64,), (384,)])
        most = draw.choice([0, 1, 5, 300, 2000])
        self.counts = [[draw.randint(0, most) for _ in range(ranks)] for _ in range(ranks)]
        self.most = max(self.counts[r][d] for r in range(ranks) for d in range(ranks) if r != d)
        self.expert = (draw.randint(1, 90), draw.randint(1, 400))
        strangers = [[e for e in range(ranks * PLACES) if e // PLACES != r] for r in range(ranks)]
        self.wanted = [sorted(draw.sample(each, draw.randint(0, PLACES))) for each in strangers]

    def run(self, transport: Transport) -> dict[str, Any]:
        """All transfers at once, ranks out of step; memory is used again as early as may be."""
        noise = random.Random(1000 * self.number + self.rank)
        _pause(noise)
        received = [row[self.rank] for row in self.counts]
        sent = self.counts[self.rank]
        rows, own, gradients = self.rows(self.rank), self.experts(self.rank), self.gradients(self.rank)
        pending: dict[str, Pending[Any]] = {
            "rows": transport.exchange(rows, sent, received, most=self.most),
            "experts": transport.fetch_experts(self.wanted, own),
        }
        _pause(noise)
        pending["gradients"] = transport.return_gradients(self.wanted, gradients, PLACES, own[0])
        sources = [rows, *own, *gradients]
        shapes = [each.shape for each in sources]
        del rows, own, gradients
        kept = sources if noise.random() < 0.5 else []
        del sources
        _garbage(shapes, self.dtype, self.device)
        found = {name: pending.pop(name).wait() for name in noise.sample(sorted(pending), len(pending))}
        found["gathered"] = transport.gather(self.row(self.rank))
        for source in kept:
            source.fill_(3)  # what was sent must have left
        buffer = found["rows"].new_full((sum(sent) + 1, *self.shape), 5)
        back = transport.exchange(found["rows"], received, sent, into=buffer[:-1], most=self.most)
        found["back"] = back.wait()
        found["behind"] = buffer[-1]
        return found

    def expected(self) -> dict[str, Any]:
        """What `run` should have brought, from what the other ranks must have sent."""
        pieces = [self.rows(rank).split(self.counts[rank])[self.rank] for rank in range(self.ranks)]
        everything = [self.experts(rank) for rank in range(self.ranks)]
        home: list[list[Tensor]] = [[] for _ in range(PLACES)]
        for rank, experts in enumerate(self.wanted):
            for expert, gradient in zip(experts, self.gradients(rank), strict=True):
                if expert // PLACES == self.rank:
                    home[expert % PLACES].append(gradient)
        return {
            "rows": torch.cat(pieces),
            "experts": [everything[each // PLACES][each % PLACES] for each in self.wanted[self.rank]],
            "gradients": home,
            "gathered": torch.stack([self.row(rank) for rank in range(self.ranks)]),
            "back": self.rows(self.rank),
            "behind": torch.full(self.shape, 5, dtype=self.dtype, device=self.device),
        }

    def rows(self, rank: int) -> Tensor:
        return self._random(1, rank, (sum(self.counts[rank]), *self.shape))

    def row(self, rank: int) -> Tensor:
        return self._random(2, rank, (11,))

    def experts(self, rank: int) -> list[Tensor]:
        return [self._random(3 + place, rank, self.expert) for place in range(PLACES)]

    def gradients(self, rank: int) -> list[Tensor]:
        return [self._random(100 + slot, rank, self.expert) for slot in range(len(self.wanted[rank]))]

    def _random(self, what: int, rank: int, shape: Sequence[int]) -> Tensor:
        generator = torch.Generator(self.device)
        generator.manual_seed(self.number * 100_000 + what * 100 + rank)
        whole = torch.randint(-(2**7), 2**7, tuple(shape), generator=generator, device=self.device)
        return whole.to(self.dtype)


def _drop(transport: Transport, rank: int, device: torch.device) -> list[int]:
    """Start a transfer that waits for the last rank and never wait for it; which later tensors it spoilt."""
    count, ranks = 4000, transport.ranks
    if rank == ranks - 1:
        torch.cuda._sleep(20_000_000)
    rows = torch.ones(ranks * count, 64, device=device)
    transport.exchange(rows, [count] * ranks, [count] * ranks, most=count)
    del rows
    later = [torch.full((ranks * count, 64), 7.0, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    return [number for number, each in enumerate(later) if not bool((each == 7).all())]


def _pause(noise: random.Random) -> None:
    """Hold up this stream for a while, and keep the GPU busy on another one."""
    if noise.random() < 0.7:
        torch.cuda._sleep(noise.randrange(1_000_000))
    if noise.random() < 0.5:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            square = torch.ones(2048, 2048, device="cuda")
            for _ in range(noise.randrange(8)):
                square = square @ square


def _garbage(shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
    """Write into memory that was just given back, if the allocator hands it out again."""
    again = [torch.full(shape, 99, dtype=dtype, device=device) for shape in shapes]
    del again


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return found.dtype == expected.dtype and torch.equal(found, expected)


# A layer, against a dense one that knows all tokens.


class QuietMath(LoopMath):
    """Without its checks, which bring values to the host."""

    def multiply(self, rows: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        pieces = zip(rows.split(segments.counts), weights, strict=True)
        return torch.cat([piece @ weight.t() for piece, weight in pieces])


def layers(ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case through both transports, the second time again."""
    rank, device = start(ranks)
    answers = []
    for case in cases:
        print(case, flush=True)
        answers.append(_layer(rank, device, **case))
    stop()
    return answers


def _layer(
    rank: int, device: torch.device, tokens: list[int], routing: str, dtype: str, way: str, **options: Any
) -> dict[str, Any]:
    data = _on(Data(tokens, routing, getattr(torch, dtype)), device)
    expected = dense(_double(tokens, routing, getattr(torch, dtype), device))[rank]
    answer: dict[str, Any] = {}
    for transport in ("peer", "peer", "collective"):
        moonep = MoonEP(dist.group.WORLD, data.experts, device=device, transport=transport, **options)
        found = balanced(data, rank, moonep, LoopMath(), way)
        answer[f"{transport} again" if transport in answer else transport] = _bits(found)
        answer["distance"] = {name: _distance(found[name], expected[name]) for name in expected}
    return answer


def quiet(ranks: int, tokens: int) -> dict[str, Any]:
    """A layer forward and backward in which the host may only wait for the plan's one copy."""
    rank, device = start(ranks)
    data = _on(Data([tokens] * ranks, "skewed", torch.bfloat16), device)
    moonep = MoonEP(dist.group.WORLD, data.experts, device=device, transport="peer", equal_tokens=True)

    def run() -> dict[str, Any]:
        return balanced(data, rank, moonep, QuietMath(), "lean")

    loud = [_bits(run()) for _ in range(2)]  # kernels are compiled, memory is there
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bits = [*loud, _bits(found)]
    stop()
    return {"bits": bits}


def _on(data: Data, device: torch.device, change: Callable[[Tensor], Tensor] = lambda each: each) -> Data:
    """Everything on the device, changed if it is a floating-point tensor."""
    for name in LISTS:
        moved = [each.to(device) for each in getattr(data, name)]
        setattr(data, name, [change(each) if each.is_floating_point() else each for each in moved])
    return data


def _double(tokens: list[int], routing: str, dtype: torch.dtype, device: torch.device) -> Data:
    """The same values in FP64."""
    return _on(Data(tokens, routing, dtype), device, torch.Tensor.double)


def _distance(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected, of all tensors together, in FP64."""
    if isinstance(found, list):
        found, expected = torch.cat([x.flatten() for x in found]), torch.cat([x.flatten() for x in expected])
    assert found.shape == expected.shape
    expected = expected.to(found.device)
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-9))


def _bits(found: dict[str, Any]) -> str:
    """A digest of all results, bit by bit."""
    listed = [each if isinstance(each, list) else [each] for _, each in sorted(found.items())]
    tensors = [
        each.detach().contiguous().view(-1).view(torch.uint8).cpu() for several in listed for each in several
    ]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
