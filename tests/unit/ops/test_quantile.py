"""Letters: t tokens, E experts, k active experts."""

import torch
from torch import Tensor

from k3train.ops import quantile

FIGURE = [
    (32, 12, 5, 4), (16, 31, 7, 8), (14, 21, 5, 20), (32, 14, 7, 6),
    (21, 12, 5, 20), (18, 31, 13, 4), (22, 10, 21, 2), (16, 8, 21, 12),
]  # fmt: skip


def make_scores(t: int, E: int, seed: int = 0) -> Tensor:
    """Sigmoid scores with some experts liked far more than others."""
    generator = torch.Generator().manual_seed(seed)
    liking = torch.randn(E, generator=generator)
    return torch.sigmoid(torch.randn(t, E, generator=generator) + liking)


def loads(indices: Tensor, E: int) -> Tensor:
    return torch.bincount(indices.flatten(), minlength=E)


def order_statistic(scores: Tensor, cutoff: Tensor, top_k: int) -> Tensor:
    """The ceil(t k / E)-th smallest required bias, which the histogram estimates."""
    t, E = scores.shape
    return (cutoff[:, None] - scores).sort(0).values[-(-t * top_k // E) - 1]


def test_route_adds_the_bias_and_returns_the_runner_up() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.4, 0.1]])
    indices, cutoff = quantile.route(scores, torch.tensor([-0.6, 0.0, 0.0, 0.35]), 2)
    assert indices.tolist() == [[1, 3]]
    assert cutoff.item() == torch.tensor(0.4).item()


def test_the_figure_of_the_report() -> None:
    margins = torch.tensor(FIGURE, dtype=torch.float64)
    assert loads(margins.argmax(1), 4).tolist() == [4, 3, 1, 0]
    bias = quantile.bias_exact(margins, torch.zeros(8, dtype=torch.float64), 1)
    cuts = torch.tensor([22.0, 21, 13, 12], dtype=torch.float64)
    torch.testing.assert_close(bias, cuts.mean() - cuts)
    assert ((margins - cuts) > 0).sum(0).tolist() == [2, 2, 2, 2]
    assert loads((margins + bias).argmax(1), 4).tolist() == [2, 2, 2, 2]


def test_histogram_stays_within_one_bin_of_the_order_statistic() -> None:
    for seed, (t, E, k, bins) in enumerate([(512, 16, 4, 1000), (333, 24, 5, 100), (64, 8, 1, 37)]):
        scores = make_scores(t, E, seed)
        bias = 0.2 * torch.randn(E, generator=torch.Generator().manual_seed(seed))
        _, cutoff = quantile.route(scores, bias, k)
        histogram = quantile.required_bias_histogram(scores, cutoff, bias, bins)
        width = ((bias.max() - bias.min() + 2) / bins).item()
        error = quantile.histogram_quantile(histogram, bias, k) - order_statistic(scores, cutoff, k)
        assert error.abs().max().item() <= width + 1e-6
        assert error.abs().max().item() > 0


def test_interpolation_inside_the_bin_by_hand() -> None:
    histogram = torch.tensor([[1, 0, 4, 3], [0, 8, 0, 0]], dtype=torch.int32)
    bias = torch.tensor([0.0, 2.0])  # bins of width 1 from -1
    found = quantile.histogram_quantile(histogram, bias, 1)  # q = 4
    torch.testing.assert_close(found, torch.tensor([-1 + 2 + 3 / 4, -1 + 1 + 4 / 8], dtype=torch.float64))


def test_a_load_that_is_no_integer_rounds_up() -> None:
    histogram = torch.tensor([[2, 0, 1], [2, 1, 0], [0, 3, 0]], dtype=torch.int32)  # q = 3 * 2 / 3 = 2
    assert quantile.histogram_quantile(histogram, torch.zeros(3), 2)[0] == -1 + 2 / 3
    found = quantile.histogram_quantile(torch.tensor([[2, 0, 3], [5, 0, 0]]), torch.zeros(2), 1)  # q = 2.5
    assert found[0].item() > -1 + 2 * 2 / 3


def test_histogram_does_not_depend_on_how_tokens_are_split() -> None:
    scores, bias = make_scores(300, 12), torch.linspace(-0.2, 0.3, 12)
    _, cutoff = quantile.route(scores, bias, 3)
    whole = quantile.required_bias_histogram(scores, cutoff, bias)
    pieces = zip(scores.split([7, 93, 200]), cutoff.split([7, 93, 200]), strict=True)
    pooled = sum(quantile.required_bias_histogram(*piece, bias) for piece in pieces)
    assert torch.equal(whole, pooled)
    assert whole.dtype == torch.int32
    assert whole.sum(1).tolist() == [300] * 12


def test_padding_is_left_out() -> None:
    scores, bias = make_scores(50, 6), torch.zeros(6)
    _, cutoff = quantile.route(scores, bias, 2)
    valid = torch.arange(50) % 3 > 0
    masked = quantile.required_bias_histogram(scores, cutoff, bias, valid=valid)
    assert torch.equal(masked, quantile.required_bias_histogram(scores[valid], cutoff[valid], bias))


def test_nothing_counted_leaves_the_bias() -> None:
    bias = torch.tensor([0.1, -0.1, 0.25])
    assert torch.equal(quantile.bias_from_histogram(torch.zeros(3, 10, dtype=torch.int32), bias, 1), bias)


def test_bias_is_centred_and_exact_form_agrees() -> None:
    scores, bias = make_scores(400, 16), torch.zeros(16)
    _, cutoff = quantile.route(scores, bias, 4)
    new = quantile.bias_from_histogram(quantile.required_bias_histogram(scores, cutoff, bias), bias, 4)
    exact = quantile.bias_exact(scores, cutoff, 4)
    assert abs(new.mean().item()) < 1e-6 and abs(exact.mean().item()) < 1e-6
    assert (new - exact).abs().max() < 0.03
    assert new.dtype == torch.float32


def test_loads_even_out_on_a_fixed_batch() -> None:
    E, k = 32, 4
    scores = make_scores(2048, E)
    ratios = {}
    for form in ("exact", "histogram"):
        bias, ratios[form] = torch.zeros(E), []
        for _ in range(7):
            indices, cutoff = quantile.route(scores, bias, k)
            ratios[form].append(loads(indices, E).max().item() * E / (2048 * k))
            if form == "exact":
                bias = quantile.bias_exact(scores, cutoff, k)
            else:
                histogram = quantile.required_bias_histogram(scores, cutoff, bias)
                bias = quantile.bias_from_histogram(histogram, bias, k)
    for form, bound in (("exact", 1.07), ("histogram", 1.08)):
        assert ratios[form][0] > 2.5
        assert ratios[form][-1] < bound
