import subprocess
import sys

import pytest
import torch

from k3train.errors import UserError
from k3train.ops import backends

OPERATORS = {
    "kda",
    "short_conv",
    "attn_res",
    "situ",
    "attention",
    "item_attention",
    "grouped",
    "mx",
    "mx_products",
    "linear",
    "cross_entropy",
}


def test_auto_runs_every_operator_on_cpu() -> None:
    for op in OPERATORS:
        backend = backends.resolve(op, "auto", "cpu")
        assert "cpu" in backend.device_types
        assert callable(backend.load())


def test_report_gives_a_reason_for_each_refusal() -> None:
    rows = backends.report()
    assert {op for op, *_ in rows} == OPERATORS
    assert all((reason is None) == available for _, _, available, reason in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a CPU machine lacks")
def test_asking_for_what_cannot_run_names_the_key_and_the_reason() -> None:
    with pytest.raises(
        UserError, match=r"model\.backends\.kda=fla: runs on cuda tensors, not cpu; use auto or chunk"
    ):
        backends.resolve("kda", "fla", "cpu")
    assert ("kda", "fla", False, "needs a CUDA device, and torch sees none") in backends.report()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"model\.backends\.situ=fast: no such backend; use auto, triton, lean"
    ):
        backends.resolve("situ", "fast", "cpu")


def test_a_dtype_the_kernel_lacks_is_refused() -> None:
    flash = backends.Backend("attention", "x", "m", "f", ("cpu",), (torch.bfloat16,))
    assert flash.refuses("cpu", torch.float32) == "takes torch.bfloat16, not torch.float32"
    assert flash.refuses("cpu", torch.bfloat16) is None
    assert backends.Backend("attention", "x", "m", "f", requires="no_such_package").unavailable() == (
        "no_such_package is not installed"
    )


def test_importing_the_operators_loads_no_kernel_library() -> None:
    modules = "kda, short_conv, attn_res, situ, attention, item_attention, grouped, quantile, backends"
    code = (
        f"import sys\nfrom k3train.ops import {modules}\n"
        "print([m for m in ('fla', 'transformer_engine') if m in sys.modules])\n"
        "ours = [m for m in sys.modules if m.startswith('k3train.ops')]\n"
        "print([m for m in ours if m.endswith(('fla', 'triton', 'te'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]
