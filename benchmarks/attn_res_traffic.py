"""Bytes of AttnRes rows between pipeline ranks: counted in a real step, beside the formulas.

Workload: a small model of one layer in each stage and AttnRes blocks of one layer, so that every stage makes
one row, the first one that of the embedding; random tokens. Each layout runs one step with the rows kept on
the ranks, as training does, and one where every message carries the whole bank; both must give one loss and
gradients equal to rounding. Counted is what leaves the ranks in the activation and gradient flows, and the
running tensors, which travel anyway, are taken off.

`formula` is P(P-1)/2 + (V-1)P(P-1) rows for each micro-batch and direction, `published` the same where a rank
keeps only what it received, P(P-1)/2 + (V-1)P^2 (not run), `naive` C(C-1)/2 with C = P V. All in bytes of one
step. The last layout's figures stand at the top of the JSON. Exit status 1: counted and formula differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks
from parallel.pipeline.rows import cached_rows, naive_rows, published_rows

LAYOUTS = ("2x1", "2x2", "2x3", "4x1", "4x2", "4x3")
QUICK = ("2x1", "2x2", "2x3", "4x2")
FLOWS = ("activation", "gradient")
CPU = ("model=tiny_dense", "data.sequence_length=64", "vision=none")
GPU = (
    "recipe=h200_small", "model.num_experts=0", "model.mtp_layers=0", "data.sequence_length=2048",
    "vision=none", "run.deterministic=false",
)  # fmt: skip
TIMEOUT = 300
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative difference of gradient norms; the sums of a row's gradients have another order."""


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--layout", action="append", metavar="PxV", help=f"repeatable ({' '.join(LAYOUTS)})")
    parser.add_argument("--microbatches", type=int, default=4, help="in a step (%(default)s)")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_args()
    rows = []
    for layout in fitting(options.layout or (QUICK if options.quick else LAYOUTS)):
        pipeline, virtual = map(int, layout.split("x"))
        arguments = {
            "pipeline": pipeline,
            "virtual": virtual,
            "microbatches": options.microbatches,
            "overrides": options.overrides,
        }
        rows.append(run_ranks("benchmarks.attn_res_traffic:measure", pipeline, arguments, timeout=TIMEOUT))
    columns = ("cached", "formula", "published", "naive", "naive counted")
    top = {f"{name.replace(' ', '_')}_bytes": rows[-1][name] for name in columns}
    report.publish({"benchmark": "attn_res_traffic", **top, "rows": rows}, rows, options.json)
    if wrong := mismatches(rows):
        raise SystemExit("\n".join(wrong))


def fitting(layouts: Any) -> list[str]:
    """Layouts that have a GPU for every rank, all of them where there are no GPUs."""
    import torch

    devices = torch.cuda.device_count()
    found = [layout for layout in layouts if not devices or int(layout.split("x")[0]) <= devices]
    for layout in set(layouts) - set(found):
        print(f"{layout}: left out, torch sees {devices} GPUs", file=sys.stderr)
    return found


def measure(pipeline: int, virtual: int, microbatches: int, overrides: list[str]) -> dict[str, Any]:
    """A layout's row, run with kept rows and without; on every rank."""
    import torch

    from benchmarks.common.pipelines import PipelineRank
    from k3train.schedule import pipeline_table

    rank = PipelineRank(
        [
            *(GPU if torch.cuda.is_available() else CPU),
            f"parallel.pipeline={pipeline}",
            f"parallel.virtual={virtual}",
            f"run.microbatches={microbatches}",
            f"model.num_layers={pipeline * virtual}",
            f"model.num_dense_layers={pipeline * virtual}",
            "model.attn_res_block_size=1",
            *overrides,
        ]
    )
    assert rank.rows.made == tuple(range(pipeline * virtual)), rank.rows.made
    table, batches = pipeline_table(rank.config, rank.groups.topology), rank.batches()
    sent, steps, norms = [], [], []
    for cache in (True, False):
        before = _sent(rank)
        steps.append(rank.step(rank.executor(table, cache=cache), batches))
        sent.append(_sent(rank) - before)
        norms.append(_norm(rank))
    tolerance = TOLERANCE[rank.config.model.dtype]
    assert steps[0].equals(steps[1]), [step.losses for step in steps]
    assert abs(norms[0] - norms[1]) <= tolerance * norms[1], norms
    data, model = rank.config.data, rank.config.model
    size = data.sequence_length * data.micro_batch_size * model.hidden_size
    size *= torch.finfo(getattr(torch, model.dtype)).bits // 8
    rank.close()
    return figures(pipeline, virtual, microbatches, size, sent[0], sent[1])


def figures(
    pipeline: int, virtual: int, microbatches: int, tensor: int, cached: int, naive: int
) -> dict[str, Any]:
    """A row, in bytes of a step.

    Args:
        tensor: of one row or running tensor.
        cached: sent with kept rows, running tensors included.
        naive: sent with the whole bank on every edge.
    """
    step = len(FLOWS) * microbatches * tensor
    stages = pipeline * virtual
    running = step * (stages - 1)
    return {
        "layout": f"{pipeline}x{virtual}",
        "m": microbatches,
        "row": tensor,
        "running": running,
        "cached": cached - running,
        "formula": step * cached_rows(pipeline, virtual),
        "published": step * published_rows(pipeline, virtual),
        "naive": step * naive_rows(stages),
        "naive counted": naive - running,
    }


def mismatches(rows: list[dict[str, Any]]) -> list[str]:
    """What was counted and is not what the formula says."""
    return [
        f"{row['layout']}: {counted} counts {row[counted]} bytes, the formula says {row[formula]}"
        for row in rows
        for counted, formula in (("cached", "formula"), ("naive counted", "naive"))
        if row[counted] != row[formula]
    ]


def _sent(rank: Any) -> int:
    """Bytes that all ranks have sent so far in both flows of the language model."""
    import torch
    import torch.distributed as dist

    sent = torch.tensor(sum(rank.wires.bytes_sent[flow] for flow in FLOWS), device=rank.groups.device)
    dist.all_reduce(sent)
    return int(sent)


def _norm(rank: Any) -> float:
    """Norm of all gradients of the step."""
    import torch
    import torch.distributed as dist

    squares = torch.zeros((), dtype=torch.float64, device=rank.groups.device)
    for chunk in rank.trainer.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            squares += buffer.grad_data.double().square().sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())


if __name__ == "__main__":
    main()
