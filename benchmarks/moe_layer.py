"""Routed experts of one layer under MoonEP beside megatron-core's all-to-all, over the skew of the routing.

Workload: forward and backward of the routed experts alone (dispatch, experts, combine; no router, no shared
experts), the same weights for both, on two GPUs (K3's latent and expert widths, 64 experts, 8 of them for a
token, 8,192 tokens on each rank, BF16) or four gloo processes (recipe tiny's widths, FP32, 512 tokens).
Choices are made up: `lognormal:SIGMA` is a popularity that all ranks share, in a random order of experts;
`ratio:X` gives the experts of the first rank X times their share. `--trace FILE` adds the fullest
micro-batch of each layer that `log.routing_steps` recorded.

In every round each mode takes one step on each workload; `ms` are medians of the slowest rank's time, `ratio`
is over all-to-all in the same round. `rows` is the fullest rank over the mean, `sent` the rows that a rank
sends to others in dispatch, `peak GiB` what a step adds to the memory allocated before it. `flatness` is the
slowest over the fastest workload of MoonEP, less 1; `overhead` is the ratio at `ratio:1.0`, less 1. On a CPU
all ranks share the cores, so that their sum of work is timed: there only rows and bytes say something.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks

SKEWS = ("lognormal:0.1", "lognormal:1", "lognormal:5", "ratio:1.0", "ratio:1.5", "ratio:2.0")
GPU = ("recipe=h200_slice", "model.num_experts=64", "model.top_k=8", "data.sequence_length=8192")
CPU = ("recipe=tiny", "parallel=single", "data.sequence_length=512")
TIMEOUT = 500


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, help="expert-parallel ranks (2 GPUs, or 4 processes)")
    parser.add_argument("--skew", action="append", help=f"repeatable ({', '.join(SKEWS)})")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="routing-STAGE.jsonl of a run")
    parser.add_argument("--rounds", type=int, help="steps of each mode and workload (20, quick 3)")
    parser.add_argument("--transport", action="append", help="of MoonEP: collective, peer; repeatable (auto)")
    parser.add_argument("overrides", nargs="*", help="configuration overrides behind the recipe's")
    options = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    ranks, skews = options.ranks or (2 if cuda else 4), options.skew or list(SKEWS)
    overrides = [
        *(GPU if cuda else CPU),
        "vision=none",
        f"parallel.expert.size={ranks}",
        "parallel.expert.dispatcher=moonep",
        *options.overrides,
    ]
    check(overrides, skews, options.trace)
    arguments = {
        "skews": skews,
        "trace": str(options.trace) if options.trace else None,
        "rounds": options.rounds or (3 if options.quick else 20),
        "transports": options.transport or ["auto"],
        "overrides": overrides,
    }
    rows = run_ranks("benchmarks.moe_layer:measure", ranks, arguments, timeout=TIMEOUT)
    shown = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]
    report.publish({"benchmark": "moe_layer", **summary(rows), "rows": rows}, shown, options.json)


def check(overrides: list[str], skews: list[str], trace: Path | None) -> None:
    """Refuse in one line, by SystemExit, what every rank would stumble over."""
    from benchmarks.common import routing
    from k3train.errors import UserError
    from launch.compose import ready

    try:
        experts = ready(overrides, inputs=False).model.num_experts
    except UserError as error:
        raise SystemExit(str(error)) from None
    for skew in skews:
        if not re.fullmatch(r"uniform|(lognormal|zipf|hot|ratio):\d+(\.\d+)?", skew):
            raise SystemExit(f"--skew {skew}: use lognormal:SIGMA, zipf:EXPONENT, hot:SHARE or ratio:X")
    if trace:
        ((counts, *_), *_) = routing.recorded(trace).values()
        if len(counts[0]) != experts:
            raise SystemExit(f"--trace {trace}: add model.num_experts={len(counts[0])}, its experts")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the first of MoonEP's transports."""
    first = next(row["mode"] for row in rows if row["mode"] != "alltoall")
    ours = {row["workload"]: row for row in rows if row["mode"] == first}
    times = [row["ms"] for row in ours.values()]
    even = ours.get("ratio:1.0")
    return {
        "transport": first,
        "moonep_over_alltoall": {name: row["ratio"] for name, row in ours.items()},
        "flatness": max(times) / min(times) - 1,
        "overhead": None if even is None else even["ratio"] - 1,
        "peak_flatness": None if even is None else _spread([row["peak GiB"] for row in ours.values()]),
    }


def _spread(values: list[float | None]) -> float | None:
    found = [value for value in values if value]
    return max(found) / min(found) - 1 if found else None


def measure(
    skews: list[str], trace: str | None, rounds: int, transports: list[str], overrides: list[str]
) -> list[dict[str, Any]]:
    """All rows; on every rank."""
    rank = LayerRank(overrides, transports)
    choices = {skew: rank.made_up(skew) for skew in skews}
    choices |= rank.recorded(Path(trace)) if trace else {}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for workload, choice in choices.items():
            for mode in rank.layers:
                step = rank.step(mode, choice)
                if number:
                    found.setdefault((workload, mode), []).append(step)
                else:
                    rank.read(mode)
    rows = [
        {"workload": workload, "mode": mode, **rank.describe(mode, choice, found, workload)}
        for workload, choice in choices.items()
        for mode in rank.layers
    ]
    return rows


class LayerRank:
    """One rank: the same experts behind each dispatcher."""

    def __init__(self, overrides: list[str], transports: list[str]) -> None:
        import torch

        from k3train.layout import layout_of
        from k3train.model.transformer_config import transformer_config
        from k3train.train.assemble import expert_padding, set_numerics
        from launch.compose import compose, resolve_layout
        from parallel.groups import initialize, second_expert_group
        from parallel.moonep.transport import open_transport

        self.config = resolve_layout(compose(overrides))
        set_numerics(self.config)
        self.groups = initialize(layout_of(self.config), timeout_minutes=5, seed=1)
        self.group = self.groups.pg_collection.ep
        self.device = self.groups.device
        self.layers: dict[str, Any] = {}
        settings = transformer_config(self.config)
        settings.expert_pad = expert_padding(self.config, self.device)
        for transport in transports:
            opened = open_transport(transport, self.group, self.device, second_expert_group(self.groups))
            settings.expert_transport = lambda opened=opened: opened
            self.layers[f"moonep {opened.name}"] = self._layer(settings)
        settings.experts.dispatcher = "alltoall"
        self.layers = {"alltoall": self._layer(settings), **self.layers}
        model = self.config.model
        generator = torch.Generator().manual_seed(7 + self.group.rank())
        shape = (self.config.data.sequence_length, 1, model.latent_size)
        dtype = settings.params_dtype
        self.latent = torch.randn(shape, generator=generator).to(self.device, dtype).requires_grad_()
        self.grad = torch.randn(shape, generator=generator).to(self.device, dtype)
        weights = torch.rand(shape[0], model.top_k, generator=generator)
        self.weights = weights.to(self.device).requires_grad_()

    def _layer(self, settings: Any) -> Any:
        """A layer's dispatcher and experts, with weights that depend on the expert alone."""
        import torch

        from k3train.model.moe import LatentMoE
        from k3train.model.spec import layer_submodules

        spec = layer_submodules(self.config.model, self.config.model.num_dense_layers).mlp
        layer = LatentMoE(settings, spec.submodules, 1, self.groups.pg_collection).to(self.device)
        generator = torch.Generator(self.device).manual_seed(3 + self.group.rank())
        with torch.no_grad():
            for each in (weight for half in layer.experts.weights() for weight in half):
                each.normal_(0.0, self.config.model.init_std, generator=generator)
        return layer

    def made_up(self, skew: str) -> Any:
        """[S, K] physical experts of this rank's tokens."""
        from benchmarks.common import routing

        model, ranks = self.config.model, self.group.size()
        kind, _, value = skew.partition(":")
        popular = routing.popularity("uniform" if kind == "ratio" else skew, model.num_experts, seed=1)
        if kind == "ratio":
            places = model.num_experts // ranks
            others = max(0.0, (ranks - float(value)) / (ranks - 1))
            popular[:places] *= float(value)
            popular[places:] *= others
        return self._drawn(popular)

    def recorded(self, file: Path) -> dict[str, Any]:
        """The fullest micro-batch of each layer of a trace, as a popularity."""
        import torch

        from benchmarks.common import routing
        from parallel.moonep.plan.place import dealt, inverse

        ranks, experts = self.group.size(), self.config.model.num_experts
        physical = inverse(dealt(experts, ranks))
        worst: dict[int, tuple[float, Any]] = {}
        for layer, matrices in routing.recorded(file).items():
            for counts in matrices:
                load = torch.tensor(counts, dtype=torch.float64).sum(0)
                load = load[physical] / load.sum()
                fullest = float(load.view(ranks, -1).sum(1).max())
                worst[layer] = max(worst.get(layer, (0.0, load)), (fullest, load), key=_first)
        return {f"layer {layer}": self._drawn(load) for layer, (_, load) in sorted(worst.items())}

    def _drawn(self, popular: Any) -> Any:
        from benchmarks.common import routing

        tokens, top_k = self.config.data.sequence_length, self.config.model.top_k
        return routing.choices(popular, tokens, top_k, seed=11 + self.group.rank()).to(self.device)

    def step(self, mode: str, choice: Any) -> tuple[float, float]:
        """Seconds of the slowest rank, and GiB that the step added at its peak on the fullest."""
        import torch
        import torch.distributed as dist

        layer, cuda = self.layers[mode], self.device.type == "cuda"
        self.latent.grad = self.weights.grad = None
        for parameter in layer.experts.parameters():
            parameter.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        dist.barrier(group=self.group)
        start = time.perf_counter()
        dispatcher = layer.token_dispatcher
        mixed, _ = dispatcher.mix(
            self.latent, dispatcher.plan(choice, None), self.weights, layer.experts, meanwhile=lambda: None
        )
        mixed.backward(self.grad)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
        worst = torch.tensor([seconds, peak], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        return float(worst[0]), float(worst[1])

    def read(self, mode: str) -> dict[str, float]:
        """MoonEP's own numbers since the last time."""
        moonep = getattr(self.layers[mode].token_dispatcher, "moonep", None)
        return moonep.stats.read() if moonep else {}

    def describe(
        self, mode: str, choice: Any, found: dict[tuple[str, str], list[tuple[float, float]]], workload: str
    ) -> dict[str, Any]:
        """The figures of a row; a collective: one more step, for its numbers."""
        import torch
        import torch.distributed as dist

        self.read(mode)
        self.step(mode, choice)
        numbers, model = self.read(mode), self.config.model
        load = torch.bincount(choice.flatten(), minlength=model.num_experts)
        dist.all_reduce(load, group=self.group)
        by_rank = load.view(self.group.size(), -1).sum(1).double()
        here = int((choice // (model.num_experts // self.group.size()) != self.group.rank()).sum())
        seconds, peaks = zip(*found[workload, mode], strict=True)
        plain = [took for took, _ in found[workload, "alltoall"]]
        return {
            "ms": statistics.median(seconds) * 1e3,
            "ratio": statistics.median(own / other for own, other in zip(seconds, plain, strict=True)),
            "rows": numbers.get("max_over_mean_after", float(by_rank.max() / by_rank.mean())),
            "borrowed": numbers.get("replicas_max", 0.0),
            "sent": numbers.get("rows_sent", here),
            "peak GiB": max(peaks) or None,
            "plan ms": numbers.get("plan_ms"),
            "seconds": list(seconds),
        }


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


if __name__ == "__main__":
    main()
