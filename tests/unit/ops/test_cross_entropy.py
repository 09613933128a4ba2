"""The loss in chunks against the one by autograd, and what it keeps in memory.

Letters: t tokens, d hidden, v vocabulary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.common.live_bytes import LiveStorages
from k3train.config import BackendConfig, Config, DataConfig, ModelConfig
from k3train.errors import UserError
from k3train.loss_plan import chunk_words, logits_bytes
from k3train.ops import backends
from k3train.ops.cross_entropy import chunked, reference, token_losses

ROOT, WORKER = Path(__file__).parents[3], Path(__file__).with_name("cross_entropy_interpreter_worker.py")
T, D, V = 11, 6, 37
ALL = [1, 7, 36, 37, 100]
"""Words of a chunk: one, an odd number, one less than all, all, more."""

Case = tuple[Tensor, Tensor, Tensor, Tensor]


def case(dtype: torch.dtype = torch.float64, scale: float = 1.0, t: int = T, d: int = D, v: int = V) -> Case:
    """Features, weight, labels with both ends among them, and gradients of the losses, some of them 0."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (t, v))
    labels = torch.randint(v, (t,), generator=generator)
    labels[:2] = torch.tensor([0, v - 1])
    grad = torch.rand(t, generator=generator, dtype=torch.float64) - 0.3
    grad[3:5] = 0
    return (scale * hidden).to(dtype), weight.to(dtype), labels, grad


def run(losses: Callable[..., Tensor], words: int, inputs: Case) -> list[Tensor]:
    """Losses, and gradients of features and weight."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs[:2])
    found = losses(hidden, weight, inputs[2], words)
    return [found.detach(), *torch.autograd.grad(found, [hidden, weight], inputs[3].to(found.dtype))]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


@pytest.mark.parametrize("words", ALL)
def test_equals_the_reference(words: int) -> None:
    expected = run(reference.token_losses, 0, case())
    for ours, theirs in zip(run(chunked.token_losses, words, case()), expected, strict=True):
        assert relative(ours, theirs) < 1e-12


def test_the_reference_is_the_definition() -> None:
    hidden, weight, labels, _ = case()
    logits = hidden @ weight.t()
    expected = [
        -(row.exp() / row.exp().sum())[label].log() for row, label in zip(logits, labels, strict=True)
    ]
    torch.testing.assert_close(reference.token_losses(hidden, weight, labels, 0), torch.stack(expected))


@pytest.mark.parametrize("words", [1, 7, 100])
def test_no_gradient_comes_of_tokens_that_do_not_count(words: int) -> None:
    hidden, weight, labels, grad = case()
    _, to_hidden, to_weight = run(chunked.token_losses, words, (hidden, weight, labels, torch.zeros(T)))
    assert to_hidden.count_nonzero() == to_weight.count_nonzero() == 0
    _, some, _ = run(chunked.token_losses, words, (hidden, weight, labels, grad))
    assert some[3:5].count_nonzero() == 0 < some[0].count_nonzero()


@pytest.mark.parametrize("words", [5, 37])
def test_logits_of_ten_thousands(words: int) -> None:
    """Losses from 0 to 1e4 and gradients between them, in FP32 as precise as of small logits."""
    hidden, weight, labels, grad = case(scale=4e3)
    with_one_sure = weight.clone()
    with_one_sure[0] = hidden[0] / 1e2  # the label of token 0, far above all others
    exact = run(reference.token_losses, 0, (hidden, with_one_sure, labels, grad))
    low = hidden.float(), with_one_sure.float(), labels, grad
    ours, theirs = run(chunked.token_losses, words, low), run(reference.token_losses, 0, low)
    assert exact[0].max() > 1e4 and exact[0][0] == 0
    for each, other, expected in zip(ours, theirs, exact, strict=True):
        assert torch.isfinite(each).all()
        assert relative(each, expected) <= 1.01 * relative(other, expected) + 1e-7


def test_what_is_not_finite_shows_as_in_the_reference() -> None:
    """A loss mask does not hide it: 0 times NaN is NaN in the sum of losses, as it is in gradients."""
    hidden, weight, labels, grad = case()
    hidden[4] = float("nan")
    for losses, words in ((chunked.token_losses, 7), (reference.token_losses, 0)):
        found, to_hidden, to_weight = run(losses, words, (hidden, weight, labels, grad))
        assert found.isnan().nonzero().flatten().tolist() == [4]
        assert to_hidden.isnan().any(1).nonzero().flatten().tolist() == [4]
        assert to_weight.isnan().all()


@pytest.mark.parametrize("words", [7, 37])
def test_memory_that_was_never_written_is_never_read(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new tensor without values is full of NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = run(chunked.token_losses, words, case())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(each).all() for each in found)


def test_bits_are_the_same_again() -> None:
    inputs = case(torch.bfloat16, t=65, d=48, v=301)
    first, second = (run(chunked.token_losses, 64, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("words", [16, 100, 400])
def test_in_bf16_no_further_from_fp64_than_the_reference(words: int) -> None:
    inputs = case(torch.bfloat16, t=96, d=64, v=400)
    exact = run(reference.token_losses, 0, (inputs[0].double(), inputs[1].double(), *inputs[2:]))
    ours, theirs = run(chunked.token_losses, words, inputs), run(reference.token_losses, 0, inputs)
    assert [each.dtype for each in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]
    errors = [(relative(a, e), relative(b, e)) for a, b, e in zip(ours, theirs, exact, strict=True)]
    assert all(own <= plain for own, plain in errors), errors
    assert errors[0][0] < 1e-6, "logits are never rounded to BF16"


def test_only_gradients_that_are_asked_for() -> None:
    hidden, weight, labels, grad = case()
    expected = run(chunked.token_losses, 7, (hidden, weight, labels, grad))
    for index, leaf in enumerate((hidden, weight)):
        leaf.requires_grad_()
        found = chunked.token_losses(hidden, weight, labels, 7)
        (one,) = torch.autograd.grad(found, leaf, grad)
        assert torch.equal(one, expected[1 + index])
        leaf.requires_grad_(False)


def test_memory_is_that_of_a_chunk_and_of_what_goes_out() -> None:
    model = ModelConfig(
        vocab_size=30000, hidden_size=16, backends=BackendConfig(cross_entropy="chunked", logits_mib=1)
    )
    config = Config(model=model, data=DataConfig(sequence_length=512))
    t, d, v = 512, 16, 30000
    inputs = case(torch.float32, t=t, d=d, v=v)
    words = chunk_words(t, v, 1)
    assert words == 512 and logits_bytes(config) == 4 * (t * words + 2 * t * d)
    found = {}
    for name, losses in (("chunked", chunked.token_losses), ("reference", reference.token_losses)):
        with LiveStorages() as storages:
            run(losses, words, inputs)
        found[name] = storages
    whole, to_weight, chunk = 4 * t * v, 4 * v * d, 4 * t * words
    assert found["reference"].largest == whole and found["reference"].peak > 2 * whole
    # The gradient of the weight, which autograd wants as a whole.
    assert found["chunked"].largest == to_weight
    copies = 4 * (t + v) * d  # leaves of `run`
    beyond = found["chunked"].peak - copies - to_weight
    assert chunk < beyond < 1.05 * logits_bytes(config) + 64 * t < whole / 20


def test_backward_keeps_features_and_three_numbers_of_a_token() -> None:
    hidden, weight, labels, _ = case()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        chunked.token_losses(hidden.requires_grad_(), weight.requires_grad_(), labels, 7)
    own = {x.untyped_storage().data_ptr(): x for x in saved}
    del own[weight.untyped_storage().data_ptr()], own[hidden.untyped_storage().data_ptr()]
    assert sorted(tuple(x.shape) for x in own.values()) == [(T,)] * 3


def test_words_of_a_chunk() -> None:
    # As few chunks as fit, of nearly equal size.
    assert chunk_words(8192, 32768, 512) == 16384
    assert chunk_words(4096, 163840, 512) == 32768
    assert chunk_words(8192, 40000, 512) == 13376, "three of them, rounded up to 64"
    assert chunk_words(1 << 20, 163840, 512) == 128
    assert chunk_words(1 << 30, 163840, 1) == 1, "never none"
    assert all(4 * t * chunk_words(t, v, 8) <= 8 << 20 for t in (1, 100, 7000) for v in (10, 1000, 163840))


def test_by_name() -> None:
    inputs = case(torch.float32, t=512, d=8, v=1024)  # 2 MiB of logits
    hidden, weight, labels, _ = inputs
    expected = chunked.token_losses(hidden, weight, labels, chunk_words(512, 1024, 1))
    assert torch.equal(token_losses(hidden, weight, labels, backend="chunked", logits_mib=1), expected)
    plain = token_losses(hidden, weight, labels, backend="reference", logits_mib=1)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="do not fit"):
        token_losses(hidden, weight, labels[1:], backend="chunked")


def test_the_kernels_in_the_interpreter() -> None:
    """Several blocks of a chunk, one chunk of all words, chunks of one word, in FP32 and BF16."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 6
    # To BF16 the interpreter cuts off where a GPU rounds: twice the error, of gradients alone.
    for number, errors in enumerate(found):
        bounds = [1.1, 1.1, 1.1] if number < 3 else [1.1, 2.5, 2.5]
        pairs = zip(errors["ours"], errors["plain"], bounds, strict=True)
        assert all(ours <= bound * plain + 1e-7 for ours, plain, bound in pairs), errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a CPU machine lacks")
def test_the_kernels_are_not_chosen_unasked_and_refuse_the_cpu() -> None:
    assert backends.resolve("cross_entropy", "auto", "cpu").name == "megatron"
    with pytest.raises(UserError, match=r"cross_entropy=triton: runs on cuda tensors, not cpu"):
        backends.resolve("cross_entropy", "triton", "cpu")
