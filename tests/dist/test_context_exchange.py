"""Exchanges of a context group against the same arithmetic on whole rows, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers

STARTS = {
    "even": [0, 6, 12, 18, 24],
    "uneven": [0, 9, 10, 12, 24],
    "one token": [0, 1, 2, 3, 24],
    "two ranks": [0, 5, 12],
}
WIDTH, HALO = 3, 3


def rows(starts: list[int]) -> torch.Tensor:
    """[2, S, 3] FP64, the same everywhere."""
    random = torch.Generator().manual_seed(7)
    return torch.randn(2, starts[-1], WIDTH, generator=random, dtype=torch.float64)


def weights(rank: int, *shape: int) -> torch.Tensor:
    """By which a rank's result enters the loss."""
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def worker(starts: list[int]) -> dict[str, Any]:
    """Results and gradients of this rank's share through each exchange."""
    from parallel.context.exchange import gather_columns, left_halo, right_halo, traffic
    from parallel.groups import initialize
    from parallel.topology import Topology

    ranks = len(starts) - 1
    group = initialize(Topology(context=ranks), timeout_minutes=1, seed=1).pg_collection.cp
    rank = group.rank()
    whole = rows(starts)
    found: dict[str, Any] = {}
    for name, exchange in {
        "gather": lambda x: gather_columns(x, starts, group, dim=1, name="gather"),
        "left": lambda x: left_halo(x, HALO, starts, group, dim=1, name="left"),
        "right": lambda x: right_halo(x, HALO, starts, group, dim=1, name="right"),
    }.items():
        share = whole[:, starts[rank] : starts[rank + 1]].clone().requires_grad_()
        result = exchange(share)
        (result * weights(rank, *result.shape)).sum().backward()
        found[name] = {"result": result.tolist(), "gradient": share.grad.tolist()}
    return found | {"rows": rows_there_and_back(group, whole), "traffic": dict(traffic)}


def rows_there_and_back(group: Any, whole: torch.Tensor) -> dict[str, Any]:
    """Rank r sends r + q rows to rank q."""
    from parallel.context.exchange import exchange_rows

    rank, ranks = group.rank(), group.size()
    send, receive = ([rank + other for other in range(ranks)] for _ in range(2))
    x = (whole[0, : sum(send)] + 10 * rank).requires_grad_()
    result = exchange_rows(x, send, receive, group, name="rows")
    (result * weights(rank, *result.shape)).sum().backward()
    return {"sent": x.tolist(), "result": result.tolist(), "gradient": x.grad.tolist()}


@pytest.fixture(scope="module", params=STARTS)
def found(request: pytest.FixtureRequest) -> tuple[list[int], list[dict[str, Any]]]:
    starts = STARTS[request.param]
    return starts, run_workers("tests.dist.test_context_exchange:worker", len(starts) - 1, {"starts": starts})


@pytest.mark.parametrize("name", ["gather", "left", "right"])
def test_columns_and_their_gradients(name: str, found: tuple[list[int], list[dict[str, Any]]]) -> None:
    starts, ranks = found
    whole = rows(starts).requires_grad_()
    zeros = torch.zeros(2, HALO, WIDTH, dtype=torch.float64)
    padded, loss = torch.cat((zeros, whole, zeros), dim=1), torch.zeros(())
    for rank, each in enumerate(ranks):
        first, last = {
            "gather": (HALO, HALO + starts[-1]),
            "left": (starts[rank], starts[rank] + HALO),
            "right": (HALO + starts[rank + 1], 2 * HALO + starts[rank + 1]),
        }[name]
        expected = padded[:, first:last]
        assert torch.equal(torch.tensor(each[name]["result"], dtype=torch.float64), expected)
        loss = loss + (expected * weights(rank, *expected.shape)).sum()
    loss.backward()
    gradients = [torch.tensor(each[name]["gradient"], dtype=torch.float64) for each in ranks]
    torch.testing.assert_close(torch.cat(gradients, dim=1), whole.grad, rtol=0, atol=1e-14)


def test_rows_go_and_their_gradients_come_back(found: tuple[list[int], list[dict[str, Any]]]) -> None:
    ranks = [each["rows"] for each in found[1]]
    count = len(ranks)
    sent = [
        torch.tensor(each["sent"]).split([rank + q for q in range(count)]) for rank, each in enumerate(ranks)
    ]
    for rank, each in enumerate(ranks):
        expected = torch.cat([sent[source][rank] for source in range(count)])
        result = torch.tensor(each["result"])
        assert torch.equal(result, expected)
    told = [weights(rank, len(each["result"]), WIDTH) for rank, each in enumerate(ranks)]
    parts = [each.split([rank + q for q in range(count)]) for rank, each in enumerate(told)]
    for rank, each in enumerate(ranks):
        expected = torch.cat([parts[target][rank] for target in range(count)])
        assert torch.equal(torch.tensor(each["gradient"], dtype=torch.float64), expected)


def test_bytes_are_counted(found: tuple[list[int], list[dict[str, Any]]]) -> None:
    starts, ranks = found
    for rank, each in enumerate(ranks):
        own, row = starts[rank + 1] - starts[rank], 2 * WIDTH * 8
        assert each["traffic"]["gather"] == own * row
        assert each["traffic"]["gather.backward"] == (starts[-1] - own) * row
        assert each["traffic"]["left"] == each["traffic"]["right"] == HALO * row
