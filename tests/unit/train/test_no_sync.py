"""A steady training step reads values of tensors at known places only: on a GPU the host waits at each.

`tests/gpu/test_no_sync.py` asks the same of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers

from .waits import reads

MICROBATCHES = 2
SMALL = [
    "recipe=tiny", "parallel=single", "vision=none", "data.images=[]", "model.num_layers=3",
    "data.sequence_length=64", f"run.microbatches={MICROBATCHES}",
]  # fmt: skip
CASES = {
    "alltoall": [*SMALL, "optim=adamw", "offload.policy=recompute"],
    "moonep": [*SMALL, "optim=muon_per_head", "parallel.expert.dispatcher=moonep"],
}
# Of three layers the first is dense and the last one Gated MLA, as is MTP's, which has experts too.
MOE, MLA = 3 * MICROBATCHES, 2 * MICROBATCHES

ALWAYS = {
    # The losses, when all micro-batches have been through: whether they are finite decides about the update.
    ("k3train/train/step.py:run_batches", "tolist"): 1,
    # The norm of the gradients, which decides about clipping and the update.
    ("k3train/optim/clip.py:gradient_norm", "item"): 1,
    # What is reported of all layers' loads.
    ("k3train/train/balance.py:balance_experts", "tolist"): 1,
}
ON_THE_HOST = {
    # Adam's step counters, which never are on a GPU.
    ("torch/optim/optimizer.py:_get_value", "item"),
    # Rows of each expert, copied to the host once a layer; see `dispatch.LatentDispatcher.preprocess`.
    ("k3train/model/experts.py:forward", "tolist"),
    ("megatron/core/transformer/moe/moe_utils.py:sort_chunks_by_idxs", "tolist"),
    # A number behind a mask, which torch turns into masked_fill.
    ("megatron/core/tensor_parallel/cross_entropy.py:calculate_predicted_logits", "index_put_"),
    # The planner of a CPU; a GPU has a kernel for it.
    ("parallel/moonep/plan/plain.py:fill", "tolist"),
}
EXPECTED = {
    # Sizes of the exchange once a layer, though all layers are run again.
    "alltoall": ALWAYS | {("all-to-all", "sizes"): MOE},
    "moonep": ALWAYS
    | {
        # Sizes of a plan, seven lists that one copy brings to the host.
        ("parallel/moonep/route.py:read", "numpy"): 7 * MOE,
        # With QK-Clip, a part of Per-Head Muon: heads whose logits may be too large, and whether any were.
        ("k3train/ops/attention/largest_logit.py:largest_logits", "tolist"): MLA,
        ("k3train/optim/qk_clip.py:prepare", "tolist"): 1,
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (answer,) = run_workers("tests.unit.train.waits:of_a_step", 1, {"cases": CASES}, timeout=150)
    return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_where_it_is_known_to(found: dict[str, Any], case: str) -> None:
    seen = {(place, what): count for place, what, count in found[case]}
    assert {key: count for key, count in seen.items() if key not in ON_THE_HOST} == EXPECTED[case]


def test_the_layers_were_run_again(found: dict[str, Any]) -> None:
    counts = {place: count for place, _, count in found["alltoall"]}
    assert counts["k3train/model/experts.py:forward"] == 2 * MOE


def test_every_way_to_read_is_seen() -> None:
    x = torch.arange(4.0)
    with reads() as seen:
        x.sum().item()
        x.tolist()
        bool(x[0] < 1)
        int(x[1])
        x[x > 1]
        x.nonzero()
        x.masked_select(x > 1)
        torch.repeat_interleave(torch.tensor([1, 2]))
        torch.repeat_interleave(torch.tensor([1, 2]), output_size=3)
        x[torch.tensor([0, 1])]
        torch.where(x > 1, x, 0).sum()
    by_kind = {what: count for (_, what), count in seen.items()}
    assert by_kind == {
        "item": 1, "tolist": 1, "bool": 1, "int": 1, "index": 1, "nonzero": 1, "masked_select": 1,
        "repeat_interleave": 1,
    }  # fmt: skip
    assert {place for place, _ in seen} == {"elsewhere"}
    with reads() as after:
        pass
    assert not after and torch.Tensor.item is torch._C.TensorBase.item
