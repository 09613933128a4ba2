"""Fixed launch choices for flash-linear-attention's kernels on Hopper.

The library tunes each kernel at its first call, for every number of heads and every number of sources anew:
minutes of compiling before the first step, and a choice that may differ from run to run and with it the
last bits of a loss. On Hopper we fix the choices that tuning arrived at on an H200 (head width 128, BF16);
other devices, and kernels that are not listed, tune themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

HOPPER = (9, 0)


@dataclass(frozen=True)
class Choice:
    """One entry of a tuner's list."""

    num_warps: int
    num_stages: int
    blocks: dict[str, int] = field(default_factory=dict)
    added: bool = False
    """The library does not try it, so it is added to the list."""

    def matches(self, config: Any) -> bool:
        return (
            config.num_warps == self.num_warps
            and config.num_stages == self.num_stages
            and config.kwargs == self.blocks
        )

    def like(self, config: Any) -> Any:
        """This choice as an object of the library's kind."""
        return type(config)(self.blocks, num_warps=self.num_warps, num_stages=self.num_stages)


CHOICES = {
    "chunk_kda_bwd_kernel_wy_dqkg_fused": Choice(4, 3, {"BK": 64, "BV": 64}),
    "recompute_w_u_fwd_kda_kernel": Choice(4, 3),
    "chunk_gla_fwd_kernel_o": Choice(4, 2, {"BK": 64, "BV": 128}),
    "kda_gate_chunk_cumsum_vector_kernel": Choice(4, 3, {"BS": 64}),
    "chunk_local_cumsum_vector_kernel": Choice(2, 3, {"BS": 32}),
    "chunk_kda_fwd_kernel_inter_solve_fused": Choice(1, 3, {"BK": 32}),
    "chunk_kda_fwd_kernel_intra_sub_chunk": Choice(1, 3),
    "chunk_kda_bwd_kernel_intra": Choice(1, 2),
    "chunk_kda_bwd_kernel_dAv": Choice(4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": Choice(4, 4, {"BV": 32}),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": Choice(4, 3, {"BV": 32}),
    # With the 4 warps that the library tries at most, 2.2 times as long on an H200.
    "chunk_cp_fwd_kernel_h": Choice(8, 3, added=True),
    "chunk_cp_bwd_kernel_dh": Choice(8, 3, added=True),
    "kda_gate_bwd_kernel": Choice(4, 2),
    "l2norm_fwd_kernel": Choice(1, 3, {"BT": 8}),
    "l2norm_bwd_kernel": Choice(1, 3, {"BT": 8}),
    # Not tuned: a middle of the list, so that a new number of sources costs one compilation and not 24.
    "attnres_fwd_kernel": Choice(8, 2, {"BL": 2}),
    "attnres_bwd_kernel_dv": Choice(8, 2, {"BL": 2}),
    "attnres_bwd_kernel_dqdw": Choice(8, 3, {"BN": 2048, "BD": 32}),
}


@cache
def fix_choices(capability: tuple[int, int]) -> tuple[str, ...]:
    """Reduce the tuners of all loaded kernels in CHOICES to that choice; their names.

    A tuner that does not offer the choice, as another release of the library may not, stays as it is.
    """
    if capability != HOPPER:
        return ()
    fixed = []
    for name, tuner in tuners():
        choice = CHOICES.get(name)
        kept = [config for config in tuner.configs if choice and choice.matches(config)]
        if choice and choice.added and not kept:
            kept = [choice.like(tuner.configs[0])]
        if kept:
            tuner.configs = kept
            fixed.append(name)
    return tuple(fixed)


def tuners() -> Iterator[tuple[str, Any]]:
    """(kernel name, tuner) of every self-tuning kernel in the loaded modules of flash-linear-attention."""
    seen = set()
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("fla."):
            continue
        for name, kernel in list(vars(module).items()):
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None and isinstance(kernel.configs, list) and id(kernel) not in seen:
                seen.add(id(kernel))
                yield name, kernel
