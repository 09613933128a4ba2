"""Triton's compiler takes the kernels for Hopper, without a GPU; the interpreter takes what it refuses.

Only kernels of which a form has not run on a GPU yet: tests/gpu compiles all others.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

KDA, LOSS = "k3train.ops.kda.triton", "k3train.ops.cross_entropy.triton"
SIZES = {"C": 64, "D": 128, "DV": 128, "BK": 64, "BV": 64, "STRIDE": 8, "STAGES": 2, "BLOCK": 4096}
FP32 = """beta A_log dt_bias decay norms rows marks initial final grad_final grad_initial grad_beta grad_A
grad_bias logits largest total own scales"""
TYPES = {
    **dict.fromkeys(("N", "H", "tokens", "documents", "words"), "i32"),
    **dict.fromkeys(("lower_bound", "scale"), "fp32"),
    **dict.fromkeys(("chunks", "offsets"), "*i32"),
    **dict.fromkeys(FP32.split(), "*fp32"),
    "labels": "*i64",
}
"""Of arguments; all others are pointers to BF16."""
WALK = {"HAS_INITIAL": True, "WANT_FINAL": True, "KEEP_MARKS": True}
KERNELS = [
    (f"{KDA}.prepare", "prepare_kernel", {"BACKWARD": False}),
    (f"{KDA}.prepare", "prepare_kernel", {"BACKWARD": True}),
    (f"{KDA}.walk", "walk_kernel", {"AGAIN": False} | WALK),
    (f"{KDA}.walk", "walk_back_kernel", {"HAS_FINAL": True, "WANT_INITIAL": True}),
    (f"{KDA}.gradients", "values_kernel", {}),
    (f"{KDA}.gradients", "keys_kernel", {}),
    (LOSS, "_take_in_kernel", {}),
    (LOSS, "_gradient_kernel", {}),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kernel compiled by an earlier run proves nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("module", "name", "flags"), KERNELS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_kernel_compiles_for_hopper(module: str, name: str, flags: dict[str, Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), name)
    known = {key: value for key, value in (SIZES | flags).items() if key in function.arg_names}
    signature = {key: "constexpr" if key in known else TYPES.get(key, "*bf16") for key in function.arg_names}
    constants = {(function.arg_names.index(key),): value for key, value in known.items()}
    source = ASTSource(function, signature, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 227 * 1024, "more shared memory than a multiprocessor has"
