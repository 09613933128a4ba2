"""What `k3train eval needle` found, as a table of the report page: the darker, the more codes were found."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..data.long.score import Table, read

COLOUR = "217, 95, 14"


def section(folder: Path) -> str:
    """Heading and table of a run that was evaluated; nothing for another."""
    table = read(folder)
    if table is None:
        return ""
    head, *rows = table.rows()
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{_row(table, group, row)}</tr>" for group, row in zip(table.groups, rows, strict=True)
    )
    return (
        "<h2>Codes found in the window</h2><p>By the window's length and by how deep in it the code stands, "
        "0% being its beginning; chance is that of a reader who knows all codes but not whose they are.</p>"
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(table: Table, group: str, cells: list[str]) -> str:
    shares = table.by_depth(group)
    plain = cells[: len(cells) - len(shares)]
    coloured = "".join(
        f'<td style="background: rgba({COLOUR}, {0.8 * (share or 0):.2f})">{escape(cell)}</td>'
        for cell, share in zip(cells[len(plain) :], shares, strict=True)
    )
    return "".join(f"<td>{escape(cell)}</td>" for cell in plain) + coloured
