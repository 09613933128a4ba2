"""Samples of chats: what is learnt, where documents end, what is cut, dropped, skipped and counted."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3train.config import Config
from k3train.data.chat import exercises, windows
from k3train.data.chat.source import ALL, TRAIN, VALID, ChatFiles, find_chats
from k3train.data.chat.spans import ChatEncoder
from k3train.data.chat.windows import build_chats
from k3train.data.datasets import Samples
from k3train.data.loader import BatchLoader
from k3train.data.multimodal import build_encoder
from k3train.data.skips import Skips
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError
from k3train.ops.packing import Packing
from tests.unit.data.pictures import encoded, noise, plain

BYTE = ByteTokenizer()
END = BYTE.structure.end


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K3TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def record(question: str = "?", answer: str = "!", **options: Any) -> dict[str, Any]:
    user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return {"messages": [user, assistant], **options}


def written(folder: Path, records: list[Any], name: str = "chats.jsonl") -> str:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in records]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def config(*paths: str, length: int = 256, **keys: Any) -> Config:
    made = Config()
    made.data.source, made.data.sequence_length = "chat", length
    made.data.path, made.data.valid_path = list(paths), list(paths)
    for key, value in keys.items():
        setattr(made.data, key, value)
    return made


def built(made: Config, skips: Skips | None = None, said: list[str] | None = None) -> tuple[Samples, Samples]:
    skips = skips or Skips(lambda _: None)
    images = build_encoder(made.data, made.vision, BYTE, skips) if made.vision.enabled else None
    say = (said if said is not None else []).append
    return build_chats(made.data, BYTE, images, skips, 7, 100, 100, say)


def answers(sample: dict[str, Any]) -> list[str]:
    """What a sample teaches, answer by answer."""
    labels = sample["labels"][sample["loss_mask"] > 0].tolist()
    found = []
    while labels:
        place = labels.index(END)
        found.append(BYTE.decode(labels[:place]))
        labels = labels[place + 1 :]
    return found


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_a_sample_holds_whole_chats_with_borders(tmp_path: Path) -> None:
    path = written(tmp_path, [record(f"q{i}", f"a{i}") for i in range(40)])
    train, valid = built(config(path))
    seen: Counter[str] = Counter()
    epoch = train.blend
    first = train[0]
    for index in range(epoch.windows):
        sample = train[index]
        tokens = torch.from_numpy(sample["tokens"])[None]
        documents = Packing.from_tokens(tokens, BYTE.eod_id).document_ids[0]
        ends = np.flatnonzero(sample["tokens"] == BYTE.eod_id)
        taught = answers(sample)
        assert len(ends) == len(taught) >= 2 and sample["sample_id"] == index
        # A label that is learnt belongs to the document of the token that predicts it.
        learnt = np.flatnonzero(sample["loss_mask"])
        assert (documents[learnt] == documents[learnt + 1]).all()
        assert (sample["labels"][:-1] == sample["tokens"][1:]).all()
        padding = sample["tokens"][ends[-1] + 1 :]
        assert (padding == BYTE.pad_id).all() and not sample["loss_mask"][ends[-1] :].any()
        seen.update(taught)
    assert seen == {f"a{i}responsemessage": 1 for i in range(40)}
    assert alike(first, built(config(path))[0][0]) and not np.array_equal(first["tokens"], valid[0]["tokens"])


def test_another_epoch_another_order_and_any_place_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, [record("q" * (i % 30), f"a{i}") for i in range(30)])
    straight = [built(config(path))[0][index] for index in range(25)]
    train, _ = built(config(path))
    assert alike(train[0], straight[0]) and train.blend.windows < 20
    for index in (24, 3, 0, 13):
        assert alike(train[index], straight[index])
    assert not np.array_equal(straight[0]["tokens"], straight[train.blend.windows]["tokens"])


def test_the_loader_resumes_in_the_middle(tmp_path: Path) -> None:
    path = written(tmp_path, [record(f"q{i}", f"a{i}") for i in range(30)])

    def loader() -> BatchLoader:
        return BatchLoader(
            built(config(path))[0],
            micro_batch_size=1,
            num_microbatches=2,
            data_parallel_rank=1,
            data_parallel_size=2,
        )

    straight = list(islice(loader(), 8))
    later = loader()
    later.load_state_dict({"consumed_samples": 12, "microbatch": 0})
    for ours, theirs in zip(islice(later, 2), straight[6:], strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("overlong", ["cut", "drop"])
def test_overlong_chats_are_cut_or_dropped_and_counted(tmp_path: Path, overlong: str) -> None:
    records = [record("short"), record("long", "x" * 500), record("y" * 500, "never seen")]
    said: list[str] = []
    skips = Skips(lambda _: None)
    train, _ = built(config(written(tmp_path, records), overlong=overlong), skips, said)
    # 256 tokens hold a part of the second chat's answer and nothing of the third's.
    assert skips.counts == {"too long": 1 if overlong == "cut" else 2}
    assert ("1 cut at data.sequence_length=256" in said[0]) == (overlong == "cut")
    assert f"left out {skips.total}" in said[0] and "line 3" in said[0] + str(skips.entries())
    longest = max((train[i] for i in range(2)), key=lambda sample: sample["loss_mask"].sum())
    if overlong == "cut":
        assert longest["tokens"][-1] == BYTE.eod_id and (longest["tokens"] == ord("x")).sum() > 150
        assert not longest["loss_mask"][-2:].any() and longest["loss_mask"][-3] == 1
    else:
        assert answers(longest) == ["!responsemessage"]


def test_malformed_lines_stop_a_run_or_are_counted(tmp_path: Path) -> None:
    bad = ["{broken", record(), {"messages": [{"role": "bot"}]}, "", record("again")]
    path = written(tmp_path, bad)
    with pytest.raises(UserError, match=r"chats.jsonl, line 1: not valid JSON.*data.malformed=skip leaves"):
        built(config(path))
    for _ in range(2):  # the second time from the cache
        warnings: list[str] = []
        skips = Skips(warnings.append)
        train, _ = built(config(path, malformed="skip"), skips)
        assert skips.counts == {"malformed": 2} and len(warnings) == 1
        assert [name.partition(":")[0][-6:] for _, name in skips.entries()] == ["line 1", "line 3"]
        assert answers(train[0]) == ["!responsemessage"] * 2
    with pytest.raises(UserError, match="holds no chat that can be used .*malformed"):
        built(config(written(tmp_path, bad[:1]), malformed="skip"))


def test_a_chat_without_an_answer_teaches_nothing(tmp_path: Path) -> None:
    skips = Skips(lambda _: None)
    asked = {"messages": [{"role": "user", "content": "?"}]}
    unweighted = record()
    unweighted["messages"][1]["weight"] = 0
    train, _ = built(config(written(tmp_path, [asked, unweighted, record()])), skips)
    assert skips.counts == {"nothing to learn": 2} and answers(train[0]) == ["!responsemessage"]


def test_the_split_follows_the_text_of_a_line(tmp_path: Path) -> None:
    path = Path(written(tmp_path, [record(f"q{i}") for i in range(400)]))
    twice = Path(written(tmp_path, [record(f"q{i % 400}") for i in range(800)], "twice.jsonl"))

    def questions(source: ChatFiles) -> list[Any]:
        return [source.read(i).messages[0].parts[0] for i in range(len(source))]

    train, valid = (questions(ChatFiles([path], split, 0.1)) for split in (TRAIN, VALID))
    assert len(train) + len(valid) == 400 and 20 < len(valid) < 60 and not set(train) & set(valid)
    assert questions(ChatFiles([twice], VALID, 0.1)) == valid * 2
    both = ChatFiles([path, twice], ALL)
    assert len(both) == 1200 and both.where(400) == f"{twice}, line 1" and both.folder(0) == tmp_path
    with pytest.raises(UserError, match=r"no chat to validate on with data.held_out=0; set another share"):
        ChatFiles([path], VALID, 0.0)
    few = Path(written(tmp_path, [record(f"q{i % 5}") for i in range(10)], "few.jsonl"))
    train, valid = (questions(ChatFiles([few], split, 1e-9)) for split in (TRAIN, VALID))
    assert len(set(valid)) == 1 and len(valid) == 2 and len(train) == 8, "of a few chats one, with its copies"
    same = Path(written(tmp_path, [record()] * 3, "same.jsonl"))
    with pytest.raises(UserError, match=r"no chat to learn from with data.held_out=1e-09"):
        ChatFiles([same], TRAIN, 1e-9)


def test_inputs_are_plain_json_lines(tmp_path: Path) -> None:
    written(tmp_path, [record()])
    assert find_chats([str(tmp_path)], "data.path", None) == [tmp_path / "chats.jsonl"]
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="data.path: .*a.txt: chats are read from plain .jsonl"):
        find_chats([str(tmp_path / "a.txt")], "data.path", None)
    with pytest.raises(UserError, match="data.path is empty; name .jsonl files of chats, or exercises"):
        find_chats([], "data.path", None)


def test_exercises_are_the_same_everywhere(tmp_path: Path) -> None:
    (path,) = find_chats([exercises.NAME], "data.path", str(tmp_path))
    again = tmp_path / "again.jsonl"
    exercises.write(again, 50)
    assert path.read_text().startswith(again.read_text())
    lines = path.read_text().splitlines()
    assert len(lines) == exercises.COUNT
    assert json.loads(lines[0])["messages"] == [
        {"role": "user", "content": "42+44?"},
        {"role": "assistant", "content": "86"},
    ]


def test_chats_see_images(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(encoded(plain(56, 28)))
    parts = [
        {"type": "text", "text": "what "},
        {"type": "image", "image": "red.png"},
        {"type": "text", "text": "?"},
    ]
    path = written(tmp_path, [record(parts, "red"), record("2+2?", "4")])
    made = config(path)
    with pytest.raises(UserError, match=r"line 1 has an image, and there is no tower.*add vision=tiny"):
        built(made)
    made.vision.enabled, made.data.max_patches = True, 64
    sample = built(made)[0][0]
    assert sample["grids"].tolist() == [[1, 2, 4]] and sample["patches"].shape == (8, 588)
    assert (sample["tokens"][sample["image_positions"]] == BYTE.image_id).all()
    assert len(sample["image_positions"]) == 2
    assert sorted(answers(sample)) == ["4responsemessage", "redresponsemessage"]
    text = built(config(written(tmp_path, [record()], "text.jsonl")))[0][0]
    assert "patches" not in text


def test_images_that_cannot_be_used_take_their_chat_with_them(tmp_path: Path) -> None:
    def seen(name: str) -> dict[str, Any]:
        return record([{"type": "image", "image": name}], name)

    (tmp_path / "a.png").write_bytes(encoded(plain()))
    (tmp_path / "b.png").write_bytes(encoded(noise(56, 56)))
    (tmp_path / "wide.png").write_bytes(encoded(plain(280, 140)))
    made = config(written(tmp_path, [seen(n) for n in ("a.png", "b.png", "no.png", "../a.png", "wide.png")]))
    made.vision.enabled, made.data.max_patches = True, 64
    made.data.max_patches = 2048
    limits = windows.ChatLimits(256, 64)
    skips = Skips(lambda _: None)
    encoder = ChatEncoder(BYTE, build_encoder(made.data, made.vision, BYTE, skips))
    source = ChatFiles([tmp_path / "chats.jsonl"])
    packed = windows.ChatWindows(
        source, encoder, windows.measure(source, encoder, limits), limits, skips, None
    )
    assert skips.counts == {
        "missing": 1,
        "an image that cannot be used": 2,
        "outside the folder": 1,
        "more patches than data.max_patches": 1,
    }
    assert answers(packed[0]) == ["a.pngresponsemessage", "b.pngresponsemessage"]
    content = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(content[: len(content) // 2])
    sample = packed[0]
    # What was packed behind the damaged image has moved up, and nothing else.
    assert answers(sample) == ["a.pngresponsemessage"] and len(sample["grids"]) == 1
    assert (sample["tokens"] == BYTE.image_id).sum() == len(sample["image_positions"]) == 1


def test_a_file_that_changes_under_a_run_leaves_padding(tmp_path: Path) -> None:
    path = written(tmp_path, [record("a"), record("b")])
    skips = Skips(lambda _: None)
    train, _ = built(config(path), skips)
    content = Path(path).read_text()
    Path(path).write_text(content.replace('"b"', '"B"').replace('"!"', "xxx", 1))
    assert answers(train[0]) == ["!responsemessage"]
    assert skips.counts == {"changed since it was measured": 1}
    Path(path).write_text("x" * len(content))
    with pytest.raises(UserError, match="none of 100 samples is usable"):
        train[0]
