"""The newcomer's run, whole: about two minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist import runs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_run_beats_a_bigram_model_and_names_digits(tmp_path: Path) -> None:
    code, output = runs.train(["recipe=tiny", f"run.dir={tmp_path}/run"], timeout=800)
    assert code == 0, output
    last = runs.metrics(tmp_path / "run")[-1]
    bigram = json.loads((tmp_path / "run" / "summary.json").read_text())["bigram_loss"]
    assert last["val_loss"] < bigram
    # Chance is a tenth.
    assert last["caption_accuracy"] > 0.6
