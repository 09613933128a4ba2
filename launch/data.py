"""`k3train data prepare` makes the .bin/.idx pair that training reads; `k3train data show` prints samples."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from k3train.errors import UserError

PREPARE = "text files into the .bin/.idx pair that training reads"
SHOW = "samples of a configuration, with what is learnt in colour, or in brackets where there are no colours"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("k3train ")
        raise UserError(f"{command}: {message}; see `{self.prog} --help`")


def main(arguments: Sequence[str]) -> int:
    """Dispatch `data prepare` and `data show`."""
    commands = {"prepare": _prepare, "show": _show}
    if not arguments or arguments[0] not in commands:
        given = arguments[0] if arguments else "nothing"
        raise UserError(f"data: {given} is no command of it; valid are {', '.join(commands)}")
    return commands[arguments[0]](list(arguments[1:]))


def help_text() -> str:
    """The options of both commands."""
    return f"{parser().format_help().rstrip()}\n\n{show_parser().format_help().rstrip()}"


def parser() -> argparse.ArgumentParser:
    """The options of `data prepare`."""
    made = _Parser(prog="k3train data prepare", description=PREPARE, allow_abbrev=False)
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


def show_parser() -> argparse.ArgumentParser:
    """The options of `data show`."""
    made = _Parser(prog="k3train data show", description=SHOW, allow_abbrev=False)
    made.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as of train: data=chat data.path=..")
    made.add_argument("--count", type=int, default=2, help="samples (%(default)s)")
    made.add_argument("--first", type=int, default=0, help="number of the first one (%(default)s)")
    made.add_argument("--valid", action="store_true", help="of the validation split")
    return made


def _prepare(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
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


def _show(arguments: list[str]) -> int:
    options = show_parser().parse_intermixed_args(arguments)
    if options.count < 1 or options.first < 0:
        raise UserError("data show: --count is at least 1, --first at least 0")
    from rich.console import Console

    from k3train.data.chat.windows import build_chats
    from k3train.data.datasets import Samples, build_datasets
    from k3train.data.multimodal import build_encoder
    from k3train.data.show import show
    from k3train.data.skips import Skips
    from k3train.data.tokenizer import load_tokenizer

    from .compose import ready

    config = ready(options.overrides, inputs=False)
    data, seed, wanted = config.data, config.run.seed, options.first + options.count
    tokenizer, skips = load_tokenizer(data.tokenizer, data.image_token), Skips(lambda _: None)
    splits: tuple[Samples, Samples | None]
    if data.source == "chat":
        images = build_encoder(data, config.vision, tokenizer, skips) if config.vision.enabled else None
        splits = build_chats(data, tokenizer, images, skips, seed, wanted, wanted, print)
    else:
        splits = build_datasets(data, tokenizer, data.sequence_length, seed, wanted, wanted)
    windows = splits[1] if options.valid else splits[0]
    assert windows is not None
    show(windows, tokenizer, Console(), options.first, options.count)
    for reason, name in skips.entries():
        print(f"left out ({reason}): {name}")
    if data.images:
        print("text only: the samples of data.images are not shown")
    return 0
