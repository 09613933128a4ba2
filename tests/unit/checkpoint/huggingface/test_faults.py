"""Every fault of a folder is named with its file and tensor, and nothing half-written stays behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.cli import run_verb
from tests.unit.checkpoint.huggingface import released

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"
A_LOG = "language_model.model.layers.1.self_attn.A_log"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"


def _edit(change: Callable[[dict[str, Tensor]], Any], key: str = GATE) -> Callable[[Path], None]:
    """Change the tensors of the file that holds `key`, and the index with them."""

    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        name = index["weight_map"][key]
        tensors = load_file(folder / name)
        before = set(tensors)
        change(tensors)
        save_file(tensors, folder / name)
        for gone in before - set(tensors):
            del index["weight_map"][gone]
        index["weight_map"].update(dict.fromkeys(set(tensors) - before, name))
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def _poison(tensors: dict[str, Tensor]) -> None:
    tensors[GATE][3, 5] = torch.nan
    tensors[GATE][4, 0] = torch.inf


def _truncate(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-100])


def _tear_header(folder: Path) -> None:
    path = folder / SHARD
    data = path.read_bytes()
    path.write_bytes(data[:20] + b"\x00" + data[21:])


def _misplace(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][GATE] = next(
        name for name in set(index["weight_map"].values()) if name != index["weight_map"][GATE]
    )
    (folder / INDEX).write_text(json.dumps(index))


def _lead_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][GATE] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _lengthen_a_log(tensors: dict[str, Tensor]) -> None:
    tensors[A_LOG][5] = 0.5


def _set(key: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return _edit(lambda tensors: tensors.__setitem__(key, value(tensors[key]).contiguous()))


FAULTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "missing shard": (lambda folder: (folder / SHARD).unlink(), (SHARD, "is missing", "has 81 tensors")),
    "truncated file": (_truncate, (SHARD, "bytes and should have")),
    "torn header": (_tear_header, (SHARD, "its header is torn")),
    "empty file": (lambda folder: (folder / SHARD).write_bytes(b""), (SHARD, "no header")),
    "wrong shape": (_set(GATE, lambda x: x[:, :-1]), (GATE, "has the shape [8, 63] and should have [8, 64]")),
    "transposed": (_set(GATE, lambda x: x.T), (GATE, "has the shape [64, 8] and should have [8, 64]")),
    "wrong dtype": (_set(GATE, lambda x: x.float()), (GATE, "is F32 and should be BF16")),
    "missing tensor": (_edit(lambda tensors: tensors.pop(GATE)), (GATE, "is missing")),
    "unknown key": (
        _edit(lambda tensors: tensors.__setitem__("language_model.model.extra", torch.ones(2))),
        ("language_model.model.extra is unknown to the model in config.json",),
    ),
    "NaN": (_edit(_poison), (GATE, "2 of 512 numbers are NaN or infinite, the first at [3, 5]")),
    "not where the index says": (_misplace, (GATE, "is not in it, though model.safetensors.index")),
    "outside the folder": (_lead_outside, ("'../elsewhere.safetensors' leads out of the folder",)),
    "numbers in the padding": (_edit(_lengthen_a_log, A_LOG), (A_LOG, "has 2 heads and numbers other")),
    "no index": (lambda folder: (folder / INDEX).unlink(), ("3 .safetensors files and no model.",)),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json: No such file",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_is_left(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, expected = FAULTS[name]
    config = released.tree()
    source = released.save(tmp_path / "source", config, released.weights(config))
    damage(source)
    for arguments in (
        ["import", str(source), str(tmp_path / "run"), "--shard-gb", "0.0001"],
        ["verify", str(source)],
    ):
        assert run_verb("convert", arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"k3train: {source}")
        for part in expected:
            assert part in told, told
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_all_problems_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = released.tree()
    tensors = released.weights(config)
    for key in [key for key in tensors if ".experts.3." in key]:
        del tensors[key]
    source = released.save(tmp_path / "source", config, tensors)
    assert run_verb("convert", ["import", str(source), str(tmp_path / "run")]) == 2
    assert "experts.3.w1.weight is missing (and 11 more problems)" in capsys.readouterr().err


def test_a_scale_that_is_no_number_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = released.tree(packed=True)
    stored, _ = released.packed_weights(config)
    stored[f"{EXPERT}_scale"][7, 1] = 255
    source = released.save(tmp_path / "source", config, stored)
    assert run_verb("convert", ["import", str(source), str(tmp_path / "run")]) == 2
    assert f"{EXPERT}_scale: 32 of 2048 numbers are NaN or infinite, the first at [7, 32]" in (
        capsys.readouterr().err
    )


def test_a_target_that_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = released.tree()
    source = released.save(tmp_path / "source", config, released.weights(config))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note").write_text("mine")
    assert run_verb("convert", ["import", str(source), str(tmp_path / "run")]) == 2
    assert "run: exists; name another folder, or remove it" in capsys.readouterr().err
    assert (tmp_path / "run" / "note").read_text() == "mine"


def test_verify_finds_a_changed_file_by_its_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = released.tree()
    source = released.save(tmp_path / "source", config, released.weights(config))
    assert run_verb("convert", ["import", str(source), str(tmp_path / "run")]) == 0
    assert run_verb("convert", ["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[struct.unpack("<Q", data[:8])[0] + 108] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert run_verb("convert", ["verify", str(tmp_path / "out")]) == 2
    assert f"{path}: its content does not match SHA256SUMS" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = released.tree()
    source = released.save(tmp_path / "source", config, released.weights(config))
    assert run_verb("convert", ["import", str(source), str(tmp_path / "run")]) == 0
    (part,) = (tmp_path / "run" / "checkpoints" / "step-00000000").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    assert run_verb("convert", ["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "is whole (__1_0.distcp has" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import"], "convert: the following arguments are required: SRC, DST"),
        (["import", "nowhere", "run"], "nowhere: no such folder"),
        (["verify", ".", "--workers", "0"], "--workers=0: must be above 0"),
        (["transpose"], "convert: argument import|export|verify: invalid choice: 'transpose'"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb("convert", arguments) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
