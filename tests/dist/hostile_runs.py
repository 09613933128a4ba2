"""Plants pickles that run code into each file of a real checkpoint, and reads it in every way there is."""

from __future__ import annotations

import builtins
import io
import json
import operator
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from k3train.checkpoint import manifest
from k3train.checkpoint.inspection import code_in
from k3train.checkpoint.sources import open_weights
from k3train.checkpoint.tensors import CheckpointTensors
from k3train.checkpoint.verify import verify
from k3train.checkpoint.weights import fill
from k3train.errors import UserError
from k3train.train.step import Trainer

from .checkpoint_runs import manager, small_config, start

DEEP = ("exec", "nested torch.load")
"""Payloads that go into objects too."""
WEIGHT, MOMENT = "model.final_norm.weight", "exp_avg"


class Calls:
    """A pickle of this calls a function with arguments when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __call__(self) -> None:
        """Pickle wants to see it callable; what it is replaced by is called."""

    def __reduce__(self) -> Any:
        return self.call


def payloads(mark: Path) -> dict[str, Any]:
    """Each makes the file `mark` when it is unpickled."""
    touch = f"open({str(mark)!r}, 'w')"
    return {
        "os.system": Calls(os.system, f"touch {mark}"),
        "exec": Calls(exec, touch),
        "getattr": Calls(Calls(getattr, Calls(__import__, "os"), "system"), f"touch {mark}"),
        "attrgetter": Calls(Calls(operator.attrgetter("mkfifo"), Calls(__import__, "os")), str(mark)),
        "nested torch.load": Calls(
            partial(torch.load, weights_only=False), io.BytesIO(_saved(Calls(os.system, f"touch {mark}")))
        ),
        "inside a container": {"a": [1, (2, Calls(builtins.eval, touch))]},
    }


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Hostile:
    """A copy of a checkpoint, as someone who wants code to run would leave it: its manifest fits."""

    def __init__(self, source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        self.folder = target
        with (target / ".metadata").open("rb") as file:
            self.table: Metadata = pickle.load(file)

    def _write_table(self, table: Any) -> None:
        (self.folder / ".metadata").write_bytes(pickle.dumps(table))

    def entry(self, part: str) -> Any:
        """The first place of the table whose name has a part."""
        assert self.table.storage_data is not None
        return next(index for index in self.table.storage_data if part in index.fqn)

    def move(self, part: str, content: bytes) -> None:
        """Let an entry have other bytes, at the end of its file."""
        assert self.table.storage_data is not None
        index = self.entry(part)
        path = self.folder / self.table.storage_data[index].relative_path
        begin = path.stat().st_size
        with path.open("ab") as file:
            file.write(content)
        self.table.storage_data[index] = _StorageInfo(path.name, begin, len(content))
        self._write_table(self.table)

    def plant_in_table(self, payload: Any) -> None:
        self.table.planner_data = payload
        self._write_table(self.table)

    def plant_in_tensor(self, part: str, payload: Any) -> None:
        """Another data.pkl for a tensor, whose numbers stay."""
        assert self.table.storage_data is not None
        info = self.table.storage_data[self.entry(part)]
        with (self.folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            old = zipfile.ZipFile(io.BytesIO(file.read(info.length)))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as new:
            for name in old.namelist():
                is_pickle = name.endswith("/data.pkl")
                new.writestr(name, pickle.dumps(payload, 2) if is_pickle else old.read(name))
        self.move(part, buffer.getvalue())

    def finish(self) -> Path:
        content = manifest.read(self.folder)
        manifest.write(self.folder, content, {})
        assert verify(self.folder) == []
        return self.folder


PLACES: dict[str, Callable[[Hostile, Any], None]] = {
    "the table": Hostile.plant_in_table,
    "the random states": lambda hostile, payload: hostile.move("rank_state", _saved([payload])),
    "the common state": lambda hostile, payload: hostile.move("common_state", _saved([payload])),
    "an extra state": lambda hostile, payload: hostile.move("head._extra_state", _saved([payload])),
    "a weight": lambda hostile, payload: hostile.plant_in_tensor(WEIGHT, payload),
    "a moment": lambda hostile, payload: hostile.plant_in_tensor(MOMENT, payload),
    "common.pt": lambda hostile, payload: torch.save(payload, hostile.folder / "common.pt") or None,  # type: ignore[func-returns-value]
}


def _pickled_extra_state(hostile: Hostile, payload: Any) -> None:
    """As Transformer Engine would unpickle it: a tensor of bytes, which torch loads without complaint."""
    state = torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8)
    hostile.move("head._extra_state", _saved([state]))


def _outside(hostile: Hostile, payload: Any) -> None:
    assert hostile.table.storage_data is not None
    index = hostile.entry(WEIGHT)
    hostile.table.storage_data[index] = replace(
        hostile.table.storage_data[index], relative_path="../elsewhere"
    )
    hostile._write_table(hostile.table)


def _class_change(hostile: Hostile, payload: Any) -> None:
    """`Metadata.planner_data = 1` for all tables of the process, by a state of slots for the class."""
    plain = pickle.dumps(hostile.table, 2)
    change = b"(ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x06\x00\x00\x00strict"
    (hostile.folder / ".metadata").write_bytes(plain[:2] + change + b"K\x01stb1" + plain[2:])


ODDITIES: dict[str, Callable[[Hostile, Any], None]] = {
    "pickled bytes as an extra state": _pickled_extra_state,
    "a place outside the folder": _outside,
    "a change of a class": _class_change,
}


def planted(root: str) -> dict[str, dict[str, Any]]:
    """What each way of reading says of each hostile checkpoint, and whether a payload ran."""
    mark = Path(root).with_name("ran")
    trainer = start(small_config({}))
    manager(trainer, root, []).save(1, trainer.modules, trainer.optimizer, {"step": 1})
    source = Path(root) / "step-00000001"
    assert code_in(source) == []
    made = payloads(mark)
    names = list(made)
    cases = {f"os.system in {place}": (plant, made["os.system"]) for place, plant in PLACES.items()}
    for name in names[1:]:
        for place in ("the table", "the random states")[: 1 + (name in DEEP)]:
            cases[f"{name} in {place}"] = PLACES[place], made[name]
    cases |= {name: (plant, made["os.system"]) for name, plant in ODDITIES.items()}
    return {
        name: _read_all(trainer, source, Path(root).with_name("copies") / str(number), plant, payload, mark)
        for number, (name, (plant, payload)) in enumerate(cases.items())
    }


def _read_all(
    trainer: Trainer,
    source: Path,
    root: Path,
    plant: Callable[[Hostile, Any], None],
    payload: Any,
    mark: Path,
) -> dict[str, Any]:
    hostile = Hostile(source, root / "checkpoints" / source.name)
    plant(hostile, payload)
    folder = hostile.finish()
    environment = json.dumps(dict(os.environ), sort_keys=True)
    said = {
        "resume": _said(
            lambda: manager(trainer, str(folder.parent), []).load(trainer.modules, trainer.optimizer)
        ),
        "weights": _said(lambda: fill(trainer.models, open_weights(root))),
        "table": _said(lambda: CheckpointTensors(folder)),
        "verify": code_in(folder),
    }
    assert json.dumps(dict(os.environ), sort_keys=True) == environment
    shutil.rmtree(root)
    return {**said, "ran": mark.exists()}


def _said(read: Callable[[], object]) -> str:
    try:
        read()
    except UserError as error:
        return str(error)
    return ""


def alive(folder: str) -> list[str]:
    """The payloads that a plain `pickle.loads` runs, which shows that the others were refused."""
    found = []
    for name in payloads(Path(folder)):
        mark = Path(folder) / name.replace(" ", "-")
        pickle.loads(pickle.dumps(payloads(mark)[name]))
        if mark.exists():
            found.append(name)
    return found
