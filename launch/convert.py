"""`k3train convert`: released weights in, trained weights out, and a look at either folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from k3train.errors import UserError

GB = 1_000_000_000


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"convert: {message}; see `k3train convert --help`")


def main(arguments: Sequence[str]) -> int:
    """Dispatch `convert import`, `convert export` and `convert verify`."""
    options = parsers()[0].parse_args(list(arguments))
    for name in ("workers", "shard_gb"):
        if getattr(options, name, 1) <= 0:
            raise UserError(f"--{name.replace('_', '-')}={getattr(options, name):g}: must be above 0")
    print({"import": _import, "export": _export, "verify": _verify}[options.command](options))
    return 0


def _import(options: argparse.Namespace) -> str:
    from k3train.checkpoint.huggingface.importing import import_folder

    return import_folder(
        _folder(options.source),
        options.target,
        workers=options.workers,
        limit=int(options.shard_gb * GB),
        lenient=options.accept_unknown,
    )


def _export(options: argparse.Namespace) -> str:
    from k3train.checkpoint.huggingface.exporting import export_run
    from k3train.checkpoint.huggingface.keys import DTYPES, Layout

    return export_run(
        _folder(options.run),
        options.target,
        layout=Layout(DTYPES[options.dtype], options.packed, options.mtp),
        workers=options.workers,
        limit=int(options.shard_gb * GB),
        rounding=options.rounding,
        carry_from=None if options.carry_from is None else _folder(options.carry_from),
        tower_from=None if options.tower_from is None else _folder(options.tower_from),
    )


def _verify(options: argparse.Namespace) -> str:
    from k3train.checkpoint.huggingface.verifying import verify_folder

    return verify_folder(_folder(options.folder), workers=options.workers, lenient=options.accept_unknown)


def _folder(path: Path) -> Path:
    if not path.expanduser().is_dir():
        raise UserError(f"{path}: no such folder")
    return path.expanduser()


def parsers() -> list[argparse.ArgumentParser]:
    """The verb's own, then those of its three commands."""
    made = _Parser(prog="k3train convert", description=__doc__, allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True, metavar="import|export|verify")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=what, description=what, allow_abbrev=False
        )
        added.add_argument("--workers", type=int, default=1, help="files at a time (%(default)s)")
        return added

    taken = command("import", "a Hugging Face folder becomes a run that init_from=DST starts from")
    given = command("export", "a run's newest weights become a folder that inference engines load")
    seen = command("verify", "keys, shapes, dtypes, checksums and finite numbers of a folder")
    taken.add_argument("source", type=Path, metavar="SRC", help="folder of config.json and safetensors files")
    taken.add_argument("target", type=Path, metavar="DST", help="folder to make")
    _export_options(given)
    seen.add_argument("folder", type=Path, metavar="DIR", help="folder of config.json and safetensors files")
    for each in (taken, given):
        each.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="of a file (%(default)s)")
    for each in (taken, seen):
        each.add_argument(
            "--accept-unknown", action="store_true", help="carry unknown keys of config.json along"
        )
    return [made, taken, given, seen]


def _export_options(given: argparse.ArgumentParser) -> None:
    given.add_argument("run", type=Path, metavar="RUN", help="folder that `k3train train` or import wrote")
    given.add_argument("target", type=Path, metavar="DST", help="folder to make")
    given.add_argument("--packed", action="store_true", help="routed experts in MXFP4, as released")
    given.add_argument(
        "--rounding", choices=("floor", "ceil", "even"), help="of MXFP4 scales; the run's own by default"
    )
    given.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of what is not FP32 in the release (%(default)s, as released)",
    )
    given.add_argument(
        "--mtp", action="store_true", help="with the multi-token-prediction layer, which no release has"
    )
    given.add_argument(
        "--carry-from",
        type=Path,
        metavar="DIR",
        help="folder of tokenizer, generation settings and other keys of config.json; the run's by default",
    )
    given.add_argument(
        "--tower-from",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder or run whose vision tower goes with a run that was trained without one",
    )
