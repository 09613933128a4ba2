"""`k3train plan search`: the best layouts of a number of GPUs within their memory."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from k3train.activation_policy import BUDGET
from k3train.config import Config
from k3train.errors import UserError
from k3train.search import Found, Planned, Planner, Progress, leanest, search
from k3train.search_bounds import layer_seconds
from k3train.search_reasons import neighbours, reasons
from k3train.search_space import FIXABLE, SEARCHED, Space, allowed, policy_tiers
from k3train.search_view import page, render

from .activations import rules
from .compose import compose, resolve_layout, world_size
from .groups import policies
from .overrides import parse

OPTIONS = ("batch", "out")
GIB = 2**30
LAYOUT_KEYS = ("parallel", "cluster.nodes", "cluster.gpus", "cluster.ranks_per_node")
"""What the batch of a recipe does not depend on: it is that of the recipe's own layout."""


def main(arguments: Sequence[str]) -> int:
    """Print the best layouts, with --json as a JSON list; with out= also write them as a page."""
    options, top, overrides = _split([each for each in arguments if each != "--json"])
    space = space_of(overrides, options.get("batch"))
    with _bar() as progress:
        found = search(space, top, progress)
    if not found.best:
        raise UserError(_misses(space, found))
    rows = describe(space, found, overrides)
    if "out" in options:
        _write(Path(options["out"]), page(rows, found, space))
    if "--json" in arguments:
        print(json.dumps(rows))
        return 0
    from rich.console import Console

    console = Console()
    console.print(render(rows, found, space))
    for key in ("plan", "train"):
        console.print(rows[0]["command"][key], soft_wrap=True, markup=False, highlight=False)
    return 0


def space_of(overrides: Sequence[str], batch: str | None = None) -> Space:
    """What is searched. Raises UserError where it cannot be."""
    given = {override.key_or_group for override in parse(overrides)}
    composed = compose(overrides)
    if composed.curriculum.stages:
        raise UserError(
            "curriculum.stages: a search is for one stage; set its keys, and curriculum.stages={}"
        )
    if composed.offload.budget_gb is not None:
        raise UserError("offload.budget_gb: a search chooses among policies; leave it out")
    if composed.cluster.gpus is not None and composed.cluster.gpus < 1:
        raise UserError(f"cluster.gpus={composed.cluster.gpus}: must be at least 1")
    gpus = composed.cluster.gpus or world_size(composed)
    config = resolve_layout(composed, gpus)
    # Derived from the recipe's own number of nodes, which is not this cluster's.
    config.cluster.ranks_per_node = composed.cluster.ranks_per_node
    space = Space(
        config,
        gpus,
        _samples(config, overrides, batch),
        _policies(config, given),
        frozenset(given & set(FIXABLE)),
        layer_seconds(config),
    )
    assert space.nodes
    return space


def _samples(config: Config, overrides: Sequence[str], batch: str | None) -> int:
    """Of a step: `batch=` tokens, or what the recipe takes on its own layout."""
    length = config.data.sequence_length
    if batch is not None:
        if not batch.isdecimal() or not int(batch) or int(batch) % length:
            raise UserError(f"batch={batch}: tokens of a step, a multiple of data.sequence_length={length}")
        return int(batch) // length
    kept = [
        override.input_line
        for override in parse(overrides)
        if not any(f"{override.key_or_group}.".startswith(f"{key}.") for key in LAYOUT_KEYS)
    ]
    own = compose([str(line) for line in kept])
    own = resolve_layout(own, world_size(own))
    return own.run.microbatches * own.data.micro_batch_size * (own.parallel.data or 1)


def _policies(config: Config, given: set[str]) -> dict[str, dict[str, str]]:
    """Rules of the policies that may be chosen, the cheapest first."""
    own = config.offload.policy
    if own == BUDGET:
        raise UserError(f"offload.policy={BUDGET}: a search chooses among policies; leave it out")
    found = {own: dict(config.offload.resolved)}
    if "offload.policy" not in given:
        for name in policies():
            offload = type(config.offload)(**{**vars(config.offload), "policy": name})
            named = rules(Config(offload=offload), set())
            disk = "nvme" not in policy_tiers(named) or (config.offload.nvme_dir or "").strip()
            if allowed(named, config.offload.allow) and disk:
                found[name] = named
    return dict(sorted(found.items(), key=lambda item: (len(policy_tiers(item[1])), len(item[1]), item[0])))


def describe(space: Space, found: Found, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The best layouts as plain data."""
    planner = Planner(space)
    rows = [_row(space, found, each, overrides) for each in found.best]
    rows[0]["neighbours"] = neighbours(planner, found.best[0])
    rows[0]["reasons"] += [entry["why"] for entry in rows[0]["neighbours"]]
    return rows


def _row(space: Space, found: Found, planned: Planned, overrides: Sequence[str]) -> dict[str, Any]:
    layout, step = planned.layout, planned.step
    assert step is not None
    chosen = space.overrides(layout)
    kept = [
        str(override.input_line)
        for override in parse(overrides)
        if override.key_or_group not in (*SEARCHED, "cluster.gpus")
    ]
    return {
        "gpus": space.gpus,
        "tokens_per_step": space.tokens,
        "layout": {**asdict(layout), "states": layout.states._asdict()},
        "overrides": chosen,
        "command": {verb: shlex.join(["k3train", verb, *kept, *chosen]) for verb in ("plan", "train")},
        "memory_bytes": planned.bytes,
        "memory_limit_bytes": found.limit,
        "memory_by_kind": planned.ranks[planned.fullest],
        "host_bytes": planned.host,
        "step_seconds": step.seconds,
        "step_seconds_by_part": step.parts,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "exposed": {name: {"seconds": spent, "why": why} for name, (spent, why) in step.exposed.items()},
        "reasons": reasons(planned, found.best[0], found.limit),
    }


def _misses(space: Space, found: Found) -> str:
    """By how much, and what would help."""
    nearest = found.nearest
    if nearest is None:
        return f"cluster.gpus={space.gpus}: no layout divides batch, layers and experts; set batch=TOKENS"
    held = nearest.ranks[nearest.fullest]
    largest = sorted(held.items(), key=lambda item: -item[1])[:3]
    kinds = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3g}" for name, size in largest)
    if nearest.bytes <= found.limit:
        sides = " ".join(space.overrides(nearest.layout)[2:7])
        return (
            f"cluster.gpus={space.gpus}: what fits on a device, such as {sides}, "
            f"takes {nearest.host / GIB:.3g} GiB of a rank in host memory, more than cluster.host_gib="
            f"{space.config.cluster.host_gib}; use more GPUs"
        )
    over = (nearest.bytes - found.limit) / GIB
    helps = _helps(space, found)
    return (
        f"cluster.gpus={space.gpus}: nothing fits into {found.limit / GIB:.4g} GiB; the nearest misses by "
        f"{over:.3g} GiB ({kinds}; {' '.join(space.overrides(nearest.layout)[2:7])}); {helps}"
    )


def _helps(space: Space, found: Found) -> str:
    """More GPUs with which something fits, and offload that was not allowed."""
    lines = []
    for times in (2, 4, 8, 16):
        gpus = times * space.gpus
        config = replace(space.config, cluster=replace(space.config.cluster, gpus=gpus))
        more = Space(config, gpus, space.samples, space.policies, space.fixed, space.weights)
        least = leanest(more)
        if least is not None and least.bytes <= found.limit:
            lines.append(f"{more.gpus} GPUs would do")
            break
    if "offload.optimizer" in space.fixed or "offload.policy" in space.fixed:
        lines.append("leave offload.* free")
    elif "fp8" not in space.config.offload.allow:
        lines.append("offload.allow with fp8 may halve activations")
    return "; ".join(lines) or "use more GPUs, or ones with more memory"


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], int, list[str]]:
    options: dict[str, str] = {}
    overrides, top = [], "10"
    rest = iter(arguments)
    for argument in rest:
        key, _, value = argument.partition("=")
        if key in ("--top", "top"):
            top = value or next(rest, "")
        elif key in OPTIONS:
            options[key] = value
        else:
            overrides.append(argument)
    if not top.isdecimal() or not int(top):
        raise UserError(f"--top {top}: takes a number of layouts, at least 1")
    return options, int(top), overrides


def _write(folder: Path, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "search.html").write_text(text)
    except OSError as error:
        raise UserError(f"out={folder}: cannot be written ({error.strerror}); name another folder") from error


@contextmanager
def _bar() -> Iterator[Progress | None]:
    """On a terminal alone."""
    if not os.isatty(2):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
