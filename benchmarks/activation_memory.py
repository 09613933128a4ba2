"""Memory of activations against time, by policy: keep, recompute, FP8, host, NVMe and mixtures.

Workload: forward and backward of a step of `h200_slice` (Kimi K3's widths, four layers, no MTP) on one GPU,
random tokens, each row one document; weights stay as they are, so that every step has the same work. Rounds
go through all policies in turn, on one model. On a CPU the tiny model, whose times say nothing.

  saved GB       what autograd saved in a micro-batch, each storage once
  peak GB        most that the device held in the step; on a CPU what the manager held of it
  activation GB  that less what lay there before: parameters, gradients, optimizer states
  share          activation GB over keep's
  ratio          time over keep's, medians; `step ratio` with an optimizer step, timed apart, on both sides
  tokens/s       of the step with the optimizer
  measured_over_plan  the manager's highest count over the plan's, of the place where they differ most
  longest        longest sequence of which one micro-batch fits, to 1,024 tokens (--longest POLICY)

Then the same of megatron-core's GPTModel of the same shape, without optimizer states: full and selective
recompute and its fine-grained offload, which serves its own attention, MLP and expert modules alone and so
cannot be tried on k3train's model. Each side's ratios are to its own keep; a round builds its models anew.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import activations, report
from benchmarks.common.device import dismantle, synchronize
from benchmarks.common.device_time import device_time
from k3train.config import Config
from k3train.quiet import quiet
from launch.compose import compose, resolve_layout
from parallel.cpu import enable_cpu

POLICIES = ("keep", "recompute", "selective", "host", "nvme", "fp8_host", "mixed")
SMALL = (
    "recipe=tiny", "parallel=single", "model.num_layers=3", "data.sequence_length=128", "run.microbatches=2",
    "offload.min_kib=1", "offload.inflight_mib=1", "vision=none", "data.images=[]",
)  # fmt: skip
LARGE = ("recipe=h200_slice", "run.microbatches=2", "offload.host_gb=90", "offload.inflight_mib=2048")
HOOKS = "keep, through the manager"
"""Everything is kept, by the manager: what its hooks cost."""
GRAIN = 1024
"""Of the longest sequence, tokens."""
SLOW = 15.0
"""Seconds of a step behind which a policy gets one measured step only."""
START = time.monotonic()
WARM_UP = 2
"""Steps of each of megatron-core's models before it is measured."""
AIM_RATIO, AIM_SHARE = 1.05, 0.4
"""Step time and activation memory over keep's that the host is to reach."""
MEGATRON: dict[str, dict[str, Any]] = {
    "keep": {},
    "full recompute": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "selective recompute": {
        "recompute_granularity": "selective", "recompute_modules": ["layernorm", "mla_up_proj", "moe_act"],
    },
    "fine-grained offload": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act"],
    },
}  # fmt: skip
ON_CPU = {
    "keep": {},
    "full recompute": MEGATRON["full recompute"],
    "selective recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--policy", action="append", help="only keep and this policy, may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", action="append", default=[], help="its longest sequence; repeatable")
    parser.add_argument("--seconds", type=float, default=20, help="time for each longest sequence")
    parser.add_argument("--limit", type=int, default=131072, help="longest sequence that is tried")
    parser.add_argument(
        "--profile", action="append", default=[], help="what the device did in a step of this policy"
    )
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces of what is profiled")
    parser.add_argument("--no-baseline", action="store_true", help="leave megatron-core out")
    parser.add_argument("--only-baseline", action="store_true", help="leave k3train out")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_args()
    quiet()
    enable_cpu()
    with tempfile.TemporaryDirectory() as folder:
        publish(options, folder)


def publish(options: Any, folder: str) -> None:
    """Measure and print."""
    from k3train.layout import layout_of
    from k3train.train.assemble import set_numerics
    from parallel.groups import destroy, initialize

    large = torch.cuda.is_available() and not options.quick
    disk = [] if any(o.startswith("offload.nvme_dir=") for o in options.overrides) else [folder]
    given = [*(LARGE if large else SMALL), *(f"offload.nvme_dir={name}" for name in disk)]
    chosen = [*given, "model.mtp_layers=0", *options.overrides]
    names = list(dict.fromkeys(["keep", *(options.policy or POLICIES)]))
    assert len(names) > 1, "keep alone says nothing"
    options.rounds = min(options.rounds, 1) if options.quick else options.rounds
    configs = {name: resolve_layout(compose([*chosen, f"offload.policy={name}"]), 1) for name in names}
    config = configs["keep"]
    set_numerics(config)
    groups = initialize(layout_of(config), device=config.run.device, timeout_minutes=5, seed=1)
    rows = [] if options.only_baseline else our_rows(configs, groups, options)
    baseline = [] if options.no_baseline else megatron_rows(config, groups, options)
    figures = {
        "benchmark": "activation_memory",
        "workload": {"overrides": [o for o in chosen if "nvme_dir" not in o], "rounds": options.rounds},
        "rows": rows,
        "megatron_core": baseline,
        **({"verdict": verdict(rows)} if rows else {}),
    }
    destroy()
    shown = [{"system": "k3train", **row} for row in rows]
    shown += [{"system": "megatron-core", **row} for row in baseline]
    hidden = ("spread ms", "places", "device", "optimizer ms", "sites", "over plan")
    shown = [{key: value for key, value in row.items() if key not in hidden} for row in shown]
    report.publish(figures, shown, options.json)


class Ours:
    """k3train's model, whose policy changes from step to step."""

    def __init__(self, configs: dict[str, Config], groups: Any) -> None:
        from k3train.train.activations import build_activations
        from k3train.train.assemble import build_trainer

        self.configs = configs
        self.trainer = build_trainer(configs["keep"], groups)
        # One manager, and its pools, for all policies: "nvme" has all the tiers that the others use.
        richest = "nvme" if "nvme" in configs else list(configs)[-1]
        self.manager = build_activations(configs[richest], groups, self.trainer.modules)
        self._executors: dict[bool, dict[Any, Any]] = {False: {}, True: {}}

    def use(self, name: str) -> None:
        """Hold activations as policy `name` says from now on; "keep" is autograd alone, as in training."""
        from k3train.activation_policy import policy_of

        manager = None if name == "keep" else self.manager
        if manager is not None:
            policy = policy_of(self.configs["keep" if name == HOOKS else name])
            manager.rule = policy.storage
        pipeline = self.trainer.pipeline
        pipeline.activations, pipeline.executors = manager, self._executors[manager is not None]

    def forward_backward(self, work: list[dict[str, Any]]) -> None:
        """All micro-batches, forward and back."""
        from k3train.train.step import run_batches

        for module in self.trainer.modules:
            module.train()
            module.zero_grad_buffer()
        run_batches(self.trainer, work)

    def recover(self) -> None:
        """Forget a step that was broken off."""
        self.trainer.pipeline.executors.clear()
        if self.manager is not None:
            self.manager.end_step()
        activations.release()

    def optimizer_seconds(self, work: list[dict[str, Any]]) -> float:
        """Of an update. The states that it makes lie there from now on."""
        from k3train.train.step import train_step

        found: dict[str, float] = {}

        @contextmanager
        def phase(name: str, step: int) -> Iterator[None]:
            synchronize()
            start = time.perf_counter()
            yield
            synchronize()
            found[name] = time.perf_counter() - start

        for number in (1, 2):
            train_step(self.trainer, work, number, phase)
        return found["optimizer"]

    def fits(self, name: str, length: int) -> bool:
        """Whether a micro-batch of one sequence goes through."""
        self.use(name)
        work = self.work(1, 1, length)
        done = activations.fits(lambda: self.forward_backward(work))
        if not done:
            self.recover()
        activations.release()
        return done

    def counts(self, name: str) -> dict[str, Any]:
        """What the manager counted in the last step, bytes."""
        if self.trainer.pipeline.activations is None:
            return {}
        manager, ledger = self.manager, self.manager.ledger
        microbatches = self.configs["keep"].run.microbatches
        return {
            "saved": sum(manager.saved.values()) // microbatches,
            "sites": {site: nbytes // microbatches for site, nbytes in manager.saved.items()},
            "places": dict(ledger.peak),
            "planned": planned(self.configs["keep" if name == HOOKS else name]),
        }

    def work(self, count: int, b: int, s: int) -> list[dict[str, Any]]:
        """Micro-batches of random tokens."""
        config, device = self.configs["keep"], self.trainer.groups.device
        assert config.model.vocab_size is not None
        return activations.batches(count, b, s, config.model.vocab_size, device)


def our_rows(configs: dict[str, Config], groups: Any, options: Any) -> list[dict[str, Any]]:
    """One row for each policy."""
    config = configs["keep"]
    ours = Ours(configs, groups)
    length = config.data.sequence_length
    work = ours.work(config.run.microbatches, config.data.micro_batch_size, length)
    ours.use("recompute" if "recompute" in configs else "keep")
    optimizer = ours.optimizer_seconds(work)
    ways = ["keep", HOOKS, *list(configs)[1:]]
    samples = {name: activations.Samples() for name in ways}
    counts: dict[str, dict[str, Any]] = {}
    for number in range(options.rounds + 1):
        for name in ways:
            if samples[name].failed or (number > 1 and samples[name].median > SLOW):
                continue
            ours.use(name)
            activations.measure(lambda: ours.forward_backward(work), samples[name], warm_up=number == 0)
            counts[name] = ours.counts(name)
            if samples[name].failed:
                ours.recover()
            tell(f"{name}, round {number}: {samples[name]}")
    tokens = config.run.microbatches * config.data.micro_batch_size * length
    rows = [our_row(name, samples, counts, optimizer, tokens) for name in ways]
    for row in (row for row in rows if row["policy"] in options.profile):
        ours.use(row["policy"])
        trace = options.trace and options.trace / f"{Path(row['policy']).stem}.json.gz"
        row["device"] = device_time(lambda: ours.forward_backward(work), trace)
        tell(f"{row['policy']}: {row['device']}")
    for row in (row for row in rows if row["policy"] in options.longest):
        try_length = partial(ours.fits, row["policy"])
        row["longest"] = activations.longest(try_length, length, options.limit, GRAIN, options.seconds)
        tell(f"{row['policy']}: longest {row['longest']}")
    dismantle(ours.trainer.modules)
    return rows


def planned(config: Config) -> dict[str, float]:
    """Bytes that the plan has a micro-batch leave behind, by the manager's places."""
    from k3train.activation_ledger import as_measured, stage_places, stages
    from k3train.layout import layout_of
    from k3train.schedule import layer_cuts, row_plan

    layout = layout_of(config)
    cuts = layer_cuts(config, layout)
    (stage,) = stages(config, cuts, row_plan(config, layout, cuts))
    return as_measured(stage_places(config, stage, 0), config.offload.inflight_mib << 20)


def over_plan(places: dict[str, float], plan: dict[str, float]) -> dict[str, float]:
    """Measured over planned bytes of each tier that is used, or of the device where none is."""
    tiers = [place for place in ("host", "nvme") if plan.get(place)] or ["device"]
    return {place: places[place] / plan[place] for place in tiers}


def our_row(
    name: str,
    samples: dict[str, activations.Samples],
    counts: dict[str, dict[str, Any]],
    optimizer: float,
    tokens: int,
) -> dict[str, Any]:
    """Figures of one policy."""
    own, keep = samples[name], samples["keep"]
    counted = counts[HOOKS if name == "keep" else name]
    row: dict[str, Any] = {"policy": name, "saved GB": counted["saved"] / 1e9}
    row["places"] = {place: nbytes / 1e9 for place, nbytes in counted["places"].items()}
    row["sites"] = {site: nbytes / 1e9 for site, nbytes in counted["sites"].items()}
    row["over plan"] = over_plan(counted["places"], counted["planned"])
    row["measured_over_plan"] = max(row["over plan"].values(), key=lambda value: abs(value - 1))
    if not torch.cuda.is_available():
        own.peak = counted["places"]["total"]
    row |= common(own, keep)
    if own.seconds:
        step = own.median + optimizer
        row |= {"optimizer ms": optimizer * 1e3, "tokens/s": tokens / step}
        if keep.seconds:
            row["step ratio"] = step / (keep.median + optimizer)
    return row


def common(own: activations.Samples, keep: activations.Samples) -> dict[str, Any]:
    """Memory and time of one way, and beside those of keep."""
    if own.failed:
        return {"failed": own.failed}
    row: dict[str, Any] = {}
    if own.peak:
        row |= {"peak GB": own.peak / 1e9, "activation GB": own.activations / 1e9}
    if own.peak and keep.peak:
        row["share"] = own.activations / keep.activations
    if own.seconds:
        row |= {"fwd+bwd ms": own.median * 1e3, "spread ms": [min(own.seconds) * 1e3, max(own.seconds) * 1e3]}
        if keep.seconds:
            row["ratio"] = own.median / keep.median
    return row


def megatron_rows(config: Config, groups: Any, options: Any) -> list[dict[str, Any]]:
    """megatron-core's ways to need less memory, on its own model; a round builds each of its models."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    from benchmarks.common.plain_megatron import PlainModel

    large = groups.device.type == "cuda"
    ways = MEGATRON if large else ON_CPU
    data = config.data
    assert config.model.vocab_size is not None
    work = activations.batches(
        config.run.microbatches,
        data.micro_batch_size,
        data.sequence_length,
        config.model.vocab_size,
        groups.device,
    )
    samples = {name: activations.Samples() for name in ways}
    for number in range(max(1, options.rounds - 1)):
        for name, changes in ways.items():
            if not samples[name].failed:
                measure_plain(partial(PlainModel, config, groups, **changes), work, samples[name])
                tell(f"megatron-core, {name}, round {number}: {samples[name]}")
            if large:
                PipelineOffloadManager.reset_instance()
            activations.release()
    return [{"policy": name, **common(own, samples["keep"])} for name, own in samples.items()]


def measure_plain(build: Any, work: list[dict[str, Any]], samples: activations.Samples) -> None:
    """Two steps of a new model behind its warm-up, whose first step also tells its offload what there is."""
    plain = None
    try:
        plain = build()
        for step in range(WARM_UP + 2):
            if not samples.failed:
                forward_backward = partial(plain.forward_backward, work)
                activations.measure(forward_backward, samples, warm_up=step < WARM_UP)
    except Exception as error:  # what it refuses is a row like any other
        samples.failed = f"{type(error).__name__}: {error}".splitlines()[0]
    if plain is not None:
        dismantle([plain.model])


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether a policy that moves to the host reaches the aim, and the one that comes nearest in time."""
    able = [
        row for row in rows if row["policy"] != "keep" and row.get("share", 1) <= AIM_SHARE and "ratio" in row
    ]
    best = min(able, key=lambda row: row["step ratio"], default=None)
    return {
        "aim": f"step ratio at most {AIM_RATIO} at a share of at most {AIM_SHARE}",
        "policy": best and best["policy"],
        "reached": best is not None and best["step ratio"] <= AIM_RATIO,
    }


def tell(line: str) -> None:
    """Say at once what was seen: the next one may fail."""
    print(f"{time.monotonic() - START:6.1f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
