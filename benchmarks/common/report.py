"""What every benchmark prints: the machine, a short table, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under 50 s on two CPU cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def machine() -> dict[str, Any]:
    """Hardware, versions and commit that the figures belong to."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "hardware": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "devices": torch.cuda.device_count() if cuda else os.cpu_count(),
        "torch": torch.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
        "commit": commit(),
    }


def commit() -> str:
    """Short hash of the working folder's, with -dirty where files differ from it, or "unknown"."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns; numbers with three digits behind the point."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in head] for row in rows]
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *cells]
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def publish(figures: dict[str, Any], rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print the table, then the figures with their machine as one line of JSON; write them to `file`."""
    print(table(rows))
    line = json.dumps({**figures, "machine": machine()})
    if file is not None:
        file.write_text(line + "\n")
    print(line)
