"""Masks, and how maps of segments are composed, against the definition token by token."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from k3train.ops.kda.context import Handover, continued, reach
from k3train.ops.kda.reference import recurrent_kda, segment_map
from k3train.ops.short_conv.halo import before_start, with_halo

IDS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 1, 2, 3, 3, 3, 3]])
STARTS = (0, 2, 4, 7, 8)


def test_a_share_continues_the_document_of_the_token_before() -> None:
    expected = [[False] * 3, [True, False, True], [True, True, False], [True, False, True]]
    assert continued(IDS, STARTS).tolist() == expected


def test_reach_counts_the_ranks_that_hold_the_edge_documents() -> None:
    assert reach(IDS, STARTS, 0) == [(0, 3), (0, 0), (0, 1)]
    assert reach(IDS, STARTS, 1) == [(1, 2), (0, 1), (1, 0)]
    assert reach(IDS, STARTS, 2) == [(2, 1), (1, 0), (0, 1)]
    assert reach(IDS, STARTS, 3) == [(3, 0), (0, 0), (1, 0)]


def test_reach_agrees_with_what_continues() -> None:
    crosses = continued(IDS, STARTS)
    for rank in range(4):
        for row, (before, _) in enumerate(reach(IDS, STARTS, rank)):
            assert (before > 0) == bool(crosses[rank, row])


@pytest.mark.parametrize("rank", range(4))
def test_incoming_state_is_that_of_the_tokens_before(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (torch.randn(3, 8, 2, 4, generator=generator, dtype=torch.float64) for _ in range(5))
    k, g, beta = torch.nn.functional.normalize(k, dim=-1), -g.square(), torch.sigmoid(beta[..., 0])
    maps = []
    for start, stop in pairwise(STARTS):
        share = [x[:, start:stop] for x in (k, v, g, beta)]
        transition, made = segment_map(*share, IDS[:, start:stop])
        maps.append(torch.cat((made, transition), dim=-1))
    crosses = continued(IDS, STARTS)[..., None, None, None]
    handover = Handover(None, rank, 4, crosses)  # type: ignore[arg-type]
    start = STARTS[rank]
    expected = torch.zeros(3, 2, 4, 4, dtype=torch.float64)
    if rank:
        before = [x[:, :start] for x in (q, k, v, g, beta)]
        _, expected = recurrent_kda(*before, scale=1.0, document_ids=IDS[:, :start])
        expected = expected * crosses[rank]
    torch.testing.assert_close(handover.incoming(torch.stack(maps)), expected, rtol=0, atol=1e-13)


def test_backward_composes_the_transposed_maps() -> None:
    """<G, S_in -> S_out> is the same from both sides."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(4, 1, 1, 3, 5, generator=generator, dtype=torch.float64)  # E 2 wide, M 3
    crosses = torch.ones(4, 1, 1, 1, 1, dtype=torch.bool)
    gradient = torch.randn(1, 1, 3, 2, generator=generator, dtype=torch.float64)
    state = torch.randn(1, 1, 3, 2, generator=generator, dtype=torch.float64)
    first = Handover(None, 0, 4, crosses)  # type: ignore[arg-type]
    mirrored = torch.cat((torch.zeros_like(maps[..., :2]), maps[..., 2:].transpose(-1, -2)), dim=-1)
    mirrored[3, ..., :2] = maps[3, ..., 2:].transpose(-1, -2) @ gradient
    carried = state
    for each in maps[1:]:
        carried = each[..., 2:] @ carried
    torch.testing.assert_close(
        (first.outgoing_gradient(mirrored) * state).sum(), (gradient * carried).sum(), rtol=1e-12, atol=1e-12
    )


def test_a_packing_of_whole_rows_hands_nothing_over() -> None:
    assert Handover.of(SimpleNamespace(span=None)) is None  # type: ignore[arg-type]


def test_columns_before_a_share_count_if_of_its_document() -> None:
    assert before_start(IDS, 4, 3).tolist() == [[True] * 3, [False, True, True], [False] * 3]
    assert before_start(IDS, 1, 3).tolist() == [[False, False, True]] * 2 + [[False] * 3]
    assert before_start(IDS, 0, 3).tolist() == [[False] * 3] * 3


def test_a_halo_belongs_to_the_first_document() -> None:
    x, halo = torch.ones(3, 4, 5), torch.zeros(3, 2, 5)
    rows, ids = with_halo(x, IDS[:, 4:], halo)
    assert rows.shape == (3, 6, 5) and rows[:, :2].eq(0).all()
    assert ids is not None and ids[1].tolist() == [1, 1, 1, 1, 1, 2]
    assert with_halo(x, None, halo)[1] is None
