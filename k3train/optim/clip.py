"""The global gradient norm and clipping, the same number in every layout.

Each gradient's own norm is FP32; their squares are summed in FP64, over all ranks in one all-reduce, and
the result is rounded to FP32, which hides the order of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from .build import sub_optimizers
from .stream import StreamedUpdate


def gradients(
    optimizer: MegatronOptimizer, stream: StreamedUpdate | None = None
) -> Iterator[list[tuple[Tensor, str]]]:
    """(FP32 gradient, kind) of all that this rank's optimizer updates, a window of a stream at a time.

    Kinds: "expert", "tower" for what every pipeline rank holds alike, "dense".
    """
    if stream is not None:
        for window in stream.gradients():
            yield [(gradient, _kind(parameter)) for gradient, parameter in window]
        return
    yield [
        (parameter.grad, _kind(parameter))
        for part in sub_optimizers(optimizer)
        for parameter in part.get_parameters()
        if parameter.grad is not None
    ]


def gradient_norm(
    optimizer: MegatronOptimizer,
    pg_collection: ProcessGroupCollection,
    device: torch.device,
    *,
    sharded: bool,
    stream: StreamedUpdate | None = None,
) -> float:
    """Norm over all parameters of the model, a FP32 value; a collective over all ranks.

    Args:
        optimizer: after `prepare_grads`.
        sharded: each data-parallel rank holds its own part (ZeRO), where otherwise all hold the same.
        stream: what brings gradients to the device, where they are not all there.
    """
    dense = sharded or pg_collection.dp_cp.rank() == 0
    counts = {
        "dense": dense,
        "tower": dense and pg_collection.pp.rank() == 0,
        "expert": sharded or pg_collection.expt_dp.rank() == 0,
    }
    norms: list[Tensor] = []
    for window in gradients(optimizer, stream):
        counted = [grad for grad, kind in window if counts[kind]]
        norms += torch._foreach_norm(counted) if counted else []
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        total += torch.stack(norms).double().square().sum()
    dist.all_reduce(total)
    return total.sqrt().float().item()


def _kind(parameter: Tensor) -> str:
    # megatron-core hands both marks on to master weights and to shards.
    if getattr(parameter, "shared", False):
        return "tower"
    return "dense" if getattr(parameter, "allreduce", True) else "expert"


@torch.no_grad()
def clip_gradients(
    optimizer: MegatronOptimizer, norm: float, limit: float, stream: StreamedUpdate | None = None
) -> None:
    """Scale all gradients so that a finite global norm of `norm` becomes at most `limit` (0: leave them)."""
    if limit <= 0 or norm <= limit:
        return
    factor = limit / (norm + 1e-6)
    if stream is not None:
        stream.scale(factor)
        return
    for window in gradients(optimizer):
        torch._foreach_mul_([grad for grad, _ in window], factor)
