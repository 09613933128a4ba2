"""`k3train sample RUN prompt="def "`: continue text from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3train.errors import UserError

OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "prompt": (str, "text"),
    "tokens": (int, "an integer"),
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "seed": (int, "an integer"),
}


def main(arguments: Sequence[str]) -> int:
    """Print the prompt and its continuation."""
    folders = [argument for argument in arguments if _is_folder(argument)]
    if len(folders) != 1:
        raise UserError(f"sample: {len(folders)} run folders given; name one, then prompt=TEXT")
    if not (Path(folders[0]) / "config.yaml").is_file():
        raise UserError(
            f"{folders[0]}: not a run folder (it has no config.yaml); name one that `k3train train` wrote"
        )
    options = dict(_option(argument) for argument in arguments if not _is_folder(argument))
    if "prompt" not in options:
        raise UserError('sample: prompt is missing; for example prompt="def "')
    from k3train.sample import sample

    print(sample(folders[0], options.pop("prompt"), **options))
    return 0


def _is_folder(argument: str) -> bool:
    """A run's folder may hold the `=` of what was swept in its name."""
    key, separator, _ = argument.partition("=")
    return not separator or (key not in OPTIONS and Path(argument).is_dir())


def _option(argument: str) -> tuple[str, Any]:
    key, _, text = argument.partition("=")
    if key not in OPTIONS:
        raise UserError(f"{argument}: no such option; valid are {', '.join(OPTIONS)}")
    convert, expected = OPTIONS[key]
    try:
        return key, convert(text)
    except ValueError as error:
        raise UserError(f"{argument}: expected {expected}") from error
