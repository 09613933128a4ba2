"""KDA and its short convolution over a context group against one rank with whole rows.

Letters: b batch, S columns of the whole rows, H heads, D key head dim, Dv value head dim, C channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from k3train.ops.kda import delta_attention
from k3train.ops.packing import Packing
from k3train.ops.short_conv import short_convs
from tests.dist.launch import run_workers

H, D, DV, C, K = 2, 6, 5, 4, 4
EOD = 1
ACROSS = ("A_log", "dt_bias", "filters")
"""What all ranks hold; their gradients are sums over the ranks."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Rows, their documents and their shares."""

    starts: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    """Last columns of documents in each row."""
    gate: str = "spread"
    dtype: str = "float64"
    seed: int = 0

    @property
    def packing(self) -> Packing:
        """Of the whole rows."""
        tokens = torch.zeros(len(self.ends), self.starts[-1], dtype=torch.long)
        for row, ends in enumerate(self.ends):
            tokens[row, list(ends)] = EOD
        return Packing.from_tokens(tokens, EOD)

    def inputs(self) -> dict[str, Tensor]:
        """Leaves on whole rows, the same everywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        b, S = len(self.ends), self.starts[-1]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        z = {"spread": 2 * normal(b, S, H, D), "open": torch.full((b, S, H, D), -800.0)}
        made = {
            "q": normal(b, S, H, D),
            "k": normal(b, S, H, D),
            "v": normal(b, S, H, DV),
            "z": z.get(self.gate, torch.full((b, S, H, D), 60.0)).double(),
            "beta": torch.sigmoid(normal(b, S, H)),
            "weight": normal(b, S, H, DV),
            "rows": normal(b, S, 2, C),
            "row_weight": normal(b, S, 2, C),
            "A_log": 0.3 * normal(H),
            "dt_bias": normal(H * D),
            "filters": normal(2, C, 1, K),
        }
        return {name: x.to(DTYPES[self.dtype]) for name, x in made.items()}


def attend(x: dict[str, Tensor], packing: Packing, backend: str) -> Tensor:
    return delta_attention(
        x["q"], x["k"], x["v"], x["z"], x["beta"], x["A_log"], x["dt_bias"],
        lower_bound=-5.0, packing=packing, backend=backend,
    )  # fmt: skip


def convolve(x: dict[str, Tensor], packing: Packing, backend: str) -> Tensor:
    return torch.stack(short_convs(x["rows"].unbind(2), x["filters"], packing, backend), dim=2)


OPERATORS: dict[str, tuple[Callable[..., Tensor], str, tuple[str, ...], tuple[str, ...]]] = {
    "attention": (attend, "weight", ("q", "k", "v", "z", "beta", "A_log", "dt_bias"), ("chunk", "recurrent")),
    "convolution": (convolve, "row_weight", ("rows", "filters"), ("shift", "reference")),
}


def run(operator: str, backend: str, inputs: dict[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """The result and the gradients of the loss that weighs it."""
    function, weight, names, _ = OPERATORS[operator]
    leaves = {name: x.clone().requires_grad_(name in names) for name, x in inputs.items()}
    result = function(leaves, packing, backend)
    (result * inputs[weight]).sum().backward()
    return {"result": result.detach()} | {name: leaves[name].grad for name in names}  # type: ignore[dict-item]


def worker(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case what each operator gives on this rank through each backend."""
    from parallel.context.exchange import traffic
    from parallel.groups import initialize
    from parallel.topology import Topology

    ranks = len(cases[0]["starts"]) - 1
    group = initialize(Topology(context=ranks), timeout_minutes=1, seed=1).pg_collection.cp
    answers = []
    for case in (Case(**each) for each in cases):
        packing = case.packing.shard(group, case.starts)
        share = slice(*case.starts[group.rank() :][:2])
        inputs = {name: x if name in ACROSS else x[:, share] for name, x in case.inputs().items()}
        answer: dict[str, Any] = {}
        for operator, (*_, backends) in OPERATORS.items():
            for backend in backends:
                traffic.clear()
                found = run(operator, backend, inputs, packing)
                again = run(operator, backend, inputs, packing)
                answer[f"{operator} {backend}"] = {
                    **{name: x.tolist() for name, x in found.items()},
                    "repeats": all(torch.equal(x, again[name]) for name, x in found.items()),
                    "bytes": {name: count // 2 for name, count in traffic.items()},
                }
        answers.append(answer)
    return answers


def random_case(seed: int, ranks: int) -> Case:
    """Any shares and any borders, single tokens and borders of both at one place among them."""
    draws = random.Random(seed)
    S, b = draws.randint(2 * ranks, 40), draws.randint(1, 3)
    starts = (0, *sorted(draws.sample(range(1, S), ranks - 1)), S)
    likely = draws.choice((0.0, 0.05, 0.3))
    ends = tuple(tuple(t for t in range(S) if draws.random() < likely) for _ in range(b))
    return Case(starts, ends, seed=seed)


def cases_of(ranks: int) -> dict[str, Case]:
    """Named cases; four ranks of six columns, or two of twelve."""
    even = tuple(range(0, 25, 24 // ranks))
    crumbs = {2: (0, 1, 24), 4: (0, 1, 2, 23, 24)}[ranks]
    named = {
        "one document": Case(even, ((),)),
        "one token at the edges": Case(crumbs, ((), (0, 1, 22))),
        "borders where shares meet": Case(even, (tuple(start - 1 for start in even[1:-1]), (even[1] - 1,))),
        "borders beside where shares meet": Case(even, ((even[1] - 2, even[1]), (even[1],), (even[1] - 2,))),
        "padding": Case(even, ((3, *range(9, 24)), tuple(range(24)))),
        "document through a share": Case(even, ((4, 20), (2,))),
        "gate shut": Case(even, ((10,), ()), gate="shut"),
        "gate open": Case(even, ((10,), ()), gate="open"),
        "FP32": Case(even, ((), (4, 20)), dtype="float32"),
        "FP32, gate shut": Case(even, ((), (4, 20)), gate="shut", dtype="float32"),
        "FP32, gate open": Case(even, ((), (4, 20)), gate="open", dtype="float32"),
        "twice as long": Case(tuple(2 * start for start in even), ((),)),
    }
    return named | {f"random {seed}": random_case(seed, ranks) for seed in range(12)}


@cache
def found(ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Answers of all ranks to each case."""
    cases = cases_of(ranks)
    answers = run_workers(
        "tests.dist.test_kda_context:worker", ranks, {"cases": [asdict(case) for case in cases.values()]}
    )
    return {name: [answer[index] for answer in answers] for index, name in enumerate(cases)}


def joined(name: str, answers: list[dict[str, Any]], dtype: torch.dtype) -> Tensor:
    """All ranks' part of a result or gradient."""
    parts = [torch.tensor(answer[name], dtype=dtype) for answer in answers]
    if name in ACROSS:
        return torch.stack(parts).sum(0)
    return torch.cat(parts, dim=1)


@cache
def expected(case: Case, operator: str) -> dict[str, Tensor]:
    """The reference in FP64 on whole rows."""
    exact = {name: x.double() for name, x in case.inputs().items()}
    return run(operator, OPERATORS[operator][3][1], exact, case.packing)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 4) for name in cases_of(ranks)])
def test_ranks_together_equal_one(ranks: int, name: str) -> None:
    case = cases_of(ranks)[name]
    for operator, (*_, backends) in OPERATORS.items():
        one = expected(case, operator)
        for backend in backends:
            answers = [answer[f"{operator} {backend}"] for answer in found(ranks)[name]]
            for key, value in one.items():
                actual = joined(key, answers, DTYPES[case.dtype])
                assert torch.isfinite(actual).all()
                if case.dtype == "float64":
                    torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-12)
                else:
                    size = max(value.norm(), one["result"].norm())
                    assert (actual - value).norm() <= 1e-6 * size, (backend, key)


@pytest.mark.parametrize("ranks", [2, 4])
def test_runs_repeat_bit_for_bit(ranks: int) -> None:
    for answers in found(ranks).values():
        assert all(each["repeats"] for answer in answers for each in answer.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_message_does_not_grow_with_the_length(ranks: int) -> None:
    short, long = (found(ranks)[name] for name in ("one document", "twice as long"))
    for answer in (*short, *long):
        state, halo = H * D * (D + DV) * 8, 2 * (K - 1) * C * 8
        assert answer["attention chunk"]["bytes"] == {"kda.state": state, "kda.state.backward": state}
        assert answer["convolution shift"]["bytes"]["short_conv.halo"] == halo
        assert answer["convolution shift"]["bytes"] == answer["convolution reference"]["bytes"]


def test_a_rank_without_tokens_is_refused() -> None:
    from k3train.ops.kda.context import continued

    with pytest.raises(AssertionError, match="without tokens"):
        continued(torch.zeros(1, 4), (0, 4, 4))


def test_cases_reach_every_kind_of_border() -> None:
    kinds = set()
    for ranks in (2, 4):
        for case in cases_of(ranks).values():
            for ids in case.packing.document_ids:
                for start, stop in pairwise(case.starts):
                    continues = start > 0 and bool(ids[start] == ids[start - 1])
                    kinds.add((continues, bool(ids[start] != ids[stop - 1]), stop - start == 1))
    assert len(kinds) == 6  # a single token has no border inside
