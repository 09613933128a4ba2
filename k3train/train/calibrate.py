"""Measures on this machine what `k3train.calibration` holds: layers of a configuration, operators,
collectives.

Layers are timed inside real training steps on one rank, with hooks: what autograd, gradient buffers and the
executor add is in there. On a CPU the time is this process's own, which others on the same cores do not
change; on a GPU it is the device's, from events.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import Groups, destroy, initialize
from parallel.topology import Topology

from ..config import Config
from ..flops import KDA_CHUNK, TERA, site_sources
from ..layout import layout_of
from ..microbatch import tokens_per_microbatch
from ..ops.attention import causal_attention
from ..ops.grouped import Segments, grouped_linear
from ..ops.kda import delta_attention
from ..ops.packing import Packing
from ..optim.groups import newton_schulz_flops
from ..optim.newton_schulz import orthogonalize
from ..shapes import layer_kinds
from ..weight_sums import rank_sums
from .assemble import build_trainer, set_numerics
from .step import Batch, Trainer, train_step

Say = Callable[[str], None]
GIGA = 1e9
SMALL, LARGE = 1 << 10, 1 << 23
"""Elements of the collectives that are timed, FP32."""
TINY_OPERATORS = 400


class Clock:
    """Moments of one device's work."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        """An event on a GPU, else seconds of this process."""
        if not self.cuda:
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds; behind a synchronisation."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def median(self, function: Callable[[], Any], times: int) -> float:
        """Seconds of one call, behind one that warms up; on a GPU calls follow each other without a pause."""
        function()
        self.synchronize()
        marks = [self.now()]
        for _ in range(times):
            function()
            marks.append(self.now())
        self.synchronize()
        return statistics.median(self.between(a, b) for a, b in pairwise(marks))


class LayerTimes:
    """Hooks on a chunk that holds the whole model, and the seconds of its parts by micro-batch."""

    def __init__(self, trainer: Trainer) -> None:
        (self.model,) = trainer.models
        self.clock = Clock(trainer.groups.device)
        self.layers = [int(name) for name in self.model.layers]
        self._marks: list[tuple[str, int, Any]] = []
        self._handles = [
            self.model.register_forward_pre_hook(lambda *_: self._mark("start", 0)),
            self.model.register_forward_hook(self._behind),
            self.model.embedding.weight.register_post_accumulate_grad_hook(lambda _: self._mark("done", 0)),
        ]
        for index, layer in zip(self.layers, self.model.layers.values(), strict=True):
            self._handles.append(layer.register_forward_pre_hook(self._marker("in", index)))
            self._handles.append(layer.register_forward_hook(self._output(index)))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _mark(self, name: str, index: int) -> None:
        self._marks.append((name, index, self.clock.now()))

    def _marker(self, name: str, index: int) -> Callable[..., None]:
        return lambda *_: self._mark(name, index)

    def _output(self, index: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._mark("out", index)
            output.running.register_hook(lambda _: self._mark("back", index))

        return hook

    def _behind(self, module: Any, inputs: Any, output: Any) -> None:
        self._mark("end", 0)
        for losses in output[:2]:
            if losses.requires_grad:
                losses.register_hook(lambda _: self._mark("loss", 0))

    def take(self) -> list[dict[Any, tuple[float, float]]]:
        """Forward and backward seconds of each layer, `input` and `output`, by micro-batch of the steps so
        far."""
        self.clock.synchronize()
        found, marks = [], {}
        for name, index, moment in self._marks:
            if (name, index) not in marks:
                marks[name, index] = moment
            if name == "done":
                found.append(self._pass(marks))
                marks = {}
        self._marks = []
        return found

    def _pass(self, marks: dict[tuple[str, int], Any]) -> dict[Any, tuple[float, float]]:
        between, first, last = self.clock.between, self.layers[0], self.layers[-1]
        times: dict[Any, tuple[float, float]] = {}
        for index in self.layers:
            earlier = ("done", 0) if index == first else ("back", index - 1)
            times[index] = (
                between(marks["in", index], marks["out", index]),
                between(marks["back", index], marks[earlier]),
            )
        times["input"] = between(marks["start", 0], marks["in", first]), 0.0
        times["output"] = (
            between(marks["out", last], marks["end", 0]),
            between(marks["loss", 0], marks["back", last]),
        )
        return times


def local_config(config: Config) -> Config:
    """One rank's part of a configuration, alone: its experts, its tokens, nothing recomputed or moved."""
    parallel = config.parallel
    model = replace(config.model, num_experts=config.model.num_experts // parallel.expert.size)
    data = replace(config.data, sequence_length=config.data.sequence_length // parallel.context, images=[])
    alone = replace(
        parallel, pipeline=1, virtual=1, context=1, data=1, layers_per_chunk=None, microbatch_group=None,
        expert=replace(parallel.expert, size=1, dispatcher="alltoall"), zero=min(1, parallel.zero or 0),
    )  # fmt: skip
    offload = replace(config.offload, resolved={}, sites={}, policy="keep", optimizer="device")
    offload = replace(offload, gradients="device", budget_gb=None)
    return replace(
        config,
        model=model,
        data=data,
        parallel=alone,
        offload=offload,
        vision=replace(config.vision, enabled=False),
        run=replace(config.run, microbatches=2, steps=1000),
    )


def batches(config: Config, groups: Groups) -> list[Batch]:
    """A step of random tokens, each row one document."""
    data, size = config.data, config.model.vocab_size
    assert size is not None
    shape = data.micro_batch_size, data.sequence_length
    generator = torch.Generator().manual_seed(config.run.seed)
    found = []
    for _ in range(config.run.microbatches):
        tokens, labels = (torch.randint(size, shape, generator=generator).to(groups.device) for _ in "tl")
        found.append(
            {
                "tokens": tokens,
                "labels": labels,
                "loss_mask": torch.ones(shape, device=groups.device),
                "packing": Packing.single(*shape, groups.device),
            }
        )
    return found


def layers(config: Config, *, steps: int, say: Say) -> dict[str, Any]:
    """What `calibration.Shapes` reads, of one rank's part of `config`, in this process alone."""
    local = local_config(config)
    set_numerics(local)
    groups = initialize(layout_of(local), device=local.run.device, timeout_minutes=5, seed=1)
    trainer = build_trainer(local, groups)
    clock, work = Clock(groups.device), batches(local, groups)
    timer = LayerTimes(trainer)
    phases: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def phase(name: str, step: int) -> Iterator[None]:
        start = clock.now()
        yield
        if step > 1:
            phases[name].append((start, clock.now()))

    passes: list[dict[Any, tuple[float, float]]] = []
    for number in range(1, steps + 2):
        with phase("whole", number):
            train_step(trainer, work, number, phase)
        found = timer.take()
        if number > 1:
            passes += found
        say(f"step {number} of {steps + 1}")
    timer.close()
    clock.synchronize()
    spent = {name: statistics.median(clock.between(*pair) for pair in each) for name, each in phases.items()}
    result = _shapes(local, passes, spent)
    destroy()
    return result


def _shapes(
    config: Config, passes: list[dict[Any, tuple[float, float]]], spent: dict[str, float]
) -> dict[str, Any]:
    medians = {
        part: tuple(statistics.median(times[part][way] for times in passes) for way in (0, 1))
        for part in passes[0]
    }
    kinds = layer_kinds(config.model)
    grouped: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for layer, kind in enumerate(kinds):
        sources = str(sum(site_sources(config.model, layer)))
        grouped.setdefault("+".join(kind), {}).setdefault(sources, []).append(medians[layer])
    within = sum(sum(pair) for pair in medians.values())
    count = config.run.microbatches
    beside = max(0.0, spent["forward_backward"] / count - within)
    ((dense, experts),) = rank_sums(config, Topology(), [range(config.model.num_layers)])
    return {
        "layers": {
            kind: {
                sources: [statistics.mean(each) for each in zip(*found, strict=True)]
                for sources, found in by.items()
            }
            for kind, by in grouped.items()
        },
        "output": list(medians["output"]),
        "input": medians["input"][0],
        "operation": [beside / 2, beside / 2],
        "step": max(0.0, spent["whole"] - spent["forward_backward"] - spent["optimizer"]),
        "optimizer": {"seconds": spent["optimizer"], "dense": vars(dense), "experts": vars(experts)},
    }


def coefficients(config: Config, say: Say) -> dict[str, float]:
    """Keys of `cluster`, from operators at the configuration's shapes on this device."""
    set_numerics(config)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    bench = _Bench(config, device)
    found: dict[str, float] = {}
    for name in ("memory", "dense_gemm", "grouped_gemm", "kda_core", "attention", "newton_schulz", "launch"):
        if name == "grouped_gemm" and not config.model.num_experts:
            continue
        key, value = getattr(bench, name)()
        found[key] = float(f"{value:.4g}")
        say(f"{key} {found[key]:g}")
    if cuda:
        found["host_gbps"] = float(f"{bench.host():.4g}")
    return found


class _Bench:
    """One operator after another."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.clock = Clock(device)
        self.dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self.peak = config.cluster.peak_tflops * TERA
        self.tokens = tokens_per_microbatch(config)

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def _share(self, kind: str, flops: float, function: Callable[[], Any]) -> tuple[str, float]:
        seconds = self.clock.median(function, 10)
        return f"efficiency.{kind}", flops / seconds / self.peak

    def memory(self) -> tuple[str, float]:
        """A product of elements, read twice and written once, as activations are."""
        count = 1 << (27 if self.device.type == "cuda" else 22)
        a, b = self._random(count), self._random(count)
        seconds = self.clock.median(lambda: torch.mul(a, b), 10)
        moved = 3 * count * a.element_size()
        return "efficiency.memory", moved / seconds / (self.config.cluster.memory_gbps * GIGA)

    def dense_gemm(self) -> tuple[str, float]:
        """The projection of q, k or v."""
        model = self.config.model
        width = model.num_heads * model.kda_head_dim
        rows, weight = self._random(self.tokens, model.hidden_size), self._random(width, model.hidden_size)
        flops = 2.0 * self.tokens * model.hidden_size * width
        return self._share("dense_gemm", flops, lambda: torch.nn.functional.linear(rows, weight))

    def grouped_gemm(self) -> tuple[str, float]:
        """The first products of routed experts, evenly loaded."""
        model = self.config.model
        experts = max(1, model.num_experts // self.config.parallel.expert.size)
        each = max(1, self.tokens * model.top_k // model.num_experts * self.config.parallel.expert.size)
        rows = self._random(each * experts, model.latent_size)
        weights = [self._random(2 * model.expert_ffn_size, model.latent_size) for _ in range(experts)]
        segments = Segments.of([each] * experts, self.device)
        flops = 2.0 * len(rows) * model.latent_size * 2 * model.expert_ffn_size
        with torch.no_grad():
            return self._share("grouped_gemm", flops, lambda: grouped_linear(rows, weights, segments))

    def kda_core(self) -> tuple[str, float]:
        """Forward of a row."""
        model, length = self.config.model, self.config.data.sequence_length
        heads, head = model.num_heads, model.kda_head_dim
        q, k, v, z = (self._random(1, length, heads, head) for _ in range(4))
        beta = torch.sigmoid(self._random(1, length, heads))
        rest = self._random(heads, dtype=torch.float32), self._random(heads * head, dtype=torch.float32)
        packing = Packing.single(1, length, self.device)
        flops = length * heads * (6.0 * head**2 + 3 * KDA_CHUNK * head + KDA_CHUNK**2)

        def run() -> Tensor:
            return delta_attention(
                q, k, v, z, beta, *rest, lower_bound=model.gate_lower_bound, packing=packing
            )

        with torch.no_grad():
            return self._share("kda_core", flops, run)

    def attention(self) -> tuple[str, float]:
        """Forward of a row of Gated MLA's heads."""
        model, length = self.config.model, self.config.data.sequence_length
        width = model.qk_nope_head_dim + model.qk_extra_head_dim
        q, k = (self._random(1, length, model.num_heads, width) for _ in range(2))
        v = self._random(1, length, model.num_heads, model.v_head_dim)
        flops = length * length * model.num_heads * (width + model.v_head_dim) * 1.0
        packing = Packing.single(1, length, self.device)
        with torch.no_grad():
            return self._share(
                "attention", flops, lambda: causal_attention(q, k, v, scale=1.0, packing=packing)
            )

    def newton_schulz(self) -> tuple[str, float]:
        """Of one projection's matrix."""
        model, steps = self.config.model, self.config.optim.muon_steps
        shape = model.num_heads * model.kda_head_dim, model.hidden_size
        block = self._random(1, *shape, dtype=torch.float32)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        flops = newton_schulz_flops(shape, steps)
        return self._share("newton_schulz", flops, lambda: orthogonalize(block, steps, dtype))

    def launch(self) -> tuple[str, float]:
        """Host time of small operators that autograd sees."""
        x = torch.ones(8, device=self.device, requires_grad=True)

        def chain() -> None:
            y = x
            for _ in range(TINY_OPERATORS):
                y = y * 1.5
            y.sum().backward()

        chain()
        self.clock.synchronize()
        start = time.process_time()
        chain()
        return "launch_us", (time.process_time() - start) / (2 * TINY_OPERATORS) * 1e6

    def host(self) -> float:
        """GB/s to pinned memory."""
        source = self._random(1 << 27, dtype=torch.bfloat16)
        target = torch.empty_like(source, device="cpu", pin_memory=True)
        seconds = self.clock.median(lambda: target.copy_(source, non_blocking=True), 5)
        return source.numel() * source.element_size() / seconds / GIGA


def collectives(device: str, say: Say) -> dict[str, list[float]]:
    """Seconds of an empty collective and bytes a second, by kind; all ranks that torchrun's variables
    name."""
    ranks = _join(device)
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    ring = (ranks - 1) / ranks
    kinds: dict[str, tuple[Callable[[Tensor], Any], float]] = {
        "reduce": (dist.all_reduce, 2 * ring),
        "gather": (lambda x: dist.all_gather_into_tensor(x.new_empty(ranks * len(x)), x), ranks - 1),
        "exchange": (lambda x: dist.all_to_all_single(torch.empty_like(x), x), ring),
        "message": (_message, 1.0),
    }
    found = {}
    for name, (call, factor) in kinds.items():
        small, large = (_collective_seconds(call, count, place) for count in (SMALL, LARGE))
        sent = 4 * factor * (LARGE - SMALL)
        found[name] = [small, sent / max(large - small, 1e-9)]
        say(f"{name}: {small * 1e6:.0f} us, {found[name][1] / GIGA:.3g} GB/s")
    dist.barrier()  # a rank that leaves early aborts one whose last call is not over
    dist.destroy_process_group()
    return found


def _join(device: str) -> int:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{os.environ['K3TRAIN_RENDEZVOUS']}",
        rank=rank,
        world_size=ranks,
    )
    return ranks


def _message(x: Tensor) -> None:
    """From the first rank to the second one."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)


def _collective_seconds(call: Callable[[Tensor], Any], count: int, device: torch.device) -> float:
    """Of the slowest rank, the median of some calls."""
    x, times = torch.ones(count, device=device), []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        call(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
