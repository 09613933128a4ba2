"""The plan of a run in stages as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

GB = 1e9


def render_stages(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each stage.

    Args:
        rows: what `curriculum.row` says of each, with its `plan`.
    """
    tokens = sum(row["tokens"] for row in rows)
    seconds = sum(row["plan"]["step_seconds"] * steps_of(row) for row in rows)
    caption = f"{tokens:,} tokens in all, {seconds / 3600:,.1f} hours as planned"
    ranks = rows[0]["ranks"]  # the same in all stages
    title = f"Stages of {rows[0]['plan']['recipe']} on {ranks} rank{'s' if ranks > 1 else ''}"
    table = Table(
        title=title, title_justify="left", caption=caption, box=box.SIMPLE_HEAD, show_edge=False,
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for name in (
        "stage",
        "steps",
        "length",
        "batch",
        "tokens",
        "layout",
        "long\ndocs",
        "peak GB",
        "s/step",
    ):
        # Words may be broken into lines, figures may not.
        if name in ("layout", "long\ndocs"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for row in rows:
        planned = row["plan"]
        peak, limit = peak_bytes(planned), planned["memory_limit_bytes"]
        table.add_row(
            row["stage"],
            row["steps"],
            f"{row['sequence_length']:,}",
            f"{row['samples_per_step']:,}",
            _short(row["tokens"]),
            row["layout"],
            row["long_documents"] or "-",
            f"{peak / GB:,.2f}" + (" !" if peak > limit else ""),
            f"{planned['step_seconds']:.3g}",
        )
    return table


def _short(count: int) -> str:
    """A large count by three of its digits."""
    scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if count >= s), (0, ""))
    return f"{count / scale:.3g}{unit}" if scale else f"{count:,}"


def peak_bytes(planned: dict[str, Any]) -> int:
    """Of the rank that needs the most."""
    return int(max(sum(held.values()) for held in planned["memory_bytes"]))


def steps_of(row: dict[str, Any]) -> int:
    """Steps of a stage."""
    first, last = row["steps"].split("-")
    return int(last) - int(first) + 1
