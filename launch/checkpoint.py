"""`k3train checkpoint list|verify|prune RUN`: what a run has saved, whether it is intact, and what may go."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from k3train.checkpoint import listing
from k3train.errors import UserError

LIST = "the checkpoints of a run, in its folder and on this node's disk; file sizes are compared"
VERIFY = (
    "read every file of a run's checkpoints, compare it with its checksum and look for code in its pickles; "
    "status 1 if one is damaged or has any"
)
PRUNE = "remove what checkpoint.keep and checkpoint.keep_every let go; says what, and does it with --yes"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("k3train ")
        raise UserError(f"{command}: {message}; see `{self.prog} --help`")


def main(arguments: Sequence[str]) -> int:
    """Dispatch `checkpoint list`, `checkpoint verify` and `checkpoint prune`."""
    commands = {"list": _list, "verify": _verify, "prune": _prune}
    if not arguments:
        raise UserError(f"checkpoint: no command given; valid are {', '.join(commands)}")
    if arguments[0] not in commands:
        raise UserError(f"checkpoint: {arguments[0]} is no command of it; valid are {', '.join(commands)}")
    return commands[arguments[0]](list(arguments[1:]))


def help_text() -> str:
    """The options of all commands."""
    return "\n\n".join(made().format_help().rstrip() for made in (list_parser, verify_parser, prune_parser))


def list_parser() -> argparse.ArgumentParser:
    """The options of `checkpoint list`."""
    return _parser("list", LIST)


def verify_parser() -> argparse.ArgumentParser:
    """The options of `checkpoint verify`."""
    made = _parser("verify", VERIFY)
    made.add_argument("steps", nargs="*", type=int, metavar="STEP", help="of these alone")
    return made


def prune_parser() -> argparse.ArgumentParser:
    """The options of `checkpoint prune`."""
    made = _parser("prune", PRUNE)
    made.add_argument("--keep", type=int, metavar="COUNT", help="newest to keep, 0: all (the run's own)")
    made.add_argument(
        "--keep-every", type=int, metavar="STEPS", help="multiples of it stay too, 0: none (the run's own)"
    )
    made.add_argument("--damaged", action="store_true", help="remove damaged ones as well")
    made.add_argument("--yes", action="store_true", help="do it; the newest intact one always stays")
    return made


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    made = _Parser(prog=f"k3train checkpoint {command}", description=description, allow_abbrev=False)
    made.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return made


def _list(arguments: list[str]) -> int:
    options = list_parser().parse_args(arguments)
    found = listing.entries(options.run)
    if options.json:
        _print_json({"run": str(options.run), "checkpoints": [entry.plain() for entry in found]})
        return 0
    if not found:
        print(f"{options.run} has no complete checkpoint yet")
        return 0
    rows: list[tuple[str, ...]] = [("step", "saved", "size", "layout", "stage", "where", "")]
    rows += [_row(entry) for entry in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _row(entry: listing.Entry) -> tuple[str, ...]:
    saved = "" if entry.saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.saved))
    where = entry.where
    if entry.ranks is not None:
        first, last = entry.ranks[0], entry.ranks[-1]
        where += f", rank {first}" if first == last else f", {len(entry.ranks)} ranks of {first} to {last}"
    stage, problem = entry.stage or "", entry.problem or ""
    return str(entry.step), saved, _size(entry.bytes), entry.shown_layout, stage, where, problem


def _verify(arguments: list[str]) -> int:
    options = verify_parser().parse_args(arguments)
    found = listing.entries(options.run)
    absent = sorted(set(options.steps) - {entry.step for entry in found})
    if absent:
        raise UserError(
            f"{options.run} has no checkpoint of step {absent[0]}; `k3train checkpoint list` has all"
        )
    chosen = [entry for entry in found if not options.steps or entry.step in options.steps]
    total, done, results = sum(entry.bytes for entry in chosen), 0, []
    for entry in chosen:
        progress = _Progress(entry, total, done)
        problems = listing.problems_of(Path(entry.folder), progress)
        progress.end()
        if not problems:
            from k3train.checkpoint.inspection import code_in

            problems = code_in(Path(entry.folder))
        done += entry.bytes
        results.append({"step": entry.step, "where": entry.where, "problems": problems})
        if not options.json:
            print(f"step {entry.step} ({entry.where}): {'; '.join(problems) or 'intact'}", flush=True)
    if options.json:
        _print_json({"run": str(options.run), "checkpoints": results})
    return 1 if any(result["problems"] for result in results) else 0


class _Progress:
    """A line that is written over, where standard error is a terminal."""

    def __init__(self, entry: listing.Entry, total: int, done: int) -> None:
        self.entry, self.total, self.done = entry, max(total, 1), done
        self.shown = sys.stderr.isatty()

    def __call__(self, name: str, size: int) -> None:
        """A file of `size` bytes is about to be read."""
        if self.shown:
            share = self.done / self.total
            print(
                f"\r\033[K{share:4.0%}  step {self.entry.step}: {name}", end="", file=sys.stderr, flush=True
            )
        self.done += size

    def end(self) -> None:
        """Leave an empty line."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _prune(arguments: list[str]) -> int:
    options = prune_parser().parse_args(arguments)
    own = listing.retention(options.run)
    keep = own[0] if options.keep is None else options.keep
    keep_every = own[1] if options.keep_every is None else options.keep_every
    for flag, value in (("--keep", keep), ("--keep-every", keep_every)):
        if value < 0:
            raise UserError(f"checkpoint prune: {flag} {value}: must be at least 0")
    plan = listing.plan_prune(options.run, keep, keep_every, damaged=options.damaged, contents=options.yes)
    sizes = {entry.step: entry.bytes for entry in listing.entries(options.run) if entry.where == "run"}
    freed = sum(sizes.get(step, 0) for step in plan.remove)
    if options.yes:
        listing.prune(options.run, plan)
    if options.json:
        _print_json({"run": str(options.run), "done": options.yes, "bytes": freed, **vars(plan)})
        return 0
    did = "removed" if options.yes else "would remove"
    print(f"{did} {_steps(plan.remove)}: {_size(freed)}; what stays: {_steps(plan.keep)}")
    if plan.leftovers:
        print(f"{did} what interrupted saves left: {', '.join(plan.leftovers)}")
    if plan.damaged and not options.damaged:
        print(f"damaged, and left (--damaged): {_steps(plan.damaged)}")
    if plan.newest_intact is None and plan.keep:
        print("none of them is intact, so none is removed")
    if not options.yes and (plan.remove or plan.leftovers):
        print("nothing is done without --yes")
    return 0


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
    return f"step {shown}" if len(steps) == 1 else f"steps {shown}" if steps else "no step"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=1))
