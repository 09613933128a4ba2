"""`k3train report RUN...`: one self-contained HTML page with a run's curves, or with those of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3train.errors import UserError

COMPARISON = "comparison.html"


def main(arguments: Sequence[str]) -> int:
    """Write the report of the one run named, or the comparison of several, and print where it is."""
    outs = [word.partition("=")[2] for word in arguments if word.startswith("out=")]
    folders = [word for word in arguments if not word.startswith("out=")]
    _check(folders)
    if len(folders) == 1:
        if outs:
            raise UserError(f"out={outs[-1]}: a comparison's; a report goes into its run's folder")
        from k3train.log.report import write_report

        print(write_report(folders[0]))
        return 0
    from k3train.log.compare import MOST, write_comparison

    if len(folders) > MOST:
        raise UserError(f"report: {len(folders)} run folders; at most {MOST} fit on one page")
    target = Path(outs[-1] if outs else COMPARISON)
    try:
        print(write_comparison(folders, target))
    except OSError as error:
        raise UserError(f"out={target}: cannot be written ({error.strerror or error})") from error
    return 0


def _check(folders: Sequence[str]) -> None:
    if not folders:
        raise UserError("report: no run folder given; name one, for example runs/tiny")
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"{folder}: no such run folder")
        if not (Path(folder) / "config.yaml").is_file():
            raise UserError(f"{folder}: not a run folder (it has no config.yaml)")
