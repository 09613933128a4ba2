"""From ids back to a chat's messages: the grammar that a model's answer must follow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tokenizer import Tokenizer, chat_structure
from .messages import JSON, Message, ToolCall
from .xtml import Marker, json_type

HEADER = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')
DEEPEST = 8
"""Elements inside each other; a chat has four."""
ENTITY = re.compile(r"&(quot|amp);")


class XtmlError(ValueError):
    """Tokens that are no XTML, or XTML that is no message."""


@dataclass(frozen=True)
class Element:
    """An element with its content in reading order."""

    tag: str
    attributes: dict[str, str]
    content: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its content, which is text alone. Raises XtmlError otherwise."""
        if any(isinstance(part, Element) for part in self.content):
            raise XtmlError(f"{self.tag} holds an element; expected text")
        return "".join(str(part) for part in self.content)

    @property
    def elements(self) -> list[Element]:
        """Its content, which is elements alone. Raises XtmlError otherwise."""
        found = [part for part in self.content if isinstance(part, Element)]
        if len(found) < len(self.content):
            raise XtmlError(f"{self.tag} holds text; expected elements")
        return found


def parse(ids: Sequence[int], tokenizer: Tokenizer) -> list[Element]:
    """The messages that `ids` hold, and nothing else; an end of the document may stand behind them.

    Raises:
        XtmlError: the tokens are not a list of well-formed messages.
    """
    kept = list(ids)
    if kept and kept[-1] == tokenizer.eod_id:
        kept.pop()
    reader = _Reader(_items(kept, tokenizer))
    messages = []
    while not reader.done:
        reader.expect(Marker.OPEN)
        messages.append(reader.element())
        reader.expect(Marker.END)
        if messages[-1].tag != "message":
            raise XtmlError(f"{messages[-1].tag} stands where a message should")
    return messages


def parse_answer(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool) -> Message:
    """The assistant's message of which a model wrote `ids` behind a prompt.

    Raises:
        XtmlError: it does not end, or is not think (with `thinking`), response and tools in this order.
    """
    structure = chat_structure(tokenizer)
    start = [structure.open, *tokenizer.encode("think" if thinking else "response"), structure.sep]
    header = [structure.open, *tokenizer.encode('message role="assistant"'), structure.sep]
    messages = parse([*header, *start, *ids], tokenizer)
    if len(messages) != 1:
        raise XtmlError(f"{len(messages)} messages where one should stand")
    return answer(messages[0], thinking=thinking)


def answer(message: Element, *, thinking: bool) -> Message:
    """An assistant's message, with its channels in order. Raises XtmlError otherwise."""
    if message.attributes.get("role") != "assistant":
        raise XtmlError(f"a message of {message.attributes.get('role')}; expected one of the assistant")
    channels = message.elements
    expected = [*(["think"] if thinking else []), "response"]
    tags = [channel.tag for channel in channels]
    if tags not in (expected, [*expected, "tools"]):
        raise XtmlError(f"channels {tags}; expected {expected}, or these and tools")
    calls = channels[-1].elements if tags[-1] == "tools" else []
    if tags[-1] == "tools" and not calls:
        raise XtmlError("tools holds no call")
    response = channels[len(expected) - 1].text
    return Message(
        role="assistant",
        parts=(response,) if response else (),
        name=message.attributes.get("name"),
        reasoning=channels[0].text if thinking else "",
        calls=tuple(_call(call, number) for number, call in enumerate(calls, start=1)),
    )


def _call(call: Element, number: int) -> ToolCall:
    _named(call, "call", {"tool", "index"})
    if call.attributes["index"] != str(number):
        raise XtmlError(f"call index={call.attributes['index']}; expected {number}")
    arguments: dict[str, JSON] = {}
    for argument in call.elements:
        _named(argument, "argument", {"key", "type"})
        key = argument.attributes["key"]
        if key in arguments:
            raise XtmlError(f"argument {key} stands twice")
        arguments[key] = _value(argument)
    return ToolCall(call.attributes["tool"], arguments)


def _value(argument: Element) -> JSON:
    kind = argument.attributes["type"]
    if kind == "string":
        return argument.text
    try:
        value = json.loads(argument.text)
    except (ValueError, RecursionError) as error:
        raise XtmlError(f"argument {argument.attributes['key']}: {error}") from error
    if json_type(value) != kind:
        raise XtmlError(f"argument {argument.attributes['key']} is of type {json_type(value)}, not {kind}")
    return value


def _named(element: Element, tag: str, attributes: set[str]) -> None:
    if element.tag != tag or element.attributes.keys() != attributes:
        raise XtmlError(f"{element.tag} {sorted(element.attributes)}; expected {tag} {sorted(attributes)}")


def _items(ids: Sequence[int], tokenizer: Tokenizer) -> list[Marker | str]:
    """Structural tokens, and the texts between them. Placeholders of images give no text."""
    structure = chat_structure(tokenizer)
    markers = dict(zip(structure[:4], Marker, strict=True))
    items: list[Marker | str] = []
    held: list[int] = []

    def flush() -> None:
        if held:
            items.append(tokenizer.decode(held))
            held.clear()

    for number in ids:
        if number in (tokenizer.eod_id, tokenizer.pad_id):
            raise XtmlError(f"token {number}, which ends documents or fills them up, inside a message")
        if number in markers:
            flush()
            items.append(markers[number])
        else:
            held.append(number)
    flush()
    return items


class _Reader:
    """Walks over the items from left to right."""

    def __init__(self, items: list[Marker | str]) -> None:
        self.items = items
        self.place = 0

    @property
    def done(self) -> bool:
        return self.place == len(self.items)

    def next(self) -> Marker | str:
        if self.done:
            raise XtmlError("ends early")
        self.place += 1
        return self.items[self.place - 1]

    def expect(self, marker: Marker) -> None:
        found = self.next()
        if found is not marker:
            raise XtmlError(f"expected {marker.value}, found {_shown(found)}")

    def element(self, depth: int = 1) -> Element:
        """What stands behind <|open|>, up to the end of its closing tag."""
        element = Element(*_header(self.next()))
        if depth > DEEPEST:
            raise XtmlError(f"{element.tag} lies more than {DEEPEST} elements deep")
        self.expect(Marker.SEP)
        while True:
            item = self.next()
            if item is Marker.CLOSE:
                break
            if item is Marker.OPEN:
                element.content.append(self.element(depth + 1))
            elif isinstance(item, str):
                element.content.append(item)
            else:
                raise XtmlError(f"{_shown(item)} inside {element.tag}")
        tag = self.next()
        if tag != element.tag:
            raise XtmlError(f"{element.tag} is closed as {_shown(tag)}")
        self.expect(Marker.SEP)
        return element


def _header(item: Any) -> tuple[str, dict[str, str]]:
    matched = HEADER.fullmatch(item) if isinstance(item, str) else None
    if matched is None:
        raise XtmlError(f"{_shown(item)} is no tag with attributes")
    pairs = ATTRIBUTE.findall(matched[2])
    attributes = {key: ENTITY.sub(lambda m: '"' if m[1] == "quot" else "&", value) for key, value in pairs}
    if len(attributes) < len(pairs):
        raise XtmlError(f"{_shown(item)} names an attribute twice")
    return matched[1], attributes


def _shown(item: Marker | str) -> str:
    return item.value if isinstance(item, Marker) else f"{item!r:.40}"


def shown(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """`ids` as text for people, structural tokens by name."""
    structure = chat_structure(tokenizer)
    names = dict(zip(structure[:4], Marker, strict=True))
    parts: list[str] = []
    held: list[int] = []
    for number in [*ids, structure.end]:
        if number in names:
            parts += [tokenizer.decode(held), names[number].value]
            held = []
        else:
            held.append(number)
    return "".join(parts[:-1])
