"""Saves the panels as a workspace of a wandb project: `python -m launch.workspace ENTITY/PROJECT`.

With `--json` it prints them and sends nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from k3train.errors import UserError
from k3train.log.wandb_workspace import build, workspace

FORM = "ENTITY/PROJECT"


def main(arguments: Sequence[str]) -> int:
    """Save the workspace, or print it; the exit status."""
    if list(arguments) == ["--json"]:
        print(json.dumps(workspace(), indent=1))
        return 0
    try:
        print(save(arguments))
    except UserError as error:
        print(f"k3train: {error}", file=sys.stderr)
        return 2
    return 0


def save(arguments: Sequence[str]) -> str:
    """Save it as a new view; its address. Raises UserError."""
    entity, _, project = "".join(arguments).partition("/")
    if len(arguments) != 1 or not entity or not project or "/" in project:
        given = " ".join(arguments) or "nothing"
        raise UserError(f"{given}: takes {FORM}, as in a run's address, or --json")
    made = build(project, entity)
    try:
        made.save()
    except Exception as error:  # the package raises what its transport does
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{entity}/{project}: not saved ({reason[0]}); see `wandb login`") from error
    return str(made.url)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
