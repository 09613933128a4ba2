"""`k3train data prepare` and `longmix` make the .bin/.idx pairs to train on; `show` prints samples."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from k3train.errors import UserError

PREPARE = "text files into the .bin/.idx pair that training reads"
LONGMIX = "long samples of documents and of tasks that need evidence from all over the window"
SHOW = "samples of a configuration, with what is learnt in colour, or in brackets where there are no colours"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("k3train ")
        raise UserError(f"{command}: {message}; see `{self.prog} --help`")


def main(arguments: Sequence[str]) -> int:
    """Dispatch `data prepare`, `data longmix` and `data show`."""
    commands = {"prepare": _prepare, "longmix": _longmix, "show": _show}
    if not arguments:
        raise UserError(f"data: no command given; valid are {', '.join(commands)}")
    if arguments[0] not in commands:
        raise UserError(f"data: {arguments[0]} is no command of it; valid are {', '.join(commands)}")
    return commands[arguments[0]](list(arguments[1:]))


def help_text() -> str:
    """The options of all commands."""
    return "\n\n".join(made().format_help().rstrip() for made in (parser, longmix_parser, show_parser))


def parser() -> argparse.ArgumentParser:
    """The options of `data prepare`."""
    made = _Parser(prog="k3train data prepare", description=PREPARE, allow_abbrev=False)
    made.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl, .txt or .parquet, also .gz or .zst; a folder or glob",
    )
    made.add_argument(
        "--tokenizer", default="byte", help="byte, or a tokenizer.json or tiktoken file (%(default)s)"
    )
    _add_output(made)
    return made


def longmix_parser() -> argparse.ArgumentParser:
    """The options of `data longmix`."""
    made = _Parser(prog="k3train data longmix", description=LONGMIX, allow_abbrev=False)
    made.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="prefix of a prepared corpus, bundled, or an INPUT as of data prepare",
    )
    made.add_argument("--length", type=int, required=True, metavar="TOKENS", help="of each sample, exactly")
    made.add_argument("--samples", type=int, required=True, help="how many")
    made.add_argument("--seed", type=int, default=0, help="other samples of the same sources (%(default)s)")
    made.add_argument(
        "--tasks",
        default="needle,needles,source,continue",
        help="what questions take turns in (%(default)s)",
    )
    made.add_argument("--questions", type=int, help="in a sample (one for each 2048 tokens, at least 4)")
    made.add_argument(
        "--unasked", type=int, default=0, help="codes in a sample that nothing asks for (%(default)s)"
    )
    made.add_argument(
        "--wording",
        default="sentence",
        help="of codes: sentence, or compact for models of bytes (%(default)s)",
    )
    made.add_argument("--tokenizer", help="byte, a tokenizer.json or tiktoken file (that of the sources)")
    _add_output(made)
    return made


def _add_output(made: argparse.ArgumentParser) -> None:
    """The options of commands that write a corpus."""
    made.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    made.add_argument(
        "--text-key", default="text", help="field of each record that holds the text (%(default)s)"
    )
    made.add_argument(
        "--no-resume", dest="resume", action="store_false", help="start again, over what an earlier call made"
    )


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


def _longmix(arguments: list[str]) -> int:
    options = longmix_parser().parse_args(arguments)
    from k3train.data.long.longmix import NEEDS, TASKS, count_tasks, longmix
    from k3train.data.long.mix import Mixture

    questions = max(4, options.length // 2048) if options.questions is None else options.questions
    kinds = tuple(filter(None, options.tasks.split(",")))
    info = longmix(
        options.sources,
        options.output,
        Mixture(options.length, kinds, questions, options.unasked, options.wording),
        options.samples,
        seed=options.seed,
        workers=options.workers,
        tokenizer=options.tokenizer,
        text_key=options.text_key,
        resume=options.resume,
    )
    counts = count_tasks(options.output)
    print(info)
    print(f"{options.output}{TASKS}: " + ", ".join(f"{counts[kind]:,} of {kind}" for kind in kinds))
    for kind in kinds:
        if not counts[kind] and kind in NEEDS:
            print(f"no question of task {kind}: it needs {NEEDS[kind]}, and questions enough for its turn")
    print(
        f"a window of data.sequence_length={options.length} is a sample; name it in data.train "
        f"(data=indexed data.tokenizer={info.tokenizer}), beside other corpora by data.train_weights"
    )
    return 0


def _show(arguments: list[str]) -> int:
    options = show_parser().parse_intermixed_args(arguments)
    if options.count < 1 or options.first < 0:
        raise UserError("data show: --count is at least 1, --first at least 0")
    from rich.console import Console

    from k3train.data.chat.windows import build_chats
    from k3train.data.datasets import Samples, build_datasets
    from k3train.data.long.windows import build_needles
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
        build = build_needles if data.source == "needles" else build_datasets
        splits = build(data, tokenizer, data.sequence_length, seed, wanted, wanted)
    windows = splits[1] if options.valid else splits[0]
    assert windows is not None
    show(windows, tokenizer, Console(), options.first, options.count)
    for reason, name in skips.entries():
        print(f"left out ({reason}): {name}")
    if data.images:
        print("text only: the samples of data.images are not shown")
    return 0
