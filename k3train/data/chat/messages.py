"""Chats in the common JSON form, checked key by key.

A record is `{"messages": [...], "tools": [...]}`. A message has a `role` (system, user, assistant, tool)
and a `content`: a string, null, or a list of `{"type": "text", "text": ..}` and `{"type": "image",
"image": path}` (`image_url` with a path likewise). An assistant may have `reasoning_content` and
`tool_calls`; `weight` 0 takes its message out of the loss. Of the chat itself `thinking_effort`, `thinking`,
`tool_choice` and `response_format` are read. Other keys are a data set's own and mean nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from ...errors import UserError

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high", "max")
TOOL_CHOICES = ("auto", "required", "none")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
JSON = Any
"""What a JSON text holds."""


@dataclass(frozen=True)
class Image:
    """An image by the path that the chat names, relative to the chat's file."""

    path: str


Part = str | Image


@dataclass(frozen=True)
class ToolCall:
    """A call with its arguments, in their order; `raw` is JSON that is no object, and then there are none."""

    tool: str
    arguments: dict[str, JSON] = field(default_factory=dict)
    raw: str | None = None
    id: str | None = None
    literals: dict[str, str] = field(default_factory=dict, compare=False)
    """Arguments as they were written, where the chat has them as a string: 1e2 stays 1e2."""


@dataclass(frozen=True)
class Message:
    """One message. Parts in reading order; what only one role has is empty in the others."""

    role: str
    parts: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    trained: bool = True
    """Whether an assistant's message enters the loss."""
    tools: tuple[JSON, ...] = ()
    """Tools that a system message adds."""
    answers: tuple[str, int] | None = None
    """Of a tool's result: the tool, and the number of the call, from 1."""


@dataclass(frozen=True)
class Chat:
    """A conversation and the options it was held under."""

    messages: tuple[Message, ...]
    tools: tuple[JSON, ...] = ()
    thinking: bool = False
    """Whether assistants have a channel for thoughts, be it empty."""
    effort: str | None = None
    tool_choice: str | None = None
    response_format: str | None = None
    response_schema: JSON = None


def load_chat(line: bytes | str, where: str) -> Chat:
    """The chat in one line of JSON. `where` names it in errors.

    Raises:
        UserError: it is not JSON, or `parse_chat` refuses it.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    return parse_chat(record, where)


def parse_chat(record: JSON, where: str) -> Chat:
    """The chat of a record.

    Raises:
        UserError: a key is missing or holds what it should not; tool results fit no call.
    """
    if not isinstance(record, dict):
        _refuse(where, "the line", record, "expected an object with `messages`")
    if not isinstance(record.get("messages"), list) or not record["messages"]:
        keys = ", ".join(list(record)[:8]) or "none"
        raise UserError(f"{where}: no list of `messages`; its keys: {keys}")
    entries = [_message(entry, where, f"messages[{i}]") for i, entry in enumerate(record["messages"])]
    messages = _with_results(entries, where)
    effort = _choice(record.get("thinking_effort"), where, "thinking_effort", EFFORTS)
    thinking = record.get("thinking", effort is not None or any(entry.reasoning for entry in messages))
    if not isinstance(thinking, bool):
        _refuse(where, "thinking", thinking, "expected true or false")
    format_name, schema = _response_format(record.get("response_format"), where)
    return Chat(
        messages=tuple(messages),
        tools=_tools(record.get("tools"), where, "tools"),
        thinking=thinking,
        effort=effort,
        tool_choice=_choice(record.get("tool_choice"), where, "tool_choice", TOOL_CHOICES),
        response_format=format_name,
        response_schema=schema,
    )


@dataclass(frozen=True)
class _Entry:
    """A message before its tool results are matched with calls."""

    message: Message
    place: str
    call_id: str | None

    @property
    def reasoning(self) -> str:
        return self.message.reasoning


def _message(entry: JSON, where: str, place: str) -> _Entry:
    if not isinstance(entry, dict):
        _refuse(where, place, entry, "expected an object")
    role = _choice("system" if entry.get("role") == "developer" else entry.get("role", ""), where,
                   f"{place}.role", ROLES)  # fmt: skip
    assert role is not None
    assistant = role == "assistant"
    weight = entry.get("weight", 1)
    if weight not in (0, 1):
        _refuse(where, f"{place}.weight", weight, "valid are 0 and 1")
    calls = _calls(entry.get("tool_calls"), where, f"{place}.tool_calls")
    if calls and not assistant:
        _refuse(where, f"{place}.tool_calls", role, "only an assistant calls tools")
    message = Message(
        role=role,
        parts=_parts(entry.get("content"), where, f"{place}.content"),
        name=_text(entry.get("name"), where, f"{place}.name"),
        reasoning=_text(_first(entry, "reasoning_content", "reasoning"), where, f"{place}.reasoning_content")
        or "",
        calls=calls,
        trained=bool(weight),
        tools=_tools(entry.get("tools"), where, f"{place}.tools") if role == "system" else (),
    )
    return _Entry(message, place, _text(entry.get("tool_call_id"), where, f"{place}.tool_call_id"))


def _parts(content: JSON, where: str, place: str) -> tuple[Part, ...]:
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (_checked(content, where, place),)
    if not isinstance(content, list):
        _refuse(where, place, content, "expected a string or a list of parts")
    return tuple(_part(part, where, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: JSON, where: str, place: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return _checked(part["text"], where, place)
    if kind not in ("image", "image_url"):
        _refuse(where, place, part, "expected a part of type text, image or image_url")
    named = _first(part, "image", "image_url", "path")
    named = named.get("url") if isinstance(named, dict) else named
    if not isinstance(named, str) or not named:
        _refuse(where, place, part, "expected the path of an image")
    if "://" in named or named.startswith("data:"):
        _refuse(where, place, named, "images are named by path, relative to the file of the chats")
    return Image(_checked(named, where, place))


def _calls(calls: JSON, where: str, place: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        _refuse(where, place, calls, "expected a list")
    return tuple(_call(call, where, f"{place}[{i}]") for i, call in enumerate(calls))


def _call(call: JSON, where: str, place: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        _refuse(where, place, call, "expected `function` with a `name` and `arguments`")
    tool = _checked(function["name"], where, f"{place}.function.name")
    identity = _text(call.get("id"), where, f"{place}.id")
    given, literals = function.get("arguments", {}), {}
    if isinstance(given, str):
        text = given.strip() or "{}"
        try:
            given = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: {place}.function.arguments is not valid JSON: {error}") from error
        if not isinstance(given, dict):
            return ToolCall(tool, raw=text, id=identity)
        literals = _literals(text)
    if not isinstance(given, dict):
        _refuse(where, f"{place}.function.arguments", given, "expected an object, or one as a string of JSON")
    _checked(json.dumps(given, ensure_ascii=False), where, f"{place}.function.arguments")
    return ToolCall(tool, given, id=identity, literals=literals)


def _literals(text: str) -> dict[str, str]:
    """The values of a valid JSON object as they are written, by key."""
    decoder, found = json.JSONDecoder(), {}
    place = text.index("{") + 1
    while (place := _behind_spaces(text, place, ",")) < len(text) - 1 and text[place] != "}":
        key, place = decoder.raw_decode(text, place)
        start = _behind_spaces(text, place, ":")
        _, place = decoder.raw_decode(text, start)
        found[key] = text[start:place]
    return found


def _behind_spaces(text: str, place: int, mark: str) -> int:
    while text[place] in f" \t\r\n{mark}":
        place += 1
    return place


def _with_results(entries: Sequence[_Entry], where: str) -> list[Message]:
    """The messages, with every run of tool results matched with the calls before it, in their order."""
    messages: list[Message] = []
    results: list[tuple[int, Message]] = []
    calls: tuple[ToolCall, ...] = ()
    for entry in entries:
        if entry.message.role == "tool":
            results.append(_result(entry, calls, [number for number, _ in results], where))
            continue
        messages += [message for _, message in sorted(results, key=lambda result: result[0])]
        results, calls = [], entry.message.calls
        messages.append(entry.message)
    return messages + [message for _, message in sorted(results, key=lambda result: result[0])]


def _result(entry: _Entry, calls: Sequence[ToolCall], taken: list[int], where: str) -> tuple[int, Message]:
    """Which call, from 1, a tool's message answers, and the message that says so."""
    number = len(taken) + 1
    if entry.call_id is not None and any(call.id is not None for call in calls):
        found = [i for i, call in enumerate(calls, start=1) if call.id == entry.call_id]
        if not found:
            _refuse(where, f"{entry.place}.tool_call_id", entry.call_id, "no call before it has this id")
        number = found[0]
    if number in taken:
        _refuse(where, entry.place, entry.call_id, "this call has a result already")
    if number > len(calls) and entry.message.name is None:
        _refuse(where, entry.place, "tool", "a result needs a call before it, or a `name`")
    tool = calls[number - 1].tool if number <= len(calls) else entry.message.name
    assert tool is not None
    return number, replace(entry.message, name=None, answers=(tool, number))


def _tools(tools: JSON, where: str, place: str) -> tuple[JSON, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _refuse(where, place, tools, "expected a list of objects")
    _checked(json.dumps(tools, ensure_ascii=False), where, place)
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _response_format(given: JSON, where: str) -> tuple[str | None, JSON]:
    name = given.get("type") if isinstance(given, dict) else given
    name = _choice(name, where, "response_format", RESPONSE_FORMATS)
    if name != "json_schema":
        return name, None
    schema = given.get("json_schema") if isinstance(given, dict) else None
    schema = schema.get("schema", schema) if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        _refuse(where, "response_format", given, "json_schema needs an object `json_schema`")
    return name, schema


def _choice(value: JSON, where: str, place: str, valid: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    if value not in valid:
        _refuse(where, place, value, f"valid are {', '.join(valid)}")
    return str(value)


def _text(value: JSON, where: str, place: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        _refuse(where, place, value, "expected a string")
    return _checked(value, where, place)


def _checked(text: str, where: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {place} holds half a surrogate pair (character {error.start + 1})"
        ) from error
    return text


def _first(entry: dict[str, JSON], *keys: str) -> JSON:
    return next((entry[key] for key in keys if entry.get(key) is not None), None)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(where: str, place: str, value: JSON, reason: str) -> NoReturn:
    raise UserError(f"{where}: {place}={value!r:.60}: {reason}")
