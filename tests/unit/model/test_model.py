"""The assembled model against a second, plain one; what its router counts; its initial values."""

from __future__ import annotations

import math

import torch

from k3train.model.init import DT_MAX, DT_MIN, inverse_softplus_bias
from k3train.model.mtp import mtp_targets
from k3train.model.naming import global_name
from k3train.ops.kda import kda_gate
from k3train.ops.packing import Packing
from tests.dist.launch import run_workers


def test_logits_equal_a_plain_forward_from_the_specification() -> None:
    (answer,) = run_workers("tests.unit.model.workers:compare_with_plain", 1)
    assert answer["error"] < 1e-4
    assert answer["spread"] > 0.3, "logits that hardly depend on the position would prove little"


def test_router_counts_each_training_token_once() -> None:
    (answer,) = run_workers("tests.unit.model.workers:count_router", 1)
    assert answer == {"train": 32, "recompute": 32, "padded": 26, "load": 26 * 2, "eval": 0}


def test_moonep_counts_training_alone_and_learns_nothing_of_a_skipped_step() -> None:
    (answer,) = run_workers("tests.unit.model.workers:count_moonep", 1)
    assert answer == {"eval": 0, "train": 1, "skipped": [0] * 5, "empty": 0, "updated": [1] * 5}


def test_initial_decay_is_minus_five_times_one_minus_exp_of_minus_dt() -> None:
    uniform = torch.linspace(0, 1, 64, dtype=torch.float64)
    bias = inverse_softplus_bias(uniform)
    dt = torch.exp(math.log(DT_MIN) + uniform * (math.log(DT_MAX) - math.log(DT_MIN)))
    z = torch.zeros(1, 1, 1, 64, dtype=torch.float64)
    decay = kda_gate(z, torch.zeros(1, dtype=torch.float64), bias, -5.0).flatten()
    torch.testing.assert_close(decay.double(), -5 * (1 - torch.exp(-dt)), rtol=1e-5, atol=1e-7)


def test_mtp_predicts_the_token_after_the_next_inside_a_document() -> None:
    labels = torch.tensor([[11, 12, 13, 14, 15]])
    mask = torch.tensor([[1.0, 1, 1, 1, 0]])
    packing = Packing.from_tokens(torch.tensor([[1, 256, 1, 1, 1]]), 256)
    targets, kept = mtp_targets(labels, mask, packing)
    assert targets[0, :4].tolist() == [12, 13, 14, 15]
    # Position 1 reads the embedding of another document, 3 has a masked target, 4 has none.
    assert kept.tolist() == [[1, 0, 1, 0, 0]]


def test_one_name_for_an_expert_in_every_layout() -> None:
    local = global_name("layers.3.mlp.experts.local_experts.2.linear_fc1.weight", experts=[1, 3, 10])
    grouped = global_name("layers.3.mlp.experts.linear_fc1.weight2", experts=[1, 3, 10])
    assert local == grouped == "layers.3.mlp.experts.10.linear_fc1.weight"
    assert global_name("layers.3.mlp.router.weight", [8]) == "layers.3.mlp.router.weight"
