"""Fixing the choices of self-tuning kernels, on stand-ins for the library's tuners."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from k3train.ops import tuning


def config(num_warps: int, num_stages: int, **blocks: int) -> SimpleNamespace:
    return SimpleNamespace(num_warps=num_warps, num_stages=num_stages, kwargs=blocks)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("fla.stand_in")
    wanted, other = config(4, 2, BK=64, BV=128), config(8, 2, BK=64, BV=128)
    # The tuner lies below a heuristic, as in the library.
    module.chunk_gla_fwd_kernel_o = SimpleNamespace(fn=SimpleNamespace(configs=[other, wanted], fn=None))
    module.kda_gate_bwd_kernel = SimpleNamespace(configs=[config(1, 1)], fn=None)
    module.another_kernel = SimpleNamespace(configs=[config(1, 1), config(2, 1)], fn=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tuning.fix_choices.cache_clear()
    return module


def test_listed_kernels_keep_one_choice_and_others_tune(kernels: ModuleType) -> None:
    fixed = tuning.fix_choices(tuning.HOPPER)
    assert "chunk_gla_fwd_kernel_o" in fixed
    (kept,) = kernels.chunk_gla_fwd_kernel_o.fn.configs
    assert kept.num_warps == 4
    assert len(kernels.another_kernel.configs) == 2


def test_a_tuner_without_the_choice_stays_as_it_is(kernels: ModuleType) -> None:
    assert "kda_gate_bwd_kernel" not in tuning.fix_choices(tuning.HOPPER)
    assert len(kernels.kda_gate_bwd_kernel.configs) == 1


def test_a_choice_that_the_library_does_not_try_is_added(kernels: ModuleType) -> None:
    class Config(SimpleNamespace):
        def __init__(self, kwargs: dict[str, int], num_warps: int, num_stages: int) -> None:
            super().__init__(kwargs=kwargs, num_warps=num_warps, num_stages=num_stages)

    tuner = SimpleNamespace(configs=[Config({}, 4, 2), Config({}, 4, 3)], fn=None)
    kernels.chunk_cp_fwd_kernel_h = tuner
    assert "chunk_cp_fwd_kernel_h" in tuning.fix_choices(tuning.HOPPER)
    assert [(config.num_warps, config.num_stages) for config in tuner.configs] == [(8, 3)]


def test_other_devices_tune_themselves(kernels: ModuleType) -> None:
    assert tuning.fix_choices((10, 0)) == ()
    assert len(kernels.chunk_gla_fwd_kernel_o.fn.configs) == 2
