"""The key table against a second listing from the specification, for the released model and a tiny one."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from k3train import shapes, vision_shapes
from k3train.checkpoint.huggingface.config import build
from k3train.checkpoint.huggingface.keys import Layout, Piece, pieces
from k3train.config import ModelConfig
from k3train.errors import UserError
from k3train.vision_config import VisionConfig
from tests import reference_k3

CONF = Path(__file__).parents[4] / "conf"


@pytest.fixture(scope="module")
def k3() -> ModelConfig:
    return ModelConfig(**yaml.safe_load((CONF / "model" / "k3.yaml").read_text()))


@pytest.fixture(scope="module")
def table(k3: ModelConfig) -> list[Piece]:
    return list(pieces(k3, VisionConfig(enabled=True), Layout()))


def test_every_tensor_of_the_released_model_is_in_the_table_and_no_other(
    k3: ModelConfig, table: list[Piece]
) -> None:
    config = build(k3, VisionConfig(enabled=True), Layout())
    expected = reference_k3.shapes(config)
    found = {stored.key: (stored.dtype, stored.shape) for piece in table for stored in piece.stored}
    assert len(found) == sum(len(piece.stored) for piece in table) == 249_924
    assert found == expected


def test_sizes_are_those_of_the_report(k3: ModelConfig, table: list[Piece]) -> None:
    counts: Counter[str] = Counter()
    for piece in table:
        part = piece.kind if piece.kind in ("vision", "projector") else "text"
        if not piece.name.endswith("expert_bias"):
            counts[part] += math.prod(piece.shape)
    assert counts["text"] == shapes.total(k3)
    assert round(counts["text"] / 1e9, 1) == 2779.5
    assert round(counts["vision"] / 1e6, 1) == 401.2 and round(counts["projector"] / 1e6, 1) == 46.1


def test_packed_text_weights_take_as_many_bytes_as_the_release(k3: ModelConfig) -> None:
    # The sum over the headers of the released files, as a third party counted it.
    assert sum(piece.nbytes for piece in pieces(k3, None, Layout(packed=True))) == 1_559_965_606_912


@pytest.mark.parametrize("layout", [Layout(), Layout(packed=True), Layout("F32", mtp=True)], ids=str)
def test_every_row_of_our_tensors_is_in_one_piece(layout: Layout) -> None:
    model = ModelConfig(vocab_size=320, mtp_layers=1)
    vision = VisionConfig(enabled=True, depth=2, hidden_size=32)
    rows: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces(model, vision, layout):
        rows.setdefault(piece.name, []).append((piece.first, piece.shape[0]))
        if piece.form == "plain":
            assert math.prod(piece.shape) == math.prod(piece.stored[0].shape)
    own = {entry.name: entry.shape for entry in (*shapes.parameters(model), *shapes.buffers(model))}
    own |= {entry.name: entry.shape for entry in vision_shapes.parameters(vision, model.hidden_size)}
    expected = {name: shape for name, shape in own.items() if layout.mtp or not name.startswith("mtp.")}
    assert rows.keys() == expected.keys()
    for name, parts in rows.items():
        end = 0
        for first, count in parts:
            assert first == end, name
            end += count
        assert end == expected[name][0], name


def test_fp32_of_the_release_stays_fp32_and_the_rest_is_bf16() -> None:
    table = pieces(ModelConfig(vocab_size=320), None, Layout())
    wide = [stored.key for piece in table for stored in piece.stored if stored.dtype == "F32"]
    endings = {re.sub(r".*layers\.\d+\.(self_attn|block_sparse_moe)\.", "", key) for key in wide}
    assert endings == {
        "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias", "o_norm.weight",
        "gate.e_score_correction_bias",
    }  # fmt: skip


def test_widths_without_whole_blocks_are_not_packed() -> None:
    model = dataclasses.replace(ModelConfig(vocab_size=320), expert_ffn_size=48)
    with pytest.raises(UserError, match=r"model\.expert_ffn_size=48: MXFP4 packs 32 columns"):
        list(pieces(model, None, Layout(packed=True)))
