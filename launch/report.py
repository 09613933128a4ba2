"""`k3train report RUN`: one self-contained HTML page with a run's curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3train.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Write the report of each run named and print where it is."""
    if not arguments:
        raise UserError("report: no run folder given; name one, for example runs/tiny")
    for folder in arguments:
        if not Path(folder).is_dir():
            raise UserError(f"{folder}: no such run folder")
        if not (Path(folder) / "config.yaml").is_file():
            raise UserError(f"{folder}: not a run folder (it has no config.yaml)")
    from k3train.log.report import write_report

    for folder in arguments:
        print(write_report(folder))
    return 0
