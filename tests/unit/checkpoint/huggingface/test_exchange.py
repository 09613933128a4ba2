"""Round trips are exact to the bit, resume where they stopped, and hold one tensor at a time."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.checkpoint import tensors
from k3train.checkpoint.folders import complete
from k3train.checkpoint.huggingface import exchange
from k3train.checkpoint.huggingface.config import build, read
from k3train.checkpoint.huggingface.exporting import ExportJob
from k3train.checkpoint.huggingface.importing import ImportJob, import_folder
from k3train.checkpoint.huggingface.keys import Layout, pieces
from k3train.checkpoint.huggingface.reader import HuggingFaceTensors
from k3train.checkpoint.huggingface.writer import plan_shards
from k3train.checkpoint.tensors import CheckpointTensors
from k3train.checkpoint.verify import verify
from k3train.config_file import load_yaml
from launch.cli import run_verb
from tests.unit.checkpoint.huggingface import released

SMALL = ("--shard-gb", "0.0002")


def convert(*arguments: str | Path) -> None:
    assert run_verb("convert", [str(argument) for argument in arguments]) == 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = released.tree()
    return released.save(tmp_path / "source", config, released.weights(config))


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "packed"])
def test_import_and_export_give_every_bit_back(packed: bool, tmp_path: Path) -> None:
    config = released.tree(packed=packed)
    weights = released.packed_weights(config)[0] if packed else released.weights(config)
    source, run, target = tmp_path / "source", tmp_path / "run", tmp_path / "target"
    released.save(source, config, weights)
    convert("import", source, run, *SMALL)
    convert("export", run, target, *SMALL, *(["--packed"] if packed else []))
    assert released.same_bits(released.load(target), weights)
    assert json.loads((target / "config.json").read_text()) == config
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source", "target"]


def test_packed_experts_are_read_as_the_values_they_stand_for(tmp_path: Path) -> None:
    config = released.tree(packed=True)
    for number, normal in enumerate((True, False)):
        stored, plain = released.packed_weights(config, number, normal=normal)
        source = released.save(tmp_path / f"source{number}", config, stored)
        found = HuggingFaceTensors(source)
        for piece in found.pieces:
            values = found.shards.read_rows(piece, torch.bfloat16)
            key = piece.stored[0].key.removesuffix("_packed")
            expected = plain[key].flatten()[: values.numel()]  # without A_log's padding
            assert values.dtype == expected.dtype and torch.equal(values.flatten(), expected), key
        # Scales that the OCP rule would not have chosen change, the values do not.
        convert("import", source, tmp_path / f"run{number}")
        convert("export", tmp_path / f"run{number}", tmp_path / f"target{number}", "--packed")
        again = HuggingFaceTensors(tmp_path / f"target{number}")
        for name in {piece.name for piece in again.pieces}:
            assert torch.equal(again.read(name), found.read(name)), name
        assert released.same_bits(released.load(tmp_path / f"target{number}"), stored) is normal


def test_a_run_of_fp32_keeps_its_precision_where_asked_for(tmp_path: Path, source: Path) -> None:
    run = tmp_path / "run"
    convert("import", source, run)
    _multiply(run, 1.001)
    convert("export", run, tmp_path / "wide", "--dtype", "float32")
    convert("export", run, tmp_path / "narrow")
    checkpoint = CheckpointTensors(complete(run / "checkpoints", 0))
    wide, narrow = HuggingFaceTensors(tmp_path / "wide"), HuggingFaceTensors(tmp_path / "narrow")
    name = "layers.1.mlp.experts.3.linear_fc1.weight"
    assert torch.equal(wide.read(name), checkpoint.read(name))
    assert torch.equal(narrow.read(name), checkpoint.read(name).bfloat16())
    assert not torch.equal(narrow.read(name).float(), checkpoint.read(name))
    assert wide.description.layout.dtype == "F32"
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["text_config"]["dtype"] == "float32"


def _multiply(run: Path, factor: float) -> None:
    """Replace a run's only checkpoint by one in FP32."""
    folder = complete(run / "checkpoints", 0)
    old = CheckpointTensors(folder)
    config = load_yaml(run / "config.yaml")
    table = list(
        pieces(config.model, config.vision, HuggingFaceTensors(run.parent / "source").description.layout)
    )
    parts = [(p.name, p.first, old.read(p.name, p.first, p.shape[0]).float() * factor) for p in table]
    for path in folder.iterdir():
        path.unlink()
    written, checksum = tensors.write_file(folder / "__0_0.distcp", parts)
    tensors.finish(folder, {"__0_0.distcp": written}, {"__0_0.distcp": checksum}, {"step": 0})


def test_an_imported_checkpoint_is_whole_and_names_experts_as_training_does(
    tmp_path: Path, source: Path
) -> None:
    convert("import", source, tmp_path / "run", *SMALL)
    folder = complete(tmp_path / "run" / "checkpoints", 0)
    assert verify(folder) == []
    assert len(list(folder.glob("*.distcp"))) > 3
    checkpoint, weights = CheckpointTensors(folder), released.load(source)
    at = "language_model.model.layers.2.block_sparse_moe.experts.5."
    fused = checkpoint.read("layers.2.mlp.experts.5.linear_fc1.weight")
    assert torch.equal(fused, torch.cat((weights[f"{at}w1.weight"], weights[f"{at}w3.weight"])))
    assert torch.equal(checkpoint.read("layers.2.mlp.experts.5.linear_fc1.weight", 60, 8), fused[60:68])
    assert checkpoint.read("layers.0.self_attention.A_log").tolist() == (
        weights["language_model.model.layers.0.self_attn.A_log"][:2].tolist()
    )
    config = load_yaml(tmp_path / "run" / "config.yaml")
    assert config.model.num_experts == 8 and config.vision.depth == 2


def test_several_files_at_a_time_are_the_same(tmp_path: Path, source: Path) -> None:
    for workers in ("1", "3"):
        convert("import", source, tmp_path / f"run{workers}", *SMALL, "--workers", workers)
        convert(
            "export", tmp_path / f"run{workers}", tmp_path / f"out{workers}", *SMALL, "--workers", workers
        )
    sums = [(tmp_path / f"out{workers}" / "SHA256SUMS").read_text() for workers in "13"]
    assert sums[0] == sums[1]
    convert("verify", tmp_path / "out3", "--workers", "3")


def test_checksums_are_those_of_the_files(tmp_path: Path, source: Path) -> None:
    convert("import", source, tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "target", *SMALL)
    lines = (tmp_path / "target" / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {path.name: path for path in (tmp_path / "target").iterdir() if path.name != "SHA256SUMS"}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def test_an_interrupted_export_goes_on_with_the_files_that_are_missing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = tmp_path / "run", tmp_path / "target"
    convert("import", source, run)
    whole = exchange._write
    written: list[int] = []

    def stopping(job: Any, folder: Path, index: int) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(index)
        return whole(job, folder, index)

    monkeypatch.setattr(exchange, "_write", stopping)
    assert run_verb("convert", ["export", str(run), str(target), *SMALL]) == 1
    partial = target.with_name("target.partial")
    assert partial.is_dir() and not target.exists()
    damaged = next(partial.glob("model-00002-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    written.clear()
    monkeypatch.setattr(exchange, "_write", lambda *args: written.append(args[2]) or whole(*args))
    capsys.readouterr()
    convert("export", run, target, *SMALL)
    assert "2 of 6 files are there already" in capsys.readouterr().out
    assert written == [1, 3, 4, 5]
    assert not partial.exists()
    assert released.same_bits(released.load(target), released.load(source))


def test_a_changed_request_starts_afresh(tmp_path: Path, source: Path) -> None:
    convert("import", source, tmp_path / "run")
    partial = tmp_path / "target.partial"
    partial.mkdir()
    (partial / "model-00001-of-00001.safetensors").write_bytes(b"of something else")
    convert("export", tmp_path / "run", tmp_path / "target")
    assert released.same_bits(released.load(tmp_path / "target"), released.load(source))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's count of memory")
def test_a_file_is_made_in_less_memory_than_two_files_take(tmp_path: Path) -> None:
    limit = 18_000_000
    config = released.tree(vision=False, vocab_size=98304)
    source = released.save(tmp_path / "source", config, released.weights(config))
    import_folder(source, tmp_path / "run", workers=1, limit=limit)
    for job in (
        ImportJob(source, limit, lenient=False),
        ExportJob(tmp_path / "run", 0, Layout(), "floor", limit),
    ):
        peaks = []
        for index, shard in enumerate(job.shards):
            assert sum(piece.nbytes for piece in shard.pieces) <= job.limit
            peaks.append(_peak(lambda job=job, index=index: job.write(index, tmp_path / "part")))
        assert len(peaks) > 1 and max(peaks) < 2 * job.limit, peaks


def _peak(work: Callable[[], Any]) -> int:
    """Bytes by which this process grows at most, as the kernel counts them."""

    def count(kind: str) -> int:
        found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = count("VmRSS")
    work()
    return count("VmHWM") - before


def test_shards_are_cut_at_the_limit(tmp_path: Path, source: Path) -> None:
    table = HuggingFaceTensors(source).pieces
    limit = 100_000
    shards = plan_shards(table, limit)
    assert [piece for shard in shards for piece in shard.pieces] == table
    assert all(sum(p.nbytes for p in shard.pieces) <= limit or len(shard.pieces) == 1 for shard in shards)
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"


def test_mtp_is_left_out_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(released.tree(vision=False)))
    model, _, _ = read(folder)
    layout = Layout(mtp=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        stored.key: torch.randn(stored.shape, generator=generator).to(released.DTYPES[stored.dtype])
        for piece in pieces(model, None, layout)
        for stored in piece.stored
    }
    for key in (key for key in tensors if key.endswith("A_log")):
        tensors[key][2:] = 0
    source = released.save(tmp_path / "source", build(model, None, layout), tensors)
    convert("import", source, tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "with", "--mtp")
    assert released.same_bits(released.load(tmp_path / "with"), tensors)
    assert sum(key.startswith("mtp.") for key in tensors) == 4 + 2 + 8 + 5 + 3 + 3 * 8
    capsys.readouterr()
    convert("export", tmp_path / "run", tmp_path / "without")
    assert "left out: the multi-token-prediction layer, which no release has" in capsys.readouterr().out
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("mtp.")}
    assert released.same_bits(released.load(tmp_path / "without"), kept)
    again = tmp_path / "again"
    convert("import", tmp_path / "without", again)
    assert run_verb("convert", ["export", str(again), str(tmp_path / "out"), "--mtp"]) == 2
    assert "has no multi-token-prediction layer; leave --mtp out" in capsys.readouterr().err
