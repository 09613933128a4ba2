"""Samples for people: what a model reads, and in colour what it learns to write. Letters: s tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

from rich.console import Console
from rich.text import Text

from .packed import Sample
from .tokenizer import STRUCTURE_NAMES, Tokenizer

BRACKETS = "⟦", "⟧"
"""Around what is learnt, where there are no colours."""
STYLES = {
    (True, False): "bold green",
    (False, False): "dim",
    (True, True): "bold yellow",
    (False, True): "dim yellow",
}
"""By whether it is learnt, and whether it is a token that no text gives."""


class Windows(Protocol):
    """Samples by number."""

    def __getitem__(self, index: int) -> Sample: ...


def show(windows: Windows, tokenizer: Tokenizer, console: Console, first: int, count: int) -> None:
    """Print samples [first, first + count)."""
    for index in range(first, first + count):
        sample = windows[index]
        ids = sample["tokens"].tolist()
        learnt = learnt_tokens(sample)
        filled = len(ids) - _padding(ids, tokenizer)
        # The end token of the last document may be but a label.
        unended = ids[:filled][-1:] not in ([], [tokenizer.eod_id])
        documents = ids[:filled].count(tokenizer.eod_id) + unended
        counts = f"{filled} of {len(ids)} tokens, {sum(learnt)} learnt, {documents} documents"
        text = marked(ids[:filled], learnt[:filled], tokenizer, colours=console.is_terminal)
        console.print(f"sample {index}: {counts}", style="bold", highlight=False)
        console.print(text, soft_wrap=True)


def learnt_tokens(sample: Sample) -> list[bool]:
    """For each token [s] whether the one before it learns to predict it."""
    return [False, *(sample["loss_mask"][:-1] > 0).tolist()]


def marked(ids: list[int], learnt: list[bool], tokenizer: Tokenizer, *, colours: bool) -> Text:
    """The tokens as text, with what is learnt in colour, or in brackets."""
    text = Text()
    for is_learnt, group in groupby(zip(ids, learnt, strict=True), key=lambda entry: entry[1]):
        if is_learnt and not colours:
            text.append(BRACKETS[0])
        for part, special in _parts([number for number, _ in group], tokenizer):
            text.append(part, STYLES[is_learnt, special] if colours else "")
        if is_learnt and not colours:
            text.append(BRACKETS[1])
    return text


def _parts(ids: list[int], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    names = _names(tokenizer)
    for name, group in groupby(ids, key=names.get):
        found = list(group)
        if name is None:
            yield tokenizer.decode(found), False
        elif name == "<image>" and len(found) > 1:
            yield f"<image x {len(found)}>", True
        else:
            yield name * len(found), True


def _names(tokenizer: Tokenizer) -> dict[int, str]:
    """Tokens that decode to nothing, by what is shown for them."""
    names = {tokenizer.pad_id: "<pad>", tokenizer.eod_id: "<eod>\n"}
    if tokenizer.image_id is not None:
        names[tokenizer.image_id] = "<image>"
    if tokenizer.structure is not None:
        names |= dict(zip(tokenizer.structure[:4], STRUCTURE_NAMES, strict=True))
    return names


def _padding(ids: list[int], tokenizer: Tokenizer) -> int:
    """Tokens of padding at the end; none where padding is the token that ends documents."""
    if tokenizer.pad_id == tokenizer.eod_id:
        return 0
    return next((i for i, number in enumerate(reversed(ids)) if number != tokenizer.pad_id), len(ids))
