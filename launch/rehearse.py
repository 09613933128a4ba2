"""`k3train plan --rehearse`: the objects of any rank of a layout, built here without values or peers."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from k3train.errors import UserError

from .compose import ready_stages, world_size
from .plan import stage_named

FLAGS = ("--rehearse", "--json")

OPTIONS = {
    "rank": "a number",
    "ranks": "all, or numbers and ranges such as 0,8-15",
    "stage": "a stage's name",
}
"""Arguments of a rehearsal alone, and what they take."""


def main(arguments: Sequence[str]) -> int:
    """Build, compare and print; exit status 2 where something does not fit."""
    options, overrides = _split([argument for argument in arguments if argument not in FLAGS])
    found = ready_stages(overrides, inputs=False, from_start=True)
    config = stage_named(found, options.get("stage"))
    ranks = chosen(options, world_size(config))
    # GPUs of this machine have no part in it, and torch is not imported yet.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with _patience(world_size(config)) as progress:
        _prepare()
        from k3train.layout import layout_of
        from k3train.rehearsal import rehearse, usual_ranks

        result = rehearse(config, ranks or usual_ranks(layout_of(config)), progress=progress)
    from k3train.rehearsal_view import describe, render

    if "--json" in arguments:
        print(json.dumps(describe(result)))
    else:
        from rich.console import Console

        Console().print(render(result))
    for problem in result.problems:
        print(f"k3train: {problem}", file=sys.stderr)
    return 2 if result.problems else 0


def chosen(options: dict[str, str], ranks: int) -> list[int]:
    """The ranks that `rank=` or `ranks=` name; [] where neither is given.

    Raises:
        UserError: both are given, one cannot be read, or there is no such rank.
    """
    given = [f"{key}={options[key]}" for key in ("rank", "ranks") if key in options]
    if len(given) > 1:
        raise UserError(f"{given[0]}: stands beside {given[1]}; leave one out")
    if not given:
        return []
    text = options.get("rank", options.get("ranks", ""))
    if text == "all" and "ranks" in options:
        return list(range(ranks))
    found: set[int] = set()
    for part in text.split(","):
        form = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if not form or ("rank" in options and (form[2] or "," in text)):
            raise UserError(f"{given[0]}: takes {OPTIONS['rank' if 'rank' in options else 'ranks']}")
        first, last = int(form[1]), int(form[2] or form[1])
        if not first <= last < ranks:
            raise UserError(f"{given[0]}: {part} is none of the layout's ranks, which are 0 to {ranks - 1}")
        found.update(range(first, last + 1))
    return sorted(found)


def _prepare() -> None:
    """Torch and megatron-core for a machine without a GPU, on one thread, without their remarks."""
    import logging
    import warnings

    from parallel.cpu import enable_cpu

    warnings.simplefilter("ignore")
    enable_cpu()
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)


@contextmanager
def _patience(ranks: int) -> Iterator[Callable[[int], None]]:
    """A line on the terminal meanwhile."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"building {ranks:,} ranks", total=ranks)
        yield lambda done: bar.update(task, completed=done)


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """A rehearsal's own arguments, and the others. Raises UserError for one without a value."""
    options: dict[str, str] = {}
    rest = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in OPTIONS:
            rest.append(argument)
        elif not value:
            raise UserError(f"{argument}: has no value; {key}= takes {OPTIONS[key]}")
        else:
            options[key] = value
    return options, rest
