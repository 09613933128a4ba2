"""Chats in the forms that data sets have, and one line for each thing that is wrong in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k3train.data.chat.messages import Image, load_chat, parse_chat
from k3train.data.chat.xtml import as_text, render
from k3train.errors import UserError

CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1, "y": "2"}'}}
OTHER = {"id": "b", "function": {"name": "sub", "arguments": {}}}


def asked(*more: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, *more], **options}


def test_parts_roles_and_options() -> None:
    parts = [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "b.png"}},
    ]
    chat = parse_chat(
        asked(
            {"role": "developer", "content": "be brief", "tools": [{"name": "f"}]},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "weight": 0},
            thinking_effort="medium",
            tool_choice="required",
            response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            source="a key of the data set",
        ),
        "line",
    )
    assert [message.role for message in chat.messages] == ["user", "system", "user", "assistant"]
    assert chat.messages[1].tools == ({"type": "function", "function": {"name": "f"}},)
    assert chat.messages[2].parts == ("see ", Image("a.png"), Image("b.png"))
    assert (chat.messages[3].reasoning, chat.messages[3].trained) == ("hm", False)
    assert (chat.thinking, chat.effort, chat.tool_choice) == (True, "medium", "required")
    assert (chat.response_format, chat.response_schema) == ("json_schema", {"type": "object"})
    assert not parse_chat(asked(), "line").thinking
    assert parse_chat(asked({"role": "assistant", "reasoning": "r", "content": "x"}), "line").thinking


def test_results_follow_the_order_of_the_calls() -> None:
    chat = parse_chat(
        asked(
            {"role": "assistant", "tool_calls": [CALL, OTHER]},
            {"role": "tool", "tool_call_id": "b", "content": "second"},
            {"role": "tool", "tool_call_id": "a", "content": "first"},
            {"role": "tool", "name": "add", "content": "unasked"},
        ),
        "line",
    )
    assert chat.messages[1].calls[0].arguments == {"x": 1, "y": "2"}
    assert [(message.parts, message.answers) for message in chat.messages[2:]] == [
        (("first",), ("add", 1)),
        (("second",), ("sub", 2)),
        (("unasked",), ("add", 3)),
    ]
    by_place = parse_chat(
        asked({"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}), "line"
    )
    assert by_place.messages[-1].answers == ("add", 1)


def test_arguments_that_are_no_object_are_kept_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "[1, 2.50]"}}
    (kept,) = parse_chat(asked({"role": "assistant", "tool_calls": [call]}), "line").messages[1].calls
    assert (kept.raw, kept.arguments) == ("[1, 2.50]", {})


@pytest.mark.parametrize(
    ("text", "literals"),
    [
        ("", {}),
        (" {} ", {}),
        (
            '{"a": 1e2, "b":{"c" :[1,  2]} ,"d": "x\\"}, {"}',
            {"a": "1e2", "b": '{"c" :[1,  2]}', "d": '"x\\"}, {"'},
        ),
        ('{\n "a" : null\n}', {"a": "null"}),
        ('{"a": 1, "a": 2.50}', {"a": "2.50"}),
    ],
)
def test_arguments_are_kept_as_they_were_written(text: str, literals: dict[str, str]) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    (kept,) = parse_chat(asked({"role": "assistant", "tool_calls": [call]}), "line").messages[1].calls
    assert kept.literals == literals and kept.arguments == json.loads(text or "{}")
    whole = as_text(render(parse_chat(asked({"role": "assistant", "tool_calls": [call]}), "line")))
    assert all(f">{kept.literals[key]}<" in whole for key in literals if key != "d")


def called(arguments: Any) -> dict[str, Any]:
    return asked({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], r"the line=\[\]: expected an object"),
        ({"conversations": [], "id": 1}, "no list of `messages`; its keys: conversations, id"),
        ({"messages": []}, "no list of `messages`"),
        ({"messages": ["hi"]}, r"messages\[0\]='hi'"),
        ({"messages": [{"role": "bot"}]}, r"messages\[0\].role='bot': valid are system, user"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role=''"),
        (asked({"role": "user", "content": 3}), r"messages\[1\].content=3"),
        (asked({"role": "user", "content": [{"type": "audio"}]}), r"content\[0\].*text, image or image_url"),
        (asked({"role": "user", "content": [{"type": "image"}]}), "expected the path of an image"),
        (asked({"role": "user", "content": [{"type": "image", "image": "http://x/a.png"}]}), "named by path"),
        (asked({"role": "user", "content": "\ud800"}), "half a surrogate pair"),
        (asked({"role": "user", "tool_calls": [CALL]}), "only an assistant calls tools"),
        (asked({"role": "assistant", "weight": 0.5}), "weight=0.5: valid are 0 and 1"),
        (asked({"role": "assistant", "tool_calls": [{}]}), r"tool_calls\[0\].*`function` with a `name`"),
        (called("{'a': 1}"), "function.arguments is not valid JSON"),
        (called('{"a": NaN}'), "NaN is no JSON number"),
        (called(3), "function.arguments=3: expected an object"),
        (asked({"role": "tool", "content": "1"}), "a result needs a call before it"),
        (
            asked({"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "z"}),
            "tool_call_id='z': no call before it has this id",
        ),
        (
            asked(
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a"},
                {"role": "tool", "tool_call_id": "a"},
            ),
            r"messages\[3\].*has a result already",
        ),
        (asked(thinking_effort="huge"), "thinking_effort='huge': valid are low, medium, high, max"),
        (asked(thinking="yes"), "thinking='yes': expected true or false"),
        (asked(tools=[1]), r"tools=\[1\]: expected a list of objects"),
        (asked(tool_choice="f"), "valid are auto, required, none"),
        (asked(response_format={"type": "json_schema"}), "needs an object `json_schema`"),
    ],
)
def test_what_is_wrong_is_named(record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        parse_chat(record, "a.jsonl, line 7")
    assert str(refused.value).startswith("a.jsonl, line 7: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("line", [b'{"messages": [', b"\xff\xfe", b"[" * 100_000])
def test_a_line_that_is_no_json_is_refused(line: bytes) -> None:
    with pytest.raises(UserError, match="a.jsonl, line 7: not valid JSON"):
        load_chat(line, "a.jsonl, line 7")


def test_a_line_of_json_is_a_chat() -> None:
    assert load_chat(json.dumps(asked()).encode(), "line") == parse_chat(asked(), "line")
