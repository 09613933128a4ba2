"""`k3train plan`: what a configuration needs and how long a step takes, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3train import curriculum
from k3train.config import Config
from k3train.curriculum_view import render_stages
from k3train.errors import UserError
from k3train.image_load import FORM, stated_load
from k3train.layout import layout_of
from k3train.log import plan_page, stacks
from k3train.log.timeline import Recording, median_costs, read, vision_seconds
from k3train.plan import facts, plan, render, step_series
from k3train.plan_view import shown_parts, traffic_rows
from k3train.schedule import Simulation, simulation
from parallel.pipeline import draw
from parallel.pipeline.vision_fill import INNER_PARTS, Progress

from .compose import ready_stages, world_size
from .overrides import closest
from .schema import keys

OPTIONS = {
    "out": "a folder",
    "costs": "entry or uniform",
    "costs.from": "a run folder",
    "costs.tiers": "the JSON file of benchmarks/offload_tiers.py",
    "schedule": "a name",
    "images": FORM,
    "stage": "a stage's name",
}
"""Arguments of the plan alone, beside the configuration's keys, and what they take."""

LONG, LONG_FILL = 150_000, 60_000
"""Operations, and operations times parts of images, from which on the wait is explained."""


def main(arguments: Sequence[str]) -> int:
    """Print the plan, with --json as one JSON object; with out= also write the timeline's pictures."""
    if "--rehearse" in arguments:
        from . import rehearse

        return rehearse.main(arguments)
    if arguments[:1] == ["search"]:
        from . import plan_search

        return plan_search.main(arguments[1:])
    options, overrides = _split([argument for argument in arguments if argument != "--json"])
    if "costs.tiers" in options:
        overrides += measured_tiers(Path(options["costs.tiers"]))
    found = ready_stages(overrides, inputs=False, from_start=True)
    if found[0].curriculum.stage is not None and "stage" not in options:
        return _stages(found, options, "--json" in arguments)
    config = stage_named(found, options.get("stage"))
    recording = _recording(config, options["costs.from"]) if "costs.from" in options else None
    with _patience(config) as progress:
        simulated = _simulation(config, options, recording, progress)
        result = plan(config, world_size(config), simulated)
        written = (
            _pictures(Path(options["out"]), simulated, result, recording, _memory(config, simulated))
            if "out" in options
            else []
        )
    if "--json" in arguments:
        print(json.dumps(result))
        return 0
    from rich.console import Console

    console = Console()
    console.print(render(result))
    hint = "add out=FOLDER to have the timeline as SVG, PNG, HTML and Chrome trace"
    lines = [str(path) for path in written] or [hint]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    return 0


def stage_named(found: Sequence[Config], name: str | None) -> Config:
    """The stage of that name. Raises UserError where there is none."""
    names = [config.curriculum.stage or "" for config in found]
    if name is None or name in names:
        return found[names.index(name or "")]
    valid = ", ".join(filter(None, names)) or "none, as curriculum.stages is empty"
    raise UserError(f"stage={name}: no such stage; valid are {valid}")


def _stages(found: Sequence[Config], options: dict[str, str], as_json: bool) -> int:
    """Print the plan of a run in stages: a line for each."""
    if options:
        raise UserError(f"{next(iter(options))}=: of one stage; add stage=NAME")
    rows = []
    for config in found:
        ranks = world_size(config)
        result = plan(config, ranks, simulation(config, layout_of(config, ranks)))
        rows.append({**curriculum.row(config), "plan": result})
    if as_json:
        print(json.dumps(rows))
        return 0
    from rich.console import Console

    console = Console()
    console.print(render_stages(rows))
    for line in curriculum.shrinking(found):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print("add stage=NAME for the whole plan of one", soft_wrap=True, markup=False, highlight=False)
    return 0


TIER_KEYS = {
    ("host", "out"): "host_gbps",
    ("host", "in"): "host_gbps",
    ("peer", "out"): "peer_gbps",
    ("peer", "in"): "peer_gbps",
    ("nvme", "out"): "nvme_write_gbps",
    ("nvme", "in"): "nvme_read_gbps",
}
"""Of `cluster`, by tier and direction of the benchmark."""


def measured_tiers(path: Path) -> list[str]:
    """Overrides with the bandwidths of large parcels that `benchmarks/offload_tiers.py --json` found.

    One key for both directions gets the slower one. Raises UserError where the file is something else.
    """
    try:
        found = json.loads(path.read_text())
        rows = [row for row in found["rows"] if row["large"]]
        speeds = [(TIER_KEYS[row["tier"], row["direction"]], float(row["GB/s"])) for row in rows]
    except OSError as error:
        raise UserError(f"costs.tiers={path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"costs.tiers={path}: has no figures of tiers; `python benchmarks/offload_tiers.py --json FILE` "
            "writes them"
        ) from error
    keys = dict.fromkeys(key for key, _ in speeds)
    return [f"cluster.{key}={min(speed for name, speed in speeds if name == key):.4g}" for key in keys]


def _pictures(
    folder: Path,
    simulated: Simulation,
    result: dict[str, Any],
    recording: Recording | None,
    memory: dict[str, stacks.Series],
) -> list[Path]:
    """Write the timeline's pictures; their paths. Raises UserError where the folder cannot be written."""
    timeline, unit = simulated.timeline, simulated.unit
    both = {"planned": timeline}
    if recording is not None:
        both["measured"] = recording.median_timeline()
    held = stacks.svg(memory, float(timeline.makespan), unit=unit) if memory else ""
    inline = stacks.svg(memory, float(timeline.makespan), unit=unit, inline=True) if memory else ""
    more = {"activations held over the step": inline} if memory else {}
    contents = {
        "timeline.svg": draw.svg(timeline, unit=unit).encode(),
        "timeline.png": draw.png(timeline, unit=unit),
        "timeline.html": draw.html(both, list(facts(result).items()), unit=unit, more=more).encode(),
        "timeline.trace.json": json.dumps(draw.chrome_trace(timeline, unit=unit)).encode(),
    }
    drawn = {name: draw.svg(each, unit=unit, inline=True) for name, each in both.items()} | more
    contents["plan.html"] = plan_page.page(
        result, facts(result), shown_parts(result), traffic_rows(result), drawn
    ).encode()
    if memory:
        contents["activations.svg"] = held.encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"out={folder}: cannot be written ({error.strerror}); name another folder") from error
    return [folder / name for name in contents]


def _memory(config: Config, simulated: Simulation) -> dict[str, stacks.Series]:
    """What each pipeline rank holds over the step; nothing where chunks were taken as equal."""
    if simulated.unit != "s":
        return {}
    found = step_series(config, layout_of(config, world_size(config)), simulated)
    return {f"pipeline rank {rank}": series for rank, series in enumerate(found)}


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The plan's own arguments, and the overrides of the configuration."""
    options: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in OPTIONS:
            if "=" in argument and key not in keys() and (near := closest(key, list(OPTIONS))):
                raise UserError(f"{argument}: no such key{near}")
            overrides.append(argument)
        elif not value:
            raise UserError(f"{argument}: has no value; {key}= takes {OPTIONS[key]}")
        else:
            options[key] = value
    return options, overrides


def _simulation(
    config: Config, options: dict[str, str], recording: Recording | None, progress: Progress | None
) -> Simulation:
    costs = options.get("costs", "entry")
    if costs not in ("entry", "uniform"):
        raise UserError(f"costs={costs}: no such costs; valid are entry, uniform, or costs.from=RUN")
    if "costs" in options and recording is not None:
        raise UserError(f"costs={costs}: stands beside costs.from={options['costs.from']}; leave one out")
    if "images" in options and (costs == "uniform" or recording is not None):
        other = "costs=uniform" if recording is None else f"costs.from={options['costs.from']}"
        reason = "has no images" if recording is None else "has the images of its run"
        raise UserError(f"images={options['images']}: {other} {reason}; leave one out")
    return simulation(
        config,
        layout_of(config, world_size(config)),
        schedule=options.get("schedule"),
        equal_chunks=costs == "uniform",
        measured=None if recording is None else median_costs(recording),
        measured_vision=_measured_vision(config, options, recording),
        load=stated_load(config, options["images"]) if "images" in options else None,
        progress=progress,
    )


def _measured_vision(
    config: Config, options: dict[str, str], recording: Recording | None
) -> tuple[float, float] | None:
    """The tower's seconds in the run. Raises UserError where the plan has images and the run had none."""
    if recording is None or not config.vision.enabled:
        return None
    found = vision_seconds(recording)
    if found is None:
        raise UserError(
            f"costs.from={options['costs.from']}: no images went through its recorded steps; name another "
            "run, or plan with vision=none data.images=[]"
        )
    return found


def _recording(config: Config, folder: str) -> Recording:
    """What a run with the same stages has recorded. Raises UserError where there is nothing, or others."""
    recording = read(Path(folder))
    layout, parallel = recording.layout, config.parallel
    recorded = layout.pipeline, layout.virtual
    if recorded != (parallel.pipeline, parallel.virtual):
        raise UserError(
            f"costs.from={folder}: parallel.pipeline={recorded[0]} parallel.virtual={recorded[1]} were "
            f"recorded, not {parallel.pipeline} and {parallel.virtual}; plan that layout or name another run"
        )
    return recording


@contextmanager
def _patience(config: Config) -> Iterator[Progress | None]:
    """A line on the terminal while a long schedule is worked out; what the fill of bubbles reports to."""
    count = 2 * config.parallel.pipeline * config.parallel.virtual * config.run.microbatches
    fill = config.vision.enabled and config.vision.mode == "bubbles"
    if count < LONG and not (fill and count * config.run.microbatches * INNER_PARTS >= LONG_FILL):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    text = "filling the bubbles" if fill else f"simulating {count:,} operations"
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress
