"""`k3train launch slurm|kubernetes`: a job file for a configuration, on standard output."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from k3train.errors import UserError

from .compose import ready

LAUNCHERS = ("slurm", "kubernetes")


def main(arguments: Sequence[str]) -> int:
    """Print the job. Files and folders are not checked: they are the cluster's."""
    name = arguments[0] if arguments else "nothing"
    if name not in LAUNCHERS:
        raise UserError(f"launch: {name} is no launcher; valid are {', '.join(LAUNCHERS)}")
    overrides = list(arguments[1:])
    config = ready(overrides, inputs=False)
    print(importlib.import_module(f".{name}", __package__).render(config, overrides), end="")
    return 0
