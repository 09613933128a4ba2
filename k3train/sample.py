"""Continues text, or answers in a chat, from a run's newest checkpoint, on one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.cpu import enable_cpu

from .config import ExpertConfig
from .config_file import load_yaml
from .errors import UserError
from .quiet import quiet

if TYPE_CHECKING:
    from .generate import Answer, Generator


def sample(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """The prompt and up to `tokens` more tokens, drawn from the `top_p` share of the probability.

    `temperature` 0 takes the likeliest token each time. Text ends early with an end-of-document token.

    Raises:
        UserError: no complete checkpoint, an empty prompt, or an option out of range.
    """
    _check(tokens, temperature, top_p)
    if not prompt:
        raise UserError('prompt="" is empty; give the text to continue')
    with generator(run_dir) as opened:
        from .generate import Drawing

        return opened.extend(prompt, Drawing(tokens, temperature, top_p, seed))


def answer(
    run_dir: str | Path,
    chat: dict[str, Any],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Answer:
    """The assistant's next message of a chat, a record as `data.chat.messages` reads it.

    It ends with the token behind a message, or after `tokens`.

    Raises:
        UserError: likewise, or the record is no chat.
    """
    _check(tokens, temperature, top_p)
    from .data.chat.messages import parse_chat

    parsed = parse_chat(chat, "chat")
    with generator(run_dir) as opened:
        from .generate import Drawing

        return opened.answers([parsed], Drawing(tokens, temperature, top_p, seed))[0]


@contextmanager
def generator(run_dir: str | Path) -> Iterator[Generator]:
    """The model of a run's newest checkpoint, on one rank whatever layout the run has.

    Raises:
        UserError: there is no run or no complete checkpoint.
    """
    config = load_yaml(Path(run_dir) / "config.yaml")
    single = replace(
        config.parallel,
        pipeline=1,
        virtual=1,
        expert=ExpertConfig(),
        context=1,
        data=1,
        layers_per_chunk=None,
    )
    config = replace(config, parallel=single)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    quiet()
    enable_cpu()
    from .generate import Generator

    with Generator(config, Path(run_dir)) as opened:
        yield opened


def _check(tokens: int, temperature: float, top_p: float) -> None:
    if tokens < 1:
        raise UserError(f"tokens={tokens}: need at least 1")
    if not temperature >= 0:
        raise UserError(f"temperature={temperature}: need 0, which takes the likeliest token, or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: need a share above 0 and up to 1")
