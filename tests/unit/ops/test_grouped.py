import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.common.grouped_fit import Sample, fit, non_negative, put
from k3train.errors import UserError
from k3train.ops import backends, grouped
from k3train.ops.grouped import Segments, cost, grouped_mm, products

ROOT = Path(__file__).parents[3]
COUNTS = ([3, 0, 1, 8, 0], [0, 0, 5, 2, 4], [0, 0, 0, 0, 0], [40, 1, 1, 1, 1])
BACKENDS = {"cpu": {"loop": torch.float64, "grouped_mm": torch.bfloat16}}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights_of(count: int, o: int, i: int, layout: str, dtype: torch.dtype) -> list[Tensor]:
    """Weights [o, i] in one storage, rising or falling, apart, or own ones followed by slots elsewhere."""
    stack = normal(count, o, i, seed=1, dtype=dtype)
    if layout == "rising":
        return list(stack)
    if layout == "falling":
        return list(stack.flip(0))[::-1]
    if layout == "apart":
        return [weight.clone() for weight in stack]
    own = count // 2
    return [*stack[:own].clone(), *stack[own:].clone()]


def expected(rows: Tensor, grad: Tensor, weights: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
    """Output, gradients of rows and of weights, by autograd over one `linear` for each group."""
    rows = rows.detach().requires_grad_()
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    pieces = zip(rows.split(counts), leaves, strict=True)
    output = torch.cat([torch.nn.functional.linear(piece, weight) for piece, weight in pieces])
    return [output.detach(), *torch.autograd.grad(output, [rows, *leaves], grad)]


def bits(actual: Tensor, wanted: Tensor) -> bool:
    return actual.dtype == wanted.dtype and torch.equal(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("shape", [(64, 96), (7, 5)])
def test_on_a_cpu_auto_has_the_bits_of_one_linear_for_each_expert(
    dtype: torch.dtype, counts: list[int], shape: tuple[int, int]
) -> None:
    i, o = shape
    n = sum(counts)
    rows, grad = normal(n, i, dtype=dtype), normal(n, o, seed=2, dtype=dtype)
    weights = [weight.requires_grad_() for weight in weights_of(5, o, i, "apart", dtype)]
    rows.requires_grad_()
    output = grouped.grouped_linear(rows, weights, Segments.of(counts))
    found = [output, *torch.autograd.grad(output, [rows, *weights], grad)]
    assert all(map(bits, found, expected(rows, grad, weights, counts)))


@pytest.mark.parametrize("layout", ["rising", "falling", "apart", "slots"])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_mm_agrees_with_the_loop(layout: str, counts: list[int]) -> None:
    n, i, o = sum(counts), 16, 24
    segments, dtype = Segments.of(counts), torch.bfloat16
    rows, grad = normal(n, i, dtype=dtype), normal(n, o, seed=2, dtype=dtype)
    weights = weights_of(5, o, i, layout, dtype)
    for one in ("loop", "grouped_mm"):
        assert grouped.multiply(rows, weights, segments, backend=one).shape == (n, o)
    for name, args in (("multiply", (rows, weights)), ("input_gradient", (grad, weights))):
        a, b = (getattr(grouped, name)(*args, segments, backend=one) for one in ("grouped_mm", "loop"))
        torch.testing.assert_close(a, b)
    pairs = [grouped.weight_gradients(grad, rows, segments, backend=one) for one in ("grouped_mm", "loop")]
    for count, a, b in zip(counts, *pairs, strict=True):
        assert (a is None) == (b is None) == (count == 0)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_the_order_of_launch_changes_no_bit() -> None:
    segments, dtype, backend = Segments.of([3, 0, 1, 8, 2]), torch.float32, "loop"
    assert segments.order(largest_first=False) == [0, 2, 3, 4]
    assert segments.order(largest_first=True) == [3, 0, 4, 2]
    rows, grad = normal(14, 16, dtype=dtype), normal(14, 8, seed=2, dtype=dtype)
    weights = weights_of(5, 8, 16, "apart", dtype)
    kernels = backends.resolve("grouped", backend, "cpu", dtype).load()()
    for kernel, args in (
        (kernels.multiply, (rows, weights)),
        (kernels.input_gradient, (grad, weights)),
        (kernels.weight_gradients, (grad, rows)),
    ):
        a, b = (kernel(*args, segments, segments.order(first)) for first in (False, True))
        pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        assert all(x is y is None or torch.equal(x, y) for x, y in pairs)


def test_gradients_by_finite_differences_and_zero_for_an_empty_group() -> None:
    segments = Segments.of([2, 0, 3])
    weights = [weight.requires_grad_() for weight in weights_of(3, 4, 3, "apart", torch.float64)]
    rows = normal(5, 3).requires_grad_()

    def run(rows: Tensor, *weights: Tensor) -> Tensor:
        return grouped.grouped_linear(rows, weights, segments)

    assert torch.autograd.gradcheck(run, (rows, *weights))
    run(rows, *weights).sum().backward()
    assert torch.equal(weights[1].grad, torch.zeros(4, 3, dtype=torch.float64))


def test_only_the_gradients_asked_for_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError

    weights = weights_of(2, 4, 3, "apart", torch.float64)
    rows = normal(5, 3).requires_grad_()
    monkeypatch.setattr(products, "weight_gradients", refuse)
    grouped.grouped_linear(rows, weights, Segments.of([2, 3])).sum().backward()
    monkeypatch.undo()
    monkeypatch.setattr(products, "input_gradient", refuse)
    weights[0].requires_grad_()
    grouped.grouped_linear(rows.detach(), weights, Segments.of([2, 3])).sum().backward()
    assert weights[0].grad is not None and weights[1].grad is None


def test_runs_of_weights_at_equal_distances_are_found() -> None:
    Run, half = grouped_mm.Run, torch.bfloat16
    made = {layout: weights_of(6, 8, 16, layout, half) for layout in ("rising", "falling", "apart", "slots")}
    assert grouped_mm.runs(made["rising"]) == [Run(0, 6, 128)]
    assert grouped_mm.runs(made["rising"][::2]) == [Run(0, 3, 256)]
    assert grouped_mm.runs(made["falling"]) == [Run(0, 6, 0)]
    assert grouped_mm.runs(made["apart"]) == [Run(0, 6, 0)]
    assert grouped_mm.runs(made["slots"]) == [Run(0, 3, 128), Run(3, 6, 128)]
    assert grouped_mm.runs([made["apart"][0], *made["rising"]]) == [Run(0, 1, 0), Run(1, 7, 128)]
    # Two storages that happen to follow each other at the same distance.
    apart, spaced = made["apart"], normal(7, 8, 16, dtype=half)
    assert grouped_mm._equal_steps((0, 256, 512, 768), (), 256) == [Run(0, 4, 256)]
    assert grouped_mm._equal_steps((0, 256, 512, 768), (1, 1, 2, 2), 256) == [Run(0, 2, 256), Run(2, 4, 256)]
    assert grouped_mm._equal_steps((0, 256, 512, 768), (1, 2, 3, 3), 256) == [Run(0, 2, 0), Run(2, 4, 256)]
    mixed = [spaced[0], spaced[2], apart[1], *spaced[3:6]]
    assert grouped_mm.runs(mixed) == [Run(0, 2, 256), Run(2, 3, 0), Run(3, 6, 128)]
    transposed = [weight.t() for weight in normal(3, 16, 8, dtype=half)]
    assert grouped_mm.runs(transposed) == [Run(0, 3, 0)]
    odd = normal(3 * 129, dtype=half)
    assert grouped_mm.runs([odd[129 * g :][:128].view(8, 16) for g in range(3)]) == [Run(0, 3, 0)]


def test_copies_count_only_weights_between_the_first_and_last_group_with_rows() -> None:
    apart = weights_of(6, 8, 16, "apart", torch.bfloat16)
    assert grouped_mm.copied(apart, Segments.of([0, 2, 0, 1, 0, 0])) == 3
    assert grouped_mm.copied(apart, Segments.of([0] * 6)) == 0
    assert grouped_mm.copied(weights_of(6, 8, 16, "slots", torch.bfloat16), Segments.of([1] * 6)) == 0


def test_widths_and_dtypes_that_do_not_suit_are_refused() -> None:
    segments, weights = Segments.of([2]), [normal(8, 12, dtype=torch.bfloat16)]
    with pytest.raises(UserError, match=r"model\.backends\.grouped=grouped_mm: needs widths that are mult"):
        grouped.multiply(normal(2, 12, dtype=torch.bfloat16), weights, segments, backend="grouped_mm")
    with pytest.raises(UserError, match=r"takes torch\.bfloat16, not torch\.float32; use auto or loop"):
        grouped.multiply(torch.ones(2, 8), [torch.ones(8, 8)], segments, backend="grouped_mm")
    with pytest.raises(UserError, match=r"model\.backends\.grouped=te: runs on cuda tensors, not cpu"):
        grouped.multiply(torch.ones(2, 8), [torch.ones(8, 8)], segments, backend="te")


# The cost model


def test_a_load_is_a_few_rounded_sums() -> None:
    load = cost.Load.of([0, 31, 1, 64, 130, 0])
    assert (load.groups, load.tiles, load.steps, load.aligned) == (4, 1 + 1 + 1 + 2, 1 + 1 + 1 + 3, False)
    assert cost.Load.of([8, 0, 64]).aligned
    assert cost.Load.of([0, 0]) == cost.Load(0, 0, 0, 0, True)
    assert [cost.Load.of([n]).rows for n in range(1, 46)] == list(range(1, 46))
    assert all(abs(cost.Load.of([n]).rows / n - 1) < 0.012 for n in range(1000, 200_000, 977))
    assert cost.Load.of([5000, 3001]) == cost.Load.of([3003, 5001])


def test_features_of_a_case_worked_out_by_hand() -> None:
    # 2 groups of 240 rows and 1 of 16, weights [384, 256], 4 multiprocessors
    load = cost.Load(groups=3, rows=496, tiles=5, steps=9, aligned=True)
    found = dict(zip(cost.FEATURES, cost.features("multiply", load, 256, 384, 4), strict=True))
    assert found["launch"] == 1 and found["groups"] == 3 and found["tiles"] == 3 + 2 * 6
    assert found["gflop"] == pytest.approx(2e-9 * 496 * 256 * 384)
    assert found["tile_gflop"] == pytest.approx(2e-9 * 15 * 128 * 128 * 256)
    assert found["wave_gflop"] == pytest.approx(2e-9 * (15 + 3 * 4 / 2) * 128 * 128 * 256)
    assert found["ragged_gflop"] == 0
    assert found["megabytes"] == pytest.approx(2e-6 * (496 * 640 + 3 * 256 * 384))
    found = dict(zip(cost.FEATURES, cost.features("weight_gradients", load, 256, 384, 4), strict=True))
    # 3 * 2 tiles a group in 2 waves of 4, K is 9 * 64
    assert found["tiles"] == 18 and found["tile_gflop"] == pytest.approx(2e-9 * 6 * 128 * 128 * 576)
    assert found["wave_gflop"] == pytest.approx(2e-9 * 8 * 128 * 128 * 576)
    found = dict(zip(cost.FEATURES, cost.features("input_gradient", load, 256, 384, 4), strict=True))
    assert found["tiles"] == 5 * 2 and found["tile_gflop"] == pytest.approx(2e-9 * 10 * 128 * 128 * 384)


def planted(**device: Sequence[float]) -> cost.Model:
    """Coefficients for all products; the host needs 2 microseconds a group and 1 a copied weight."""
    sides = {name: dict.fromkeys(cost.PRODUCTS, tuple(terms)) for name, terms in device.items()}
    host = {name: dict.fromkeys(cost.PRODUCTS, (0.0, 2.0, 1.0)) for name in device}
    return cost.Model("planted", 4, sides, host)


def test_the_cheapest_is_chosen_and_copies_count_where_they_are_made() -> None:
    flat = [0.0] * (len(cost.FEATURES) + 1)
    model = planted(
        te=[500.0, *flat[1:]],
        loop=[0.0, 60.0, *flat[2:]],
        grouped_mm=[100.0, *flat[1:-1], 50.0],
    )
    few, many = cost.Load.of([100]), cost.Load.of([100] * 10)
    names = ("te", "grouped_mm", "loop")

    def choose(load: cost.Load, copied: int) -> str:
        return cost.choose(model, "multiply", load, 1024, 1024, copied, names).backend

    assert choose(few, 0) == "loop"
    assert choose(many, 0) == "grouped_mm"
    assert choose(many, 10) == "te"  # 10 weights of 2 MiB at 50 microseconds a megabyte
    assert cost.choose(model, "multiply", many, 1024, 1024, 0, ("loop",)).backend == "loop"
    assert model.microseconds("grouped_mm", "multiply", many, 8, 8, 10) == pytest.approx(100 + 50 * 1280e-6)
    assert model.microseconds("grouped_mm", "multiply", cost.Load.of([1] * 80), 8, 8) == 160  # the host
    assert choose(cost.Load.of([0, 0]), 0) == "loop"


def test_auto_looks_at_the_weights_only_where_their_place_can_change_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU with all backends; what runs is the loop."""
    flat = [0.0] * (len(cost.FEATURES) + 1)
    model = planted(te=[500.0, *flat[1:]], loop=[1e3, *flat[1:]], grouped_mm=[400.0, *flat[1:-1], 1e4])
    loop = backends.resolve("grouped", "loop", "cpu").load()()
    ran: list[str] = []
    looked: list[int] = []
    copied = grouped_mm.copied
    monkeypatch.setattr(products, "_usable", lambda *_: ("te", "grouped_mm", "loop"))
    monkeypatch.setattr(products, "_model", lambda _: model)
    monkeypatch.setattr(products, "_products", lambda name: ran.append(name) or loop)
    monkeypatch.setattr(grouped_mm, "copied", lambda *args: looked.append(copied(*args)) or looked[-1])
    segments, rows = Segments.of([4, 4, 4]), normal(12, 64, dtype=torch.bfloat16)
    for layout in ("rising", "apart"):
        grouped.multiply(rows, weights_of(3, 32, 64, layout, torch.bfloat16), segments)
    assert (ran, looked) == (["grouped_mm", "te"], [0, 3])
    grouped.weight_gradients(rows, rows, segments)
    model.device["grouped_mm"]["multiply"] = (600.0, *flat[1:-1], 1e4)
    cost.choose.cache_clear()
    grouped.multiply(rows, weights_of(3, 32, 64, "apart", torch.bfloat16), segments)
    assert (ran[2:], looked[2:]) == (["grouped_mm", "te"], [])


def test_order_is_a_variant_of_its_backend() -> None:
    flat = [0.0] * (len(cost.FEATURES) + 1)
    model = planted(**{"te": [2.0, *flat[1:]], "te+largest_first": [1.0, *flat[1:]]})
    load = cost.Load.of([100])
    model.host["te"]["multiply"] = model.host["te+largest_first"]["multiply"] = (0.0, 0.0, 0.0)
    assert cost.choose(model, "multiply", load, 8, 8, 0, ("te",)) == cost.Choice("te", largest_first=True)


def test_padding_follows_the_price_of_ragged_rows() -> None:
    ragged = cost.FEATURES.index("ragged_gflop")
    terms = [0.0] * (len(cost.FEATURES) + 1)
    terms[cost.FEATURES.index("gflop")] = 10.0
    arguments = (5000, 16, [(512, 512)], ("loop",))
    assert cost.padding(planted(loop=terms), *arguments) == 1
    terms[ragged] = 5.0
    assert cost.padding(planted(loop=terms), *arguments) == cost.ALIGNED


def test_the_fit_finds_planted_coefficients(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.rand(60, 4, generator=generator, dtype=torch.float64).numpy() + 0.01
    wanted = [3.0, 0.0, 0.5, 20.0]
    assert non_negative(terms, terms @ wanted) == pytest.approx(wanted, abs=1e-3)
    truth = planted(loop=[20.0, 3.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0])
    samples = []
    for groups in (2, 8, 32):
        for rows in (100, 1000, 3000):
            for shape in ((256, 384), (1024, 512)):
                load = cost.Load.of([rows] * groups)
                time = truth.microseconds("loop", "multiply", load, *shape)
                samples.append(Sample("loop", "multiply", (rows,) * groups, *shape, 0, time, 2.0 * groups))
    found = fit(samples, {"hardware": "planted"}, 4)
    put(found, tmp_path / "c.json")
    put(found, tmp_path / "c.json")
    (entry,) = json.loads((tmp_path / "c.json").read_text())
    model = cost.Model.read(entry)
    load = cost.Load.of([500] * 16)
    assert model.microseconds("loop", "multiply", load, 512, 512) == pytest.approx(
        truth.microseconds("loop", "multiply", load, 512, 512), rel=0.02
    )


def test_the_calibrated_machine_has_every_product_of_every_backend() -> None:
    model = cost.model_for("a machine that nobody measured")
    assert {name.partition("+")[0] for name in model.device} == {"te", "grouped_mm", "loop"}
    assert model.device.keys() == model.host.keys()
    for by_product in model.device.values():
        assert set(by_product) == set(cost.PRODUCTS)
        assert all(len(terms) == len(cost.FEATURES) + 1 for terms in by_product.values())
    assert cost.model_for(model.machine).machine == model.machine


# The benchmark


def quick(*arguments: str) -> str:
    command = [sys.executable, "benchmarks/grouped_gemm.py", "--quick", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_benchmark_compares_the_choice_with_each_backend(tmp_path: Path) -> None:
    figures = json.loads(quick("--json", str(tmp_path / "f.json"), "--rounds", "1").splitlines()[-1])
    assert json.loads((tmp_path / "f.json").read_text()) == figures
    rows = figures["rows"]
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        fastest = min(row["loop ms"], row["grouped_mm ms"])
        assert row["choice/best"] == pytest.approx(row["choice ms"] / fastest)
        assert row["chosen"] == "loop"
    assert figures["worst_over_best"] == max(row["choice/best"] for row in rows)
    assert set(figures["mean_gain"]) == {"loop", "grouped_mm"}


def test_a_calibration_can_be_fitted_again_to_what_it_measured(tmp_path: Path) -> None:
    first, again, kept = (tmp_path / name for name in ("first.json", "again.json", "kept.json"))
    quick("--calibrate", str(first), "--json", str(kept))
    quick("--calibrate", str(again), "--measured", str(kept))
    assert json.loads(first.read_text()) == json.loads(again.read_text())
    (entry,) = json.loads(first.read_text())
    model = cost.Model.read(entry)
    assert model.microseconds("loop", "multiply", cost.Load.of([64] * 8), 64, 96) > 0
    copied = {sample["copied"] for sample in json.loads(kept.read_text())["samples"]}
    assert copied == {0, 8}
