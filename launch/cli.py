"""The `k3train` command: finds the verb, runs it, and turns user errors into one line and exit status 2."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from k3train.errors import UserError

from .modes import keep_from_others

HELP_FLAGS = ("-h", "--help", "help")
VERBS = (
    "train", "plan", "bench", "doctor", "data", "convert", "sample", "eval", "report", "checkpoint", "launch",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own by default); the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in HELP_FLAGS:
        from .help import general

        print(general())
        return 0
    if arguments[0] == "--version":
        print(_version())
        return 0
    return run_verb(arguments[0], arguments[1:])


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Run one verb; the exit status."""
    keep_from_others()
    try:
        return _dispatch(verb, list(arguments))
    except UserError as error:
        from k3train.redaction import redact

        print(f"k3train: {redact(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe left
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("k3train: interrupted", file=sys.stderr)
        return 1


def _dispatch(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{verb}: no such verb{hint} (valid are {', '.join(VERBS)})")
    if set(HELP_FLAGS[:2]) & set(arguments):
        from .help import verb as help_of

        print(help_of(verb))
        return 0
    module = "job" if verb == "launch" else verb
    return int(importlib.import_module(f".{module}", __package__).main(arguments))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"k3train {version('k3train')}"
    except PackageNotFoundError:
        return "k3train (not installed)"


if __name__ == "__main__":
    sys.exit(main())
