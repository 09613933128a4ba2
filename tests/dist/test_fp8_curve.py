"""What FP8 does to activations does less to a loss curve than another seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.dist import runs

STEPS = 20
SHORT = [
    "recipe=tiny", "parallel=single", "vision=none", "data.images=[]", "model.num_layers=4",
    "data.sequence_length=64", "run.microbatches=2", f"run.steps={STEPS}", "eval.every=0",
    "checkpoint.every=0", "log.trace_steps=0", "offload.min_kib=1",
]  # fmt: skip
RUNS = {
    "keep": ["offload.policy=keep"],
    "other": ["offload.policy=keep", "run.seed=77"],
    "fp8_host": ["offload.policy=fp8_host"],
    "mixed": ["offload.policy=mixed"],
}


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_fp8_activations_stay_within_the_noise_of_seeds(tmp_path: Path) -> None:
    data, curves = runs.prepare_text(tmp_path), {}
    for name, policy in RUNS.items():
        code, output = runs.train([*SHORT, *data, *policy, f"run.dir={tmp_path / name}"], timeout=240)
        assert code == 0, output
        curves[name] = np.array([line["loss"] for line in runs.metrics(tmp_path / name)])
    kept = curves["keep"]
    assert len(kept) == STEPS and kept[-1] < 0.75 * kept[0], "it learns"
    away = {name: float(np.abs(curve - kept).mean()) for name, curve in curves.items()}
    assert 0 < away["fp8_host"] < 0.25 * away["other"], (away, curves)
    assert 0 < away["mixed"] < 0.25 * away["other"], (away, curves)
