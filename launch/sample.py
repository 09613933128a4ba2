"""`k3train sample RUN prompt="def "` continues text; `k3train sample RUN chat="2+3?"` answers in a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.errors import UserError

if TYPE_CHECKING:
    from k3train.generate import Answer

OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "prompt": (str, "text"),
    "tokens": (int, "an integer"),
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "seed": (int, "an integer"),
    "chat": (str, "text, or a chat as JSON"),
    "system": (str, "text"),
    "effort": (str, "low, medium, high or max"),
}


def main(arguments: Sequence[str]) -> int:
    """Print the prompt and its continuation, or what the assistant says in a chat."""
    folders = [argument for argument in arguments if _is_folder(argument)]
    if len(folders) != 1:
        raise UserError(f"sample: {len(folders)} run folders given; name one, then prompt=TEXT or chat=TEXT")
    if not (Path(folders[0]) / "config.yaml").is_file():
        raise UserError(
            f"{folders[0]}: not a run folder (it has no config.yaml); name one that `k3train train` wrote"
        )
    options = dict(_option(argument) for argument in arguments if not _is_folder(argument))
    if ("prompt" in options) == ("chat" in options):
        given = "prompt and chat are both given" if "prompt" in options else "prompt is missing"
        raise UserError(f'sample: {given}; for example prompt="def ", or chat="2+3?"')
    if "chat" in options:
        return _chat(folders[0], options)
    for name in ("system", "effort"):
        if name in options:
            raise UserError(f"{name}={options[name]}: goes with chat=TEXT")
    from k3train.sample import sample

    print(sample(folders[0], options.pop("prompt"), **options))
    return 0


def _chat(folder: str, options: dict[str, Any]) -> int:
    from k3train.sample import answer

    given, system, effort = options.pop("chat"), options.pop("system", None), options.pop("effort", None)
    if given.lstrip().startswith("{"):
        try:
            chat = json.loads(given)
        except ValueError as error:
            raise UserError(f"chat: not valid JSON: {error}") from error
    else:
        chat = {"messages": [{"role": "user", "content": given}]}
    if system is not None:
        chat["messages"] = [{"role": "system", "content": system}, *chat.get("messages", [])]
    if effort is not None:
        chat["thinking_effort"] = effort
    _print(answer(folder, chat, **options))
    return 0


def _print(found: Answer) -> None:
    """The channels of an answer; all of it, where it has none."""
    if found.message is None:
        print(found.text)
        print(f"k3train: this is no XTML: {found.problem}", file=sys.stderr)
        return
    if found.message.reasoning:
        print(f"think: {found.message.reasoning}")
    print("".join(str(part) for part in found.message.parts))
    for call in found.message.calls:
        print(f"call: {call.tool} {json.dumps(call.arguments, ensure_ascii=False)}")


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
