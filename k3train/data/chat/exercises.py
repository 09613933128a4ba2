"""Made-up chats that every machine has: sums, strings and a calculator to call, the same on each.

`python -m k3train.data.chat.exercises FILE` writes them.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "exercises"
COUNT = 6000
SEED = 20261130
# Changes when the same seed gives other chats.
VERSION = 1
LETTERS = "abcdefghijklmnoprstuw"

Record = dict[str, Any]
CALCULATOR = {
    "name": "calculate",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "op": {"type": "string"}, "b": {"type": "number"}},
    },
}


def bundled(folder: Path) -> Path:
    """The file of the exercises in `folder`, written if need be; many processes may do so at once."""
    path = folder / f"{NAME}-{VERSION}.jsonl"
    if not path.is_file():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        write(temporary)
        temporary.replace(path)
    return path


def write(path: Path, count: int = COUNT) -> None:
    """Write the first `count` exercises, a line each."""
    with path.open("w", encoding="utf-8") as output:
        for record in chats(count):
            output.write(json.dumps(record) + "\n")


def chats(count: int = COUNT, seed: int = SEED) -> Iterator[Record]:
    """`count` records: four of ten a question, the others two questions, thoughts or calls in equal parts."""
    source = random.Random(seed)
    kinds = (_question, _question, _two_questions, _thoughts, _call)
    for _ in range(count):
        yield source.choice(kinds)(source)


def _question(source: random.Random) -> Record:
    return {"messages": _turn(source)}


def _two_questions(source: random.Random) -> Record:
    system = {"role": "system", "content": "Answer briefly."}
    return {"messages": [system, *_turn(source), *_turn(source)]}


def _thoughts(source: random.Random) -> Record:
    a, b, c = (source.randrange(2, 50) for _ in range(3))
    effort = source.choice(("low", "high"))
    steps = f"{a}+{b}={a + b}. {a + b}+{c}={a + b + c}." if effort == "high" else ""
    return {
        "messages": [
            {"role": "user", "content": f"{a}+{b}+{c}?"},
            {"role": "assistant", "reasoning_content": steps, "content": str(a + b + c)},
        ],
        "thinking_effort": effort,
    }


def _call(source: random.Random) -> Record:
    a, b = source.randrange(100, 1000), source.randrange(100, 1000)
    op, result = source.choice((("+", a + b), ("-", a - b)))
    call = {"name": "calculate", "arguments": json.dumps({"a": a, "op": op, "b": b})}
    return {
        "tools": [CALCULATOR],
        "messages": [
            {"role": "user", "content": f"{a}{op}{b}?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "0", "function": call}]},
            {"role": "tool", "tool_call_id": "0", "content": str(result)},
            {"role": "assistant", "content": str(result)},
        ],
    }


def _turn(source: random.Random) -> list[Record]:
    question, answer = source.choice(QUESTIONS)(source)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _word(source: random.Random) -> str:
    return "".join(source.choice(LETTERS) for _ in range(source.randrange(2, 6)))


def _sum(source: random.Random) -> tuple[str, str]:
    a, b = source.randrange(100), source.randrange(100)
    return f"{a}+{b}?", str(a + b)


def _capitals(source: random.Random) -> tuple[str, str]:
    word = _word(source)
    return f"{word} in capitals?", word.upper()


def _backwards(source: random.Random) -> tuple[str, str]:
    word = _word(source)
    return f"{word} backwards?", word[::-1]


def _length(source: random.Random) -> tuple[str, str]:
    word = _word(source)
    return f"Letters in {word}?", str(len(word))


QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_sum, _capitals, _backwards, _length)

if __name__ == "__main__":
    write(Path(sys.argv[1]))
