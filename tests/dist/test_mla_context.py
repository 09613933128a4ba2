"""Gated MLA of rows that ranks share against one rank: values, gradients, masks, recompute, bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from k3train.context_plan import Deal, deal
from tests.dist.launch import run_workers
from tests.dist.mla_context_worker import Case, distance

pytestmark = pytest.mark.timeout(300)

WORKER = "tests.dist.mla_context_worker"
LENGTH = 48
# Largest difference over the largest value, where sums are taken in another order.
BOUNDS = {"float64": 1e-12, "float32": 5e-6}


def case(starts: list[int], *borders: list[int], **options: Any) -> Case:
    """Rows whose documents start at column 0 and at `borders`."""
    return {"starts": starts, "rows": len(borders), "borders": borders, **options}


def even(ranks: int) -> list[int]:
    return [LENGTH * rank // ranks for rank in range(ranks + 1)]


DEALT = ([5, 6, 20, 31], [])
"""Costs are so unequal that blocks move over even shares, too."""
PACKED = ([5, 6, 20, 31], [24, 25])
PADDED = ([17, *range(39, LENGTH)], list(range(1, LENGTH)))
UNEVEN = {2: [0, 7, LENGTH], 4: [0, 19, 20, 24, LENGTH]}
ONE_TOKEN = {2: [0, LENGTH - 1, LENGTH], 4: [0, 1, 2, 3, LENGTH]}


def cases(ranks: int) -> dict[str, Case]:
    return {
        "one document": case(even(ranks), []),
        "two rows": case(even(ranks), [], []),
        "packed": case(even(ranks), *PACKED),
        "padded": case(even(ranks), *PADDED),
        "uneven": case(UNEVEN[ranks], *PACKED),
        "one token": case(ONE_TOKEN[ranks], *PACKED),
        "one head at a time": case(even(ranks), *PACKED, key_bytes=1),
        "fewer tokens than blocks": case([0, *range(1, ranks), ranks + 1], [2]),
    }


NAMES = list(cases(2))
BORDERS = [0, *DEALT[0], LENGTH]
COLUMNS = [0, 5, 19, 20, 23, 24, 30, 31, 40, LENGTH - 1]
SITES = ("input", "query", "key", "core", "gate_input", "gate")
POLICIES = [
    *({f"mla.{site}": "recompute"} for site in SITES),
    {"mla.key": "recompute", "mla.core": "recompute"},
    {"mla.*": "recompute"},
    {"mla.*": "keep"},
]
LAYERS = [{"layer": "recompute"}, {"layer": "recompute", "mla.*": "recompute"}]
SIZES = [0, 3000, 9000, 13000, 18000, 100000]
"""Bytes below which tensors are left alone: some are on one rank and not on another."""


def work(ranks: int) -> dict[str, Any]:
    """Arguments of `mla_context_worker.work`."""
    placed = {"even": even(ranks), "uneven": UNEVEN[ranks]}
    seen = [
        {"case": case(starts, *DEALT), "columns": COLUMNS, "backend": backend}
        for starts in placed.values()
        for backend in ("reference", "sdpa")
    ]
    again = [
        {"case": case(starts, *DEALT, key_bytes=key_bytes), "policies": policies, "sizes": sizes}
        for starts in placed.values()
        for key_bytes in (1, 1 << 30)
        for policies, sizes in ((POLICIES, SIZES), (LAYERS, SIZES[:1]))
    ]
    return {"cases": cases(ranks), "seen": seen, "again": again if ranks == 2 else []}


@pytest.fixture(scope="module")
def alone() -> dict[int, Any]:
    """What one rank makes of the cases of 2 and of 4."""
    both = {f"{ranks} {name}": each for ranks in (2, 4) for name, each in cases(ranks).items()}
    answer = run_workers(f"{WORKER}:work", 1, {"cases": both, "seen": [], "again": []}, timeout=240)[0]
    return {
        ranks: {dtype: {name: answer[dtype][f"{ranks} {name}"] for name in NAMES} for dtype in BOUNDS}
        for ranks in (2, 4)
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def shares(ranks: int) -> list[dict[str, Any]]:
    return run_workers(f"{WORKER}:work", ranks, work(ranks), timeout=240)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(
    name: str, dtype: str, ranks: int, shares: list[dict[str, Any]], alone: dict[int, Any]
) -> None:
    ours, theirs = [share[dtype][name] for share in shares], alone[ranks][dtype][name]
    for part in ("output", "input"):
        whole = torch.cat([torch.tensor(each[part], dtype=torch.float64) for each in ours], dim=1)
        assert distance(whole, theirs[part]) < BOUNDS[dtype], part
    for weight, expected in theirs["weights"].items():
        total = sum(torch.tensor(each["weights"][weight], dtype=torch.float64) for each in ours)
        assert distance(total, expected) < BOUNDS[dtype], weight


@pytest.mark.parametrize("name", NAMES)
def test_largest_logits(name: str, ranks: int, shares: list[dict[str, Any]], alone: dict[int, Any]) -> None:
    """The optimizer takes the maximum over ranks; each counts those that it computes."""
    ours = torch.tensor([share["float32"][name]["logits"] for share in shares])
    expected = torch.tensor(alone[ranks]["float32"][name]["logits"])
    assert (expected > 0.3).all()
    torch.testing.assert_close(ours.amax(0), expected)
    if name == "one document":
        assert (ours.amin(0) < ours.amax(0)).any()


def dealt(each: Case) -> Deal:
    length = each["starts"][-1]
    flat = [row * length + column for row, found in enumerate(each["borders"]) for column in [0, *found]]
    return deal([*flat, each["rows"] * length], each["rows"], each["starts"], 16 * 32 / 40)


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str, ranks: int, shares: list[dict[str, Any]]) -> None:
    """Latents once to everybody; queries and outputs of blocks that are computed elsewhere."""
    each, element = cases(ranks)[name], 8
    length = each["starts"][-1]
    moved = dealt(each).moved_tokens
    sent = Counter[str]()
    for share in shares:
        sent.update(share["float64"][name]["traffic"])
    assert sent["mla.keys"] == each["rows"] * length * (16 + 8) * element
    assert sent["mla.queries"] == sent["mla.queries.backward"] == moved * 24 * element
    assert sent["mla.outputs"] == sent["mla.outputs.backward"] == moved * 2 * 16 * element
    if name == "one document":
        assert moved == length // 2


@pytest.mark.parametrize("index", range(4), ids=["reference", "sdpa", "reference uneven", "sdpa uneven"])
def test_no_token_sees_another_document_or_what_comes_later(index: int, shares: list[dict[str, Any]]) -> None:
    plain, *changed = (
        torch.cat([torch.tensor(each, dtype=torch.float64) for each in outputs], dim=1)
        for outputs in zip(*(share["seen"][index] for share in shares), strict=True)
    )
    for column, output in zip(COLUMNS, changed, strict=True):
        end = min(border for border in BORDERS if border > column)
        differs = (output != plain).any(-1)
        assert differs[0, column:end].all(), "a token and those behind it in its document"
        differs[0, column:end] = False
        assert not differs.any()


def test_regions_that_run_again_change_no_bit(ranks: int, shares: list[dict[str, Any]]) -> None:
    if ranks != 2:
        pytest.skip("two ranks show it")
    for starts in (even(2), UNEVEN[2]):
        parts = dealt(case(starts, *DEALT))
        # Keys of one head and token take 24 numbers of FP64: one rank's are left alone, the other's are not.
        least, most = (24 * 8 * rows for rows in sorted(parts.key_rows))
        assert parts.moves
        assert any(least < size <= most for size in SIZES)
    for share in shares:
        assert [len(found) for found in share["again"]] == [len(POLICIES) * len(SIZES), len(LAYERS)] * 4
        assert not [found for each in share["again"] for found in each if found]
