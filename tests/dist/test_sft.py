"""Fine-tuning on chats, as a user runs it: pre-train, start from that, ask."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.data.chat.exercises import bundled, write
from k3train.data.chat.messages import Chat, Message
from k3train.data.chat.source import VALID, ChatFiles
from k3train.generate import Drawing, Generator
from k3train.sample import generator
from tests.dist import runs

# A model of seconds, on two stages.
SMALL = (
    "recipe=sft", "model=tiny_dense", "parallel.pipeline=2", "optim=adamw", "optim.lr=1e-2", "run.steps=12",
    "run.microbatches=2", "data.micro_batch_size=1", "data.sequence_length=512", "eval.every=4",
    "eval.batches=2", "checkpoint.every=0", "log.tensorboard=false", "log.trace_steps=0",
)  # fmt: skip
SAMPLES = 64

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    write(folder / "chats.jsonl", 300)
    inputs = [f"data.path={folder}/chats.jsonl", "data.held_out=0.2", f"data.cache_dir={folder}"]
    code, output = runs.train([*SMALL, f"run.dir={folder}/run", *inputs], timeout=300)
    assert code == 0, output
    assert "228 chats" in output and 'chat="2+3?"' in output
    return folder / "run"


@pytest.fixture(scope="module")
def small(tuned: Path) -> Iterator[Generator]:
    with generator(tuned) as opened:
        yield opened


def validation(run_dir: Path) -> list[float]:
    return [line["val_loss"] for line in runs.metrics(run_dir) if "val_loss" in line]


def questions(cache: Path, count: int) -> list[Chat]:
    """Chats that were held out, up to where the assistant answers for the first time."""
    source = ChatFiles([bundled(cache)], VALID, 0.05)
    chats = [source.read(index) for index in range(count)]
    first = [next(i for i, m in enumerate(chat.messages) if m.role == "assistant") for chat in chats]
    return [replace(chat, messages=chat.messages[:end]) for chat, end in zip(chats, first, strict=True)]


def test_the_loss_of_held_out_answers_falls(tuned: Path) -> None:
    losses = validation(tuned)
    assert len(losses) == 3 and losses[0] > losses[1] + 0.1 > losses[2] + 0.1
    counted = [line["tokens"] for line in runs.metrics(tuned)]
    # Only what an assistant says counts: about a fifth of 1,024 tokens.
    assert all(100 < tokens < 500 for tokens in counted)


def test_answers_that_are_drawn_together_are_those_drawn_alone(small: Generator, folder: Path) -> None:
    chats = questions(folder, 3)
    together = small.answers(chats, Drawing(tokens=6, temperature=0))
    alone = [small.answers([chat], Drawing(tokens=6, temperature=0))[0] for chat in chats]
    assert together == alone
    assert all(answer.message is None and answer.problem for answer in alone)


def test_an_answer_ends_with_the_token_behind_a_message(
    small: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure = small.tokenizer.structure
    assert structure is not None
    ends = f"5{chr(1)}response{chr(2)}{chr(1)}message{chr(2)}{chr(3)}never"
    ids = [{1: structure.close, 2: structure.sep, 3: structure.end}.get(byte, byte) for byte in ends.encode()]
    tokens = iter(ids)
    monkeypatch.setattr("k3train.generate.draw", lambda *_: next(tokens))
    (answer,) = small.answers([Chat((Message("user", ("2+3?",)),))], Drawing())
    assert answer.text == "5<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert answer.message == Message("assistant", ("5",))
    assert next(tokens) == ord("n")


def test_sampling_from_the_command_line(tuned: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "launch.cli",
        "sample",
        str(tuned),
        "chat=2+3?",
        "tokens=3",
        "effort=low",
    ]
    done = subprocess.run(
        command, env=runs.environment(), cwd=runs.REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and re.search("this is no XTML: .*", done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_tiny_learns_to_answer(tmp_path: Path) -> None:
    """The shipped recipes, one behind the other: more than 95 % of sampled answers are XTML."""
    cache = f"data.cache_dir={tmp_path}"
    code, output = runs.train(["recipe=tiny", f"run.dir={tmp_path}/tiny", cache], timeout=1200)
    assert code == 0, output
    arguments = ["recipe=sft", f"init_from={tmp_path}/tiny", f"run.dir={tmp_path}/sft", cache]
    code, output = runs.train(arguments, timeout=1200)
    assert code == 0, output
    losses = validation(tmp_path / "sft")
    assert losses[-1] < 0.5 and losses[-1] < losses[0]
    chats = questions(tmp_path, SAMPLES)
    with generator(tmp_path / "sft") as opened:
        answers = [
            answer
            for start in range(0, SAMPLES, 8)
            for answer in opened.answers(chats[start : start + 8], Drawing(tokens=260, seed=start))
        ]
    bad = [json.dumps([answer.problem, answer.text]) for answer in answers if answer.message is None]
    assert len(bad) < 0.05 * SAMPLES, bad
