"""Gated MLA over two GPUs in BF16: no further from FP32 than one GPU is, and within the plan's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers

RANKS, LENGTH = 2, 2048

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices"),
]

WORKER = "tests.gpu.mla_context_worker"
DOCUMENTS = {
    "one document": [LENGTH],
    "packed": [300, 1, 77, 850, 500, LENGTH - 300 - 1 - 77 - 850 - 500],
    "padded": [1500, *[1] * (LENGTH - 1500)],
}
STARTS = {"even": [0, LENGTH // 2, LENGTH], "uneven": [0, 701, LENGTH]}
CASES: dict[str, dict[str, Any]] = {
    f"{backend}, {name}, {starts}, {heads}": {
        "backend": backend,
        "lengths": DOCUMENTS[name],
        "starts": STARTS[starts],
        "key_bytes": {"all heads": 1 << 30, "one head": 1}[heads],
    }
    for backend in ("te", "flash", "sdpa")
    for name, starts, heads in (
        ("one document", "even", "all heads"),
        ("one document", "even", "one head"),
        ("packed", "even", "all heads"),
        ("packed", "uneven", "one head"),
        ("padded", "even", "all heads"),
    )
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, list[float]]]]:
    """For each case, what both ranks answer."""
    answers = run_workers(f"{WORKER}:compare", RANKS, {"cases": list(CASES.values())}, timeout=200)
    return dict(zip(CASES, map(list, zip(*answers, strict=True)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_are_as_near_to_fp32_as_one(name: str, found: dict[str, Any]) -> None:
    for answer in found[name]:
        for tensor, (alone, both) in answer.items():
            assert both < 2e-2, tensor
            assert both < 1.5 * alone + 1e-3, tensor


@pytest.mark.parametrize("backend", ["te", "flash"])
def test_keys_made_again_take_what_the_plan_says(backend: str) -> None:
    """K3's layer over 64K tokens, 32 heads at a time: keys of all heads are never there together."""
    answers = run_workers(f"{WORKER}:memory", RANKS, {"length": 1 << 16, "backend": backend}, timeout=200)
    for answer in answers:
        print({name: f"{size / 2**30:.2f} GiB" for name, size in answer.items()})
    saved = max(answer["keep"] - answer["recompute"] for answer in answers)
    assert saved > 0.5 * (answers[0]["kept"] - answers[0]["expanded"])
