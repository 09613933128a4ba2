"""`k3train launch slurm|kubernetes`: a job file for a configuration, on standard output or in a file."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from k3train.errors import UserError
from k3train.log.metrics import replace_file

from .compose import ready

LAUNCHERS = ("slurm", "kubernetes")
OUTPUT = "--output"


def main(arguments: Sequence[str]) -> int:
    """Print the job, or write it to a file. What it reads is the cluster's, and goes unchecked."""
    name = arguments[0] if arguments else "nothing"
    if name not in LAUNCHERS:
        raise UserError(f"launch: {name} is no launcher; valid are {', '.join(LAUNCHERS)}")
    output, overrides = _split(arguments[1:])
    config = ready(overrides, inputs=False)
    job = importlib.import_module(f".{name}", __package__).render(config, overrides)
    if output is None:
        print(job, end="")
    else:
        _write(output, job)
    return 0


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of `--output FILE` or `--output=FILE`, and the other arguments."""
    output, overrides, rest = None, [], iter(arguments)
    for argument in rest:
        option, separator, value = argument.partition("=")
        if option != OUTPUT:
            overrides.append(argument)
            continue
        name = value if separator else next(rest, "")
        if not name:
            raise UserError(f"launch: {OUTPUT} needs the name of a file")
        output = Path(name).expanduser()
    return output, overrides


def _write(output: Path, job: str) -> None:
    try:
        replace_file(output, job.encode())
    except OSError as error:
        raise UserError(f"{OUTPUT} {output}: cannot be written: {error.strerror or error}") from error
