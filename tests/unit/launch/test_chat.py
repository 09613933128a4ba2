"""`data show` and `sample chat=`, as a person types them."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from k3train.data.chat.messages import Message, ToolCall
from k3train.data.show import marked
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError
from launch import cli, data, sample
from launch.compose import compose

BYTE = ByteTokenizer()


@pytest.fixture
def chats(tmp_path: Path) -> str:
    user, assistant = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
    lines = [json.dumps({"messages": [user, assistant]}), "{", json.dumps({"messages": [user]})]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return f"{tmp_path}/chats.jsonl"


def test_show_brackets_what_is_learnt(chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [
        f"data.path={chats}",
        f"data.valid_path={chats}",
        f"data.cache_dir={tmp_path}",
        "data.malformed=skip",
    ]
    assert data.main(["show", "recipe=sft", *keys, "--count", "1", "data.sequence_length=128"]) == 0
    printed = capsys.readouterr().out
    assert "sample 0: 93 of 128 tokens, 21 learnt, 1 documents" in printed
    assert "⟦5<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>⟧<eod>" in printed
    assert "left out (malformed): " in printed and "chats.jsonl, line 2: not valid JSON" in printed
    assert f"left out (nothing to learn): {chats}, line 3" in printed


def test_show_of_text_shows_that_all_of_it_is_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"data.cache_dir={tmp_path}", "data.max_bytes=20000", "data.sequence_length=64"]
    assert data.main(["show", "recipe=tiny", *keys, "--first", "3", "--valid"]) == 0
    printed = capsys.readouterr().out
    assert "sample 3: 64 of 64 tokens, 63 learnt" in printed and "sample 4: " in printed
    assert "the samples of data.images are not shown" in printed


def test_colours_are_by_token() -> None:
    ids = [*BYTE.encode("ab"), BYTE.structure.open, BYTE.image_id, BYTE.image_id, BYTE.eod_id]
    text = marked(ids, [False, True, True, False, False, False], BYTE, colours=True)
    assert text.plain == "ab<|open|><image x 2><eod>\n"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("a", "dim"),
        ("b", "bold green"),
        ("<|open|>", "bold yellow"),
        ("<image x 2>", "dim yellow"),
        ("<eod>\n", "dim yellow"),
    ]
    console = Console(force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(text)
    assert "\x1b[1;32mb" in captured.get()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "--count", "0"], "data show: --count is at least 1"),
        (["show", "--colour"], "data show: .*--colour; see `k3train data show --help`"),
        (["show", "data=chat", "data.path=no.jsonl"], "no.jsonl does not exist"),
    ],
)
def test_show_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.main(arguments)


def test_a_single_name_is_a_list_of_one() -> None:
    assert compose(["data=chat", "data.path='my chats.jsonl'"]).data.path == ["my chats.jsonl"]
    assert compose(["data=chat", "data.path=[a,b]", "data.valid_path=c"]).data.valid_path == ["c"]
    assert compose(["recipe=tiny", "data=chat"]).data.images == []


def test_sample_asks_in_a_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("")
    asked = []
    found = types.SimpleNamespace(text="5<|close|>", message=None, problem="ends early")

    def answer(*arguments: object, **options: object) -> object:
        asked.append((arguments[1], options))
        return found

    monkeypatch.setitem(sys.modules, "k3train.sample", types.SimpleNamespace(answer=answer))
    assert sample.main([str(tmp_path), "chat=2+3?", "effort=low", "system=Be brief.", "tokens=9"]) == 0
    assert asked.pop() == (
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}],
            "thinking_effort": "low",
        },
        {"tokens": 9},
    )
    output = capsys.readouterr()
    assert (output.out, output.err) == ("5<|close|>\n", "k3train: this is no XTML: ends early\n")

    found.message = Message("assistant", ("five",), reasoning="hm", calls=(ToolCall("add", {"a": 2}),))
    assert sample.main([str(tmp_path), 'chat={"messages": [{"role": "user", "content": "a=b"}]}']) == 0
    assert asked.pop()[0] == {"messages": [{"role": "user", "content": "a=b"}]}
    assert capsys.readouterr().out == 'think: hm\nfive\ncall: add {"a": 2}\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], 'prompt is missing; for example prompt="def ", or chat="2+3?"'),
        (["prompt=a", "chat=b"], "prompt and chat are both given"),
        (["prompt=a", "effort=low"], "effort=low: goes with chat=TEXT"),
        (["chat={"], "chat: not valid JSON"),
    ],
)
def test_sample_refuses(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert cli.main(["sample", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_show_counts_a_document_whose_end_token_is_but_a_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"data.cache_dir={tmp_path}", "data.max_bytes=20000"]
    assert data.main(["show", "recipe=needle", *keys, "--count", "1"]) == 0
    assert "sample 0: 128 of 128 tokens, 10 learnt, 1 documents" in capsys.readouterr().out
