"""Corpora of long samples: the same whatever the workers, whole or not there, a line for each error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3train.data.cache import file_lock
from k3train.data.indexed import open_corpus
from k3train.data.long import longmix as module
from k3train.data.long.longmix import TASKS, longmix, read_samples, read_tasks
from k3train.data.long.mix import Mixture
from k3train.data.long.tasks import KINDS
from k3train.data.packed import PackedWindows
from k3train.data.prepare import PreparedInfo, read_info
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError
from launch.cli import main

TOKENIZER = ByteTokenizer()
LENGTH, SAMPLES = 2048, 12
MIXTURE = Mixture(LENGTH, KINDS, 4)

MakeCorpus = Callable[[str, Sequence[Sequence[int]]], str]


@pytest.fixture
def source(make_corpus: MakeCorpus) -> str:
    random = np.random.RandomState(0)
    sizes = range(50, 1500, 31)
    return make_corpus("source", [[*random.randint(97, 123, size), TOKENIZER.eod_id] for size in sizes])


def made(source: str, output: Path, **options: Any) -> PreparedInfo:
    given: dict[str, Any] = {"seed": 1, "workers": 1, "progress": False, "shard_tokens": 3 * LENGTH} | options
    mixture, samples = given.pop("mixture", MIXTURE), given.pop("samples", SAMPLES)
    return longmix([source], str(output), mixture, samples, **given)


def files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", TASKS)]


def test_a_corpus_is_the_same_whatever_the_workers(source: str, tmp_path: Path) -> None:
    info = made(source, tmp_path / "one")
    made(source, tmp_path / "two", workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert (info.documents, info.tokens) == (SAMPLES, SAMPLES * LENGTH)
    assert read_info(str(tmp_path / "one")) == info
    made(source, tmp_path / "other", seed=2)
    assert files(tmp_path / "one")[0] != files(tmp_path / "other")[0]
    assert not list(tmp_path.glob("*.parts"))


def test_a_window_of_that_length_is_a_sample(source: str, tmp_path: Path) -> None:
    made(source, tmp_path / "long")
    corpus = open_corpus(str(tmp_path / "long"))
    windows = PackedWindows(corpus, LENGTH, seed=0, vocab_size=TOKENIZER.vocab_size, pad_id=TOKENIZER.pad_id)
    found = {windows[index]["tokens"].tobytes() for index in range(windows.windows_per_epoch)}
    assert found <= {corpus.read(number).astype(np.int64).tobytes() for number in range(SAMPLES)}
    assert len(found) == SAMPLES - 1


def test_tasks_are_read_back_with_their_samples(source: str, tmp_path: Path) -> None:
    made(source, tmp_path / "long")
    samples = list(read_samples(str(tmp_path / "long"), TOKENIZER))
    assert len(samples) == SAMPLES
    tasks = [(sample, task) for sample in samples for task in sample.tasks]
    assert {task.kind for _, task in tasks} == set(KINDS)
    assert all(
        TOKENIZER.decode(sample.ids[slice(*task.answer)].tolist()) == task.text for sample, task in tasks
    )
    lines = (tmp_path / f"long{TASKS}").read_text().splitlines()
    assert [json.loads(line)["sample"] for line in lines] == sorted(
        json.loads(line)["sample"] for line in lines
    )


def test_a_killed_call_goes_on(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = module.build_part, []

    def failing(job: module.Job, shard: module.Shard, progress: Any) -> None:
        seen.append(shard.number)
        if shard.number == 2:
            raise KeyboardInterrupt
        real(job, shard, progress)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "build_part", failing)
        made(source, tmp_path / "long")
    assert not (tmp_path / "long.bin").exists() and not (tmp_path / f"long{TASKS}").exists()
    monkeypatch.setattr(module, "build_part", lambda *a: (seen.append(a[1].number), real(*a)))
    made(source, tmp_path / "long")
    assert seen == [0, 1, 2, 2, 3]
    made(source, tmp_path / "anew")
    assert files(tmp_path / "long") == files(tmp_path / "anew")


def test_the_same_call_again_keeps_what_is_there_and_another_is_refused(source: str, tmp_path: Path) -> None:
    info = made(source, tmp_path / "long")
    written = (tmp_path / "long.bin").stat().st_mtime_ns
    assert made(source, tmp_path / "long") == info
    assert (tmp_path / "long.bin").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="other inputs or settings; choose another prefix"):
        made(source, tmp_path / "long", seed=9)
    made(source, tmp_path / "long", seed=9, resume=False)


def test_texts_are_prepared_for_the_while(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number} " * 200}) + "\n" for number in range(40)))
    made(str(text), tmp_path / "long", mixture=Mixture(LENGTH, ("needle",), 2), samples=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "long.bin", "long.idx", "long.json", f"long{TASKS}", "text.jsonl"
    ]  # fmt: skip


def test_texts_are_prepared_where_nothing_else_stands(source: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 400)
    for suffix in (".bin", ".idx"):
        Path(f"{source}{suffix}").rename(tmp_path / f"long.texts{suffix}")
    (tmp_path / "long.texts.json").write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    made(str(tmp_path / "text.txt"), tmp_path / "long", samples=2)
    with pytest.raises(UserError, match="less than one sample"):
        made(str(tmp_path / "text.txt"), tmp_path / "other", mixture=Mixture(1 << 16, ("needle",), 2))
    with pytest.raises(UserError, match="nothing can be asked"):
        made(str(tmp_path / "text.txt"), tmp_path / "other", mixture=Mixture(LENGTH, ("source",), 2))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"long.bin", "long.idx", "long.json", f"long{TASKS}"}


@pytest.mark.parametrize("resume", [True, False])
def test_a_source_is_not_written_over(source: str, tmp_path: Path, resume: bool) -> None:
    before = Path(f"{source}.bin").read_bytes()
    with pytest.raises(UserError, match=r"source\.bin is a source and would be written over; choose another"):
        made(source, tmp_path / "x" / ".." / "source", resume=resume)
    (tmp_path / f"long{TASKS}").write_text('{"text": "mine"}\n')
    with pytest.raises(UserError, match=r"long\.tasks\.jsonl is a source"):
        made(str(tmp_path / f"long{TASKS}"), tmp_path / "long", resume=resume)
    assert Path(f"{source}.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "documents", "needs"),
    [
        ("continue", [[97, 98, TOKENIZER.eod_id]] * 2, "continue needs documents of at least 32 tokens"),
        ("source", [[*range(97, 123)] * 20] * 8, "source needs 48 tokens that one document alone has"),
    ],
)
def test_samples_that_ask_nothing_are_refused(
    kind: str, documents: list[list[int]], needs: str, make_corpus: MakeCorpus, tmp_path: Path
) -> None:
    mixture = Mixture(512, (kind,), 2)
    source = make_corpus("source", documents * (512 // sum(map(len, documents)) + 1))
    with pytest.raises(UserError, match=f"tasks={kind}: nothing can be asked of .*{needs}.* add needle to"):
        made(source, tmp_path / "long", mixture=mixture, samples=2)
    assert not [path for path in tmp_path.iterdir() if "long" in path.name]
    assert made(source, tmp_path / "long", mixture=Mixture(512, (kind, "needle"), 2)).documents == SAMPLES


def test_documents_without_text_are_passed_over_or_refused(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    end = TOKENIZER.eod_id
    empty = make_corpus("empty", [[end]] * 3000)
    with pytest.raises(UserError, match="empty: no documents to join that hold text"):
        made(empty, tmp_path / "long", samples=1)
    some = make_corpus("some", [[end]] * 3000 + [[97, end]])
    assert made(some, tmp_path / "long", mixture=Mixture(200, ("needle",), 1), samples=1).tokens == 200
    # Of a document that does not fit, its last token is never read.
    last = make_corpus("last", [[end] * 3000 + [97]])
    with pytest.raises(UserError, match="last: 1001 documents in a row hold no text"):
        made(last, tmp_path / "other", samples=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": 12}, "sample 12; the corpus has 0 to 11"),
        ({"sample": -1}, "sample -1; the corpus"),
        ({"sample": 0.5}, "sample 0.5; the corpus"),
        ({"evidence": []}, "no evidence"),
        ({"evidence": [[5, 4]]}, r"evidence \[5, 4\]; a \[start, stop\] within"),
        ({"question": 0}, "question 0; it begins behind token 0"),
        ({"answer": [2040, 2049]}, r"answer \[2040, 2049\]; a \[start, stop\] within 2048 tokens"),
        ({"answer": 3}, "answer 3; a "),
        ({"task": ["x"]}, "task .*; valid are needle"),
        ({"text": None}, "text None"),
        ("[1]", "not an object"),
        ('{"sample": 0}', "it has no task"),
        ("{", "Expecting property name"),
        ("\udcff", "can't decode"),
    ],
)
def test_a_line_that_is_no_task_is_refused(
    change: dict[str, Any] | str, message: str, source: str, tmp_path: Path
) -> None:
    made(source, tmp_path / "long")
    path = tmp_path / f"long{TASKS}"
    first, second, *_ = path.read_text().splitlines()
    second = change if isinstance(change, str) else json.dumps(json.loads(second) | change)
    path.write_text(f"{first}\n{second}\n", errors="surrogateescape")
    with pytest.raises(UserError, match=rf"long\.tasks\.jsonl, line 2: no task .* \(.*{message}") as caught:
        read_tasks(str(tmp_path / "long"))
    assert "\n" not in str(caught.value)


def test_tasks_that_are_none_or_of_another_corpus_are_refused(
    source: str, make_corpus: MakeCorpus, tmp_path: Path
) -> None:
    made(source, tmp_path / "long")
    lines = "".join(json.dumps(task.record(sample)) + "\n" for sample, task in read_tasks(f"{tmp_path}/long"))
    make_corpus("other", [[97] * (2048 + number) for number in range(SAMPLES)])
    (tmp_path / f"other{TASKS}").write_text(lines)
    with pytest.raises(UserError, match=r"line \d+: .*samples 0 and 1 are of different lengths"):
        read_tasks(f"{tmp_path}/other")
    (tmp_path / f"long{TASKS}").write_text("")
    with pytest.raises(UserError, match=r"long\.tasks\.jsonl is empty: its samples ask nothing"):
        read_tasks(f"{tmp_path}/long")
    with pytest.raises(UserError, match=r"nope\.tasks\.jsonl does not exist; `k3train data longmix` writes"):
        next(read_samples("nope", TOKENIZER))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixture": Mixture(100, KINDS, 4)}, "length 100 is too short: the tasks of a sample take"),
        ({"mixture": Mixture(1 << 20, KINDS, 4)}, "the sources hold .* tokens, less than one sample"),
        (
            {"mixture": Mixture(LENGTH, ("needle", "x"), 4)},
            "tasks=needle,x; valid are some of needle, needles",
        ),
        ({"mixture": Mixture(LENGTH, (), 4)}, "tasks=; valid are some of"),
        ({"mixture": Mixture(LENGTH, KINDS, 0)}, "questions=0; valid: 1 or more"),
        ({"mixture": Mixture(LENGTH, KINDS, 4, -1)}, "unasked=-1; valid: 0 or more"),
        ({"mixture": Mixture(LENGTH, KINDS, 4, wording="x")}, "wording=x; valid are sentence, compact"),
        (
            {"mixture": Mixture(LENGTH, ("needle", "needles"), 5, 3, "compact")},
            "questions=5, unasked=3: up to 17 codes in a sample, and wording=compact has 16; lower --unasked",
        ),
        ({"seed": -1}, r"seed=-1; valid: 0 to 2\*\*64 - 1"),
        ({"seed": 1 << 64}, "seed=18446744073709551616; valid"),
        ({"samples": 0}, "samples=0; valid: 1 or more"),
        ({"workers": 0}, "workers=0; valid: 1 or more"),
        ({"tokenizer": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_cannot_be_made_is_refused(
    options: dict[str, Any], message: str, source: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        made(source, tmp_path / "long", **options)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "long" in path.name]


def test_sources_that_are_not_there_hold_nothing_or_are_written_to_are_refused(
    source: str, make_corpus: MakeCorpus, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="nowhere"):
        made("nowhere", tmp_path / "long")
    with pytest.raises(UserError, match="is a folder"):
        made(source, tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="the inputs hold no text"):
        made(str(tmp_path / "empty.txt"), tmp_path / "long")
    (tmp_path / "busy.parts").mkdir()
    with file_lock(tmp_path / "busy.parts" / "lock"), pytest.raises(UserError, match="is in use"):
        made(source, tmp_path / "busy")


def test_the_command_says_what_it_made(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "long")
    given = ["--length", "2048", "--samples", "3", "--workers", "1", "--tasks", "needle,continue"]
    assert main(["data", "longmix", source, "--output", prefix, *given]) == 0
    said = capsys.readouterr().out
    assert "3 documents, 6,144 tokens" in said and "6 of needle, 6 of continue" in said
    assert "no question of task" not in said
    assert main(["data", "longmix", source, "--output", prefix, "--length", "10", "--samples", "3"]) == 2
    assert capsys.readouterr().err.startswith("k3train: ")


def test_the_command_says_which_task_could_not_be_asked(
    make_corpus: MakeCorpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_corpus("source", [[97, TOKENIZER.eod_id]] * 300)
    given = ["--length", "512", "--samples", "2", "--workers", "1", "--tasks", "needle,continue"]
    assert main(["data", "longmix", source, "--output", f"{tmp_path}/long", *given]) == 0
    said = capsys.readouterr().out
    assert "4 of needle, 0 of continue" in said
    assert "no question of task continue: it needs documents of at least 32 tokens" in said
    assert main(["data", "longmix", source, "--output", f"{tmp_path}/x", *given, "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "k3train: seed=-1; valid: 0 to 2**64 - 1\n"
