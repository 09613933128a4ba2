"""Whether a run's model reads across its window: codes found again, by length and by depth, on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from .config import Config
from .config_file import load_yaml
from .curriculum import stages
from .data.bundled import bundled_corpus
from .data.datasets import VALID_SALT
from .data.indexed import open_corpus
from .data.long.corpus import Corpus, Ids
from .data.long.longmix import read_samples, read_tasks
from .data.long.mix import Mixer
from .data.long.score import FILE, Predict, Table, score
from .data.long.windows import TESTED, chance, codes_size, mixture
from .errors import UserError
from .log.metrics import read as read_metrics
from .log.metrics import replace_file
from .log.report import write_report
from .sample import generator

if TYPE_CHECKING:
    from .generate import Generator

TIMES = (1, 2, 4, 8)
"""Lengths that are tested, in the run's own, where it has no stages."""


def find_needles(
    run_dir: str | Path,
    lengths: Sequence[int] | None = None,
    samples: int = 64,
    *,
    say: Callable[[str], None] = print,
) -> Table:
    """Ask for codes in `samples` held-out windows of each length; the table also goes into the run's report.

    Without `lengths`, those of `tested_lengths` that have room for the codes; what is left out is said.

    Raises:
        UserError: no run, no complete checkpoint, or a length that has no room for the codes.
    """
    folder = Path(run_dir)
    config = load_yaml(folder / "config.yaml")
    with generator(folder) as opened:
        data, tokenizer = config.data, opened.tokenizer
        _, held_out = bundled_corpus(tokenizer, data.cache_dir, data.max_bytes)
        corpus = Corpus([open_corpus(held_out)], tokenizer.eod_id)
        pairs, questions = data.needles.pairs, min(data.needles.questions, TESTED)
        lengths = _with_room(config, folder, lengths, codes_size(tokenizer, pairs, questions), say)
        mixers = {
            f"{length:,}": Mixer(
                corpus, tokenizer, mixture(length, pairs, questions), config.run.seed + VALID_SALT
            )
            for length in lengths
        }
        groups = [
            (name, map(mixer.__getitem__, range(samples)), chance(pairs, questions))
            for name, mixer in mixers.items()
        ]
        table = score("tokens", groups, likeliest(opened))
    replace_file(folder / FILE, (json.dumps(table.record()) + "\n").encode())
    write_report(folder)
    return table


def tested_lengths(config: Config, run_dir: Path) -> list[int]:
    """Those of a curriculum's stages; of a run without, its own and up to 8 times as much.

    `config` is of the last stage that ran; the length of a stage that states none is in the metrics.
    """
    own = config.data.sequence_length
    found = {stage.changes.get("data.sequence_length", own) for stage in stages(config.curriculum)}
    if not found:
        return [own * times for times in TIMES]
    logged = {record.get("sequence_length") for record in read_metrics(run_dir)}
    return sorted(found | {length for length in logged if isinstance(length, int)})


def _with_room(
    config: Config, run_dir: Path, given: Sequence[int] | None, taken: int, say: Callable[[str], None]
) -> Sequence[int]:
    """The lengths to test that hold more than the `taken` tokens of codes and questions."""
    lengths = tested_lengths(config, run_dir) if given is None else given
    short = [length for length in lengths if length <= taken]
    shown, pairs = ",".join(map(str, short)), config.data.needles.pairs
    if short and (given is not None or len(short) == len(lengths)):
        raise UserError(
            f"lengths={shown}: {pairs} codes and their questions take {taken} tokens (data.needles.pairs); "
            f"set lengths= to {taken + 1} or more"
        )
    if short:
        say(f"left out: length {shown}, where {pairs} codes and their questions take {taken} tokens")
    return [length for length in lengths if length > taken]


def answer_tasks(run_dir: str | Path, prefix: str, samples: int | None = None) -> Table:
    """Ask the questions of a corpus that `data longmix` made, of its first `samples`.

    Raises:
        UserError: likewise, or there is no such corpus, or it is of another tokenizer.
    """
    read_tasks(prefix)  # refused before a model is loaded
    with generator(run_dir) as opened:
        chosen = islice(read_samples(prefix, opened.tokenizer), samples)
        return score("task", [("", chosen, None)], likeliest(opened), by_kind=True)


def likeliest(opened: Generator) -> Predict:
    """The likeliest next tokens by a loaded model."""
    import torch

    from .ops.packing import Packing

    @torch.no_grad()
    def predict(tokens: Ids) -> Ids:
        given = torch.from_numpy(tokens).to(opened.groups.device)
        packing = Packing.from_tokens(given, opened.tokenizer.eod_id)
        found: Ids = opened.model(given, packing).argmax(-1).cpu().numpy()
        return found

    return predict
