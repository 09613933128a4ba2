"""The expert planner on a GPU against the reference: every value, without waiting for the device.

Letters: R ranks, E experts, S tokens of a rank, K experts of a token.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.common import routing
from parallel.moonep.plan import FILL, Eplb, Plan, backends, plain, plan
from parallel.moonep.plan.invariants import check_allocation
from tests.unit.parallel.moonep.plan.conformance import CASES, expected, plans, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS, TOP_K, TOKENS = 896, 16, 8192


def full_size(kind: str, ranks: int, seed: int) -> tuple[Tensor, Tensor]:
    return routing.gathered(routing.popularity(kind, EXPERTS), ranks, TOKENS, TOP_K, seed)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_cases_are_planned_like_the_reference(backend: str, name: str) -> None:
    for actual, wanted in zip(plans(name, backend, "cuda"), expected(name), strict=True):
        same(actual, wanted)


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["lognormal:0.1", "lognormal:5", "zipf:1.0"])
def test_full_size_equals_the_cpu(ranks: int, kind: str) -> None:
    counts, choice = full_size(kind, ranks, seed=3)
    total = TOKENS * TOP_K * ranks
    wanted = plan(counts, choice, 0, pad=16, total_rows=total)
    made = plan(counts.cuda(), choice.cuda(), 0, pad=16, total_rows=total, backend="triton", debug=True)
    same(made, wanted)
    assert made.load.tolist() == [TOKENS * TOP_K] * ranks


@pytest.mark.parametrize(("ranks", "places"), [(2, 7), (3, 3), (4, 12), (8, 4), (16, 6), (128, 3), (2, 2048)])
def test_allocations_of_small_and_odd_loads(ranks: int, places: int) -> None:
    generator = torch.Generator().manual_seed(places)
    for number in range(60):
        most = (2, 5, 300)[number % 3]  # small loads tie often
        shape = ranks, ranks * places
        counts = torch.randint(most, shape, generator=generator, dtype=torch.int32)
        counts *= torch.rand(1, shape[1], generator=generator) < 0.4
        counts[:, : places * (number % ranks)] //= 2
        wanted = plain.fill(counts)
        check_allocation(wanted, counts)
        for backend in ("triton", "torch") if number < 2 else ("triton",):
            chosen = backends.resolve(backend, "cuda", ranks, places, 1)
            assert torch.equal(chosen.fill(counts.cuda()).cpu(), wanted), (backend, number)


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_the_hardest_routing(ranks: int) -> None:
    counts = routing.adversarial(ranks, EXPERTS)
    made = plan(counts.cuda(), torch.empty(0, TOP_K, dtype=torch.int64, device="cuda"), 0)
    assert int(made.replicas.max()) == -(-EXPERTS * (ranks - 1) // ranks**2)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_captured_plan_follows_its_inputs(backend: str) -> None:
    # Capture fails where the host waits for the device.
    ranks, total = 8, TOKENS * TOP_K * 8
    first, second = (full_size("zipf:1.0", ranks, seed) for seed in (1, 2))
    counts, choice = (each.cuda() for each in first)

    def make() -> Plan:
        return plan(counts, choice, 0, pad=16, total_rows=total, policy=FILL, backend=backend)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        make()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = make()
    for inputs in (second, first):
        counts.copy_(inputs[0])
        choice.copy_(inputs[1])
        graph.replay()
        same(made, plan(*inputs, 0, pad=16, total_rows=total))


def test_auto_takes_the_kernels_and_two_runs_are_equal() -> None:
    assert backends.resolve("auto", "cuda", 64, 14, 16) is backends.resolve("triton", "cuda", 64, 14, 16)
    counts, choice = (each.cuda() for each in full_size("zipf:1.0", 16, seed=5))
    same(plan(counts, choice, 0, pad=16), plan(counts, choice, 0, pad=16))


def test_other_integer_types_and_strides_of_the_inputs() -> None:
    counts, choice = (each.cuda() for each in full_size("zipf:1.0", 8, seed=5))
    wanted = plan(counts, choice, 0)
    same(plan(counts.long(), choice.int(), 0), wanted)
    apart = torch.stack([counts, counts], 2)[:, :, 0], torch.stack([choice, choice], 2)[:, :, 0]
    assert not apart[1].is_contiguous()
    same(plan(*apart, 0), wanted)


def test_eplb_plans_on_the_device() -> None:
    counts, choice = full_size("zipf:1.0", 8, seed=5)
    host, device = Eplb(every=1), Eplb(every=1)
    host.observe(counts)
    device.observe(counts.cuda())
    made = plan(counts.cuda(), choice.cuda(), 0, pad=16, policy=device, debug=True)
    same(made, plan(counts, choice, 0, pad=16, policy=host))
