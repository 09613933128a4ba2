"""`k3train data prepare`: text files into the .bin/.idx pair that training reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from k3train.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"data prepare: {message}; see `k3train data prepare --help`")


def main(arguments: Sequence[str]) -> int:
    """Dispatch `data prepare`."""
    if not arguments or arguments[0] != "prepare":
        given = arguments[0] if arguments else "nothing"
        raise UserError(f"data: {given} is no command of it; valid is prepare")
    options = parser().parse_args(list(arguments[1:]))
    from k3train.data.prepare import prepare

    info = prepare(
        options.inputs,
        options.output,
        options.tokenizer,
        workers=options.workers,
        text_key=options.text_key,
        resume=options.resume,
    )
    print(info)
    print(
        f"train on it with data=indexed data.train=[{options.output}] "
        f"data.valid=[PREFIX] data.tokenizer={options.tokenizer}, where PREFIX is of other files"
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """The options of `data prepare`."""
    made = _Parser(prog="k3train data prepare", description=__doc__, allow_abbrev=False)
    made.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl, .txt or .parquet, also .gz or .zst; a folder or glob",
    )
    made.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    made.add_argument(
        "--tokenizer", default="byte", help="byte, or a tokenizer.json or tiktoken file (%(default)s)"
    )
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    made.add_argument(
        "--text-key", default="text", help="field of each record that holds the text (%(default)s)"
    )
    made.add_argument(
        "--no-resume", dest="resume", action="store_false", help="start again, over what an earlier call made"
    )
    return made
