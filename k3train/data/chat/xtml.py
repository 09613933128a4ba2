"""Chats as XTML: markup whose brackets are tokens of their own, which no text can give.

An element is `<|open|>tag key="value"<|sep|> ... <|close|>tag<|sep|>`; `<|end_of_msg|>` stands behind a
message. A chat is the declaration of its tools, the level of effort, the messages, and options for the next
answer. An assistant's message has the channels think (always, in a chat with thoughts), response and tools.
Structure and text stay apart until each part has its ids: once they are one string, nobody can tell them
apart.

The format, sentences included, is Kimi K3's, so that a released model reads what it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .messages import JSON, Chat, Image, Message, Part, ToolCall

TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown "
    "code blocks (```json) or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n"


class Marker(Enum):
    """A structural token, in the order of `tokenizer.Structure`."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END = "<|end_of_msg|>"


@dataclass(frozen=True)
class Span:
    """A structural token, a text that is encoded by itself, or an image; whether it enters the loss."""

    content: Marker | str | Image
    trained: bool = False


def render(chat: Chat) -> list[Span]:
    """The whole chat. Trained are assistants' messages behind what a prompt for them would end with."""
    writer = _Writer()
    _options(writer, chat)
    last = max((i for i, message in enumerate(chat.messages) if message.role == "assistant"), default=None)
    for index, message in enumerate(chat.messages):
        if index == last:
            _next_options(writer, chat)
        _message(writer, message, chat.thinking)
    return writer.spans


def prompt(chat: Chat) -> list[Span]:
    """The chat up to where an assistant goes on: in its thoughts, or in its response where it has none."""
    writer = _Writer()
    _options(writer, chat)
    for message in chat.messages:
        _message(writer, message, chat.thinking)
    _next_options(writer, chat)
    _answer_start(writer, None, chat.thinking)
    return [Span(span.content) for span in writer.spans]


def as_text(spans: Sequence[Span]) -> str:
    """For people: structural tokens by name, images by path."""
    return "".join(
        span.content.value if isinstance(span.content, Marker) else f"<{span.content.path}>"
        if isinstance(span.content, Image) else span.content
        for span in spans
    )  # fmt: skip


def json_type(value: JSON) -> str:
    """The name of a JSON type, as an argument carries it."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    kinds = {str: "string", int: "number", float: "number", dict: "object"}
    return kinds.get(type(value), "array")


class _Writer:
    """Collects spans. `trained` holds for what is written while it is set."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.trained = False

    def put(self, content: Marker | Part) -> None:
        if content != "":
            self.spans.append(Span(content, self.trained))

    def open(self, tag: str, **attributes: str | int | None) -> None:
        """Tag, key, quotes and value are encoded one by one, as in the released renderer."""
        self.put(Marker.OPEN)
        self.put(tag)
        for key, value in attributes.items():
            if value is not None:
                escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
                for text in (f" {key}", '="', escaped, '"'):
                    self.put(text)
        self.put(Marker.SEP)

    def close(self, tag: str) -> None:
        for content in (Marker.CLOSE, tag, Marker.SEP):
            self.put(content)

    def system(self, kind: str, text: str) -> None:
        self.open("message", role="system", type=kind)
        self.put(text)
        self.end()

    def end(self) -> None:
        self.close("message")
        self.put(Marker.END)


def _options(writer: _Writer, chat: Chat) -> None:
    if chat.tools:
        writer.system("tool-declare", TOOLS + _fenced(list(chat.tools)))
    if chat.thinking and chat.effort:
        writer.system("thinking-effort", EFFORT.format(chat.effort))


def _next_options(writer: _Writer, chat: Chat) -> None:
    if chat.tool_choice in TOOL_CHOICE:
        writer.system("tool-choice", TOOL_CHOICE[chat.tool_choice])
    if chat.response_format in ("json_object", "json_schema"):
        text = RESPONSE_FORMAT.format(chat.response_format)
        schema = SCHEMA + _fenced(chat.response_schema) if chat.response_format == "json_schema" else ""
        writer.system("response-format", text + schema)


def _message(writer: _Writer, message: Message, thinking: bool) -> None:
    if message.role == "assistant":
        _assistant(writer, message, thinking)
        return
    if message.tools:
        writer.system("tool-declare", MORE_TOOLS + _fenced(list(message.tools)))
        if not message.parts:
            return
    tool, index = message.answers or (None, None)
    writer.open("message", role=message.role, name=message.name, tool=tool, index=index)
    for part in message.parts:
        writer.put(part)
    writer.end()


def _answer_start(writer: _Writer, name: str | None, thinking: bool) -> None:
    writer.open("message", role="assistant", name=name)
    writer.open("think" if thinking else "response")


def _assistant(writer: _Writer, message: Message, thinking: bool) -> None:
    _answer_start(writer, message.name, thinking)
    writer.trained = message.trained
    if thinking:
        writer.put(message.reasoning if message.reasoning.strip() else "")
        writer.close("think")
        writer.open("response")
    for part in message.parts:
        writer.put(part)
    writer.close("response")
    if message.calls:
        writer.open("tools")
        for index, call in enumerate(message.calls, start=1):
            _call(writer, call, index)
        writer.close("tools")
    writer.end()
    writer.trained = False


def _call(writer: _Writer, call: ToolCall, index: int) -> None:
    writer.open("call", tool=call.tool, index=index)
    if call.raw is not None:
        trained, writer.trained = writer.trained, False
        writer.open("json", type="object")
        writer.put(call.raw)
        writer.close("json")
        writer.trained = trained
    for key, value in call.arguments.items():
        writer.open("argument", key=key, type=json_type(value))
        written = call.literals.get(key) or json.dumps(value, ensure_ascii=False)
        writer.put(value if isinstance(value, str) else written)
        writer.close("argument")
    writer.close("call")


def _fenced(value: JSON) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"```json\n{text}\n```"
