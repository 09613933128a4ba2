"""Drawings of the documentation, made by the code that they are about; `launch.reference` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape

from k3train.layout import layout_of
from k3train.log import stacks
from k3train.log.curves import Axis
from k3train.plan import plan, step_series
from k3train.schedule import Simulation, simulation
from parallel.pipeline import draw
from parallel.pipeline.build import build
from parallel.pipeline.simulate import simulate, uniform

from .compose import ready, world_size

ORDERS = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "zbv": ("zbv", 2),
}
"""Picture -> schedule and chunks on a rank; on four ranks, with six micro-batches of equal stages."""
RANKS, MICROBATCHES = 4, 6
BUBBLES = "recipe=tiny images=4x16x16"
HELD = {
    "keep": "recipe=h200_small parallel.pipeline=4 offload.policy=keep",
    "mixed": "recipe=h200_small parallel.pipeline=4 offload.policy=mixed",
}
LEDGER = "recipe=k3_pretrain"

# Bottom to top; they stand out on white and on near-black.
SHADES = (
    "#2f66b3", "#23804a", "#8a4fb5", "#b53f66", "#e08a2e", "#1c8087", "#b97f14", "#6d747d",
    "#a9c9f3", "#a5dbb1", "#dcbcf3", "#f4b6c8",
)  # fmt: skip
LEFT, TOP, HEIGHT, BAR, GAP, LEGEND = 60, 36, 300, 56, 24, 220
"""Pixels."""


@cache
def pictures() -> dict[str, str]:
    """File name -> SVG, of all pictures under docs/pictures/."""
    found = {f"pipeline-{name}.svg": order(name) for name in ORDERS}
    found["bubbles.svg"] = draw.svg(_simulated(BUBBLES).timeline, unit="s")
    found |= {f"activations-{name}.svg": held(overrides) for name, overrides in HELD.items()}
    found["memory.svg"] = ledger(LEDGER)
    return found


def order(name: str) -> str:
    """A schedule's timeline with equal stages: a forward takes 1, a backward 2, messages nothing."""
    schedule, virtual = ORDERS[name]
    table = build(schedule, RANKS, virtual, MICROBATCHES)
    return draw.svg(simulate(table, uniform(table.layout)))


def held(overrides: str) -> str:
    """What each pipeline rank holds of activations over a step, by place."""
    config = ready(overrides.split(), inputs=False)
    simulated = _simulated(overrides)
    series = step_series(config, layout_of(config, world_size(config)), simulated)
    rows = {f"pipeline rank {rank}": each for rank, each in enumerate(series)}
    return stacks.svg(rows, float(simulated.timeline.makespan))


def ledger(overrides: str) -> str:
    """The plan's memory of each pipeline rank, beside what the device has."""
    config = ready(overrides.split(), inputs=False)
    result = plan(config, world_size(config), _simulated(overrides))
    ranks = result["memory_bytes"]
    # Ranks of one stage stand side by side and hold alike.
    each = len(ranks) // config.parallel.pipeline
    return bars(ranks[::each], result["memory_limit_bytes"])


def bars(ranks: Sequence[Mapping[str, float]], limit: float) -> str:
    """One stacked bar for each rank, GiB, and a line at `limit` bytes."""
    names = [name for name in ranks[0] if any(rank[name] for rank in ranks)]
    colours = dict(zip(names, SHADES, strict=False))
    axis = Axis(0, limit / 2**30)
    end, height = LEFT + len(ranks) * (BAR + GAP), TOP + HEIGHT + 36
    parts = [_rules(axis, end)]
    for number, rank in enumerate(ranks):
        parts.append(_bar(rank, colours, axis, LEFT + GAP // 2 + number * (BAR + GAP), str(number)))
    parts.append(_legend(names, colours, end + 12))
    size = f'width="{end + LEGEND}" height="{height}" viewBox="0 0 {end + LEGEND} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ledger" {size} role="img" '
        f'aria-label="memory of each pipeline rank"><style>{_style()}</style>'
        f'<rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    )


def _bar(rank: Mapping[str, float], colours: Mapping[str, str], axis: Axis, x: int, label: str) -> str:
    parts, below = [], 0.0
    for name, colour in colours.items():
        above = below + rank[name] / 2**30
        y, bottom = _y(axis, above), _y(axis, below)
        parts.append(
            f'<rect fill="{colour}" x="{x}" y="{y:.1f}" width="{BAR}" height="{bottom - y:.1f}">'
            f"<title>{escape(_words(name))}: {rank[name] / 2**30:.2f} GiB</title></rect>"
        )
        below = above
    text = f'<text x="{x + BAR / 2:.0f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>'
    return "".join(parts) + text


def _simulated(overrides: str) -> Simulation:
    from k3train.image_load import stated_load

    words = overrides.split()
    images = [word.partition("=")[2] for word in words if word.startswith("images=")]
    config = ready([word for word in words if not word.startswith("images=")], inputs=False)
    load = stated_load(config, images[0]) if images else None
    return simulation(config, layout_of(config, world_size(config)), load=load)


def _y(axis: Axis, value: float) -> float:
    return TOP + (1 - axis.place(value)) * HEIGHT


def _rules(axis: Axis, right: float) -> str:
    lines = "".join(
        f'<line x1="{LEFT}" x2="{right}" y1="{_y(axis, tick):.1f}" y2="{_y(axis, tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{_y(axis, tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in axis.ticks(5)
    )
    return f'{lines}<text x="{LEFT - 6}" y="{TOP - 16}">GiB on pipeline rank; the top is the device</text>'


def _legend(names: Sequence[str], colours: Mapping[str, str], x: float) -> str:
    return "".join(
        f'<rect fill="{colours[name]}" x="{x:.0f}" y="{TOP + 20 * row}" width="12" height="12"/>'
        f'<text x="{x + 18:.0f}" y="{TOP + 20 * row + 10}">{escape(_words(name))}</text>'
        for row, name in enumerate(reversed(names))
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _style() -> str:
    return (
        ".ledger{--ink:#1d1c1a;--rule:#d5d2ca;--paper:#ffffff;font:12px ui-sans-serif,system-ui,sans-serif}"
        "@media(prefers-color-scheme:dark){.ledger{--ink:#ecebe7;--rule:#3b3f45;--paper:#131416}}"
        ".ledger text{fill:var(--ink)}.ledger line{stroke:var(--rule)}.ledger .paper{fill:var(--paper)}"
    )
