"""`k3train eval needle RUN` and `k3train eval longmix RUN PREFIX`: answers by depth of their evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3train.errors import UserError

KINDS = ("needle", "longmix")


def main(arguments: Sequence[str]) -> int:
    """Print the table of one kind of evaluation."""
    if not arguments:
        raise UserError(f"eval: nothing named; valid are {', '.join(KINDS)}")
    kind, *rest = arguments
    if kind not in KINDS:
        raise UserError(f"eval: {kind} is nothing to evaluate; valid are {', '.join(KINDS)}")
    known = ("lengths", "samples") if kind == "needle" else ("samples",)
    options = dict(argument.split("=", 1) for argument in rest if _is_option(argument))
    places = [argument for argument in rest if not _is_option(argument)]
    if unknown := next((key for key in options if key not in known), None):
        raise UserError(
            f"eval {kind}: {unknown}={options[unknown]} is no option; valid are {', '.join(known)}"
        )
    wanted = ["RUN"] if kind == "needle" else ["RUN", "PREFIX"]
    if len(places) != len(wanted):
        raise UserError(
            f"eval {kind}: {len(places)} names given; write k3train eval {kind} {' '.join(wanted)}"
        )
    if not (Path(places[0]) / "config.yaml").is_file():
        raise UserError(
            f"{places[0]}: not a run folder (it has no config.yaml); name one that `k3train train` wrote"
        )
    samples = _numbers("samples", options["samples"], 1)[0] if "samples" in options else None
    lengths = _numbers("lengths", options["lengths"], 2) if "lengths" in options else None
    from k3train import read_back

    if kind == "longmix":
        print(read_back.answer_tasks(places[0], places[1], samples))
        return 0
    print(read_back.find_needles(places[0], lengths, 64 if samples is None else samples))
    return 0


def _is_option(argument: str) -> bool:
    """A run's folder may hold the `=` of what was swept in its name."""
    return "=" in argument and not Path(argument).exists()


def _numbers(key: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{key}={text}: expected integers") from error
    if min(numbers) < least:
        raise UserError(f"{key}={text}: need at least {least}")
    return numbers
