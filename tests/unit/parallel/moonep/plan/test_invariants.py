"""Every rule that a plan can break is found and named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from parallel.moonep.plan import Plan, PlanError, check, plan
from parallel.moonep.plan.invariants import check_allocation
from tests.unit.parallel.moonep.plan.conformance import CASES, counts_of

CASE = CASES["unequal"]  # five ranks of six experts, segments of four rows


@cache
def made() -> tuple[Plan, Tensor]:
    choices = CASE.choices()
    counts = counts_of(choices, CASE.experts)
    return plan(counts, choices[0], 0, pad=CASE.pad), counts


def changed(name: str, *at: int, add: int) -> Plan:
    tensor = getattr(made()[0], name).clone()
    tensor[at] += add
    return replace(made()[0], **{name: tensor})


def refused(broken: Plan) -> str:
    with pytest.raises(PlanError) as error:
        check(broken, made()[1])
    return str(error.value)


def test_the_plan_itself_passes() -> None:
    check(*made())


def test_an_allocation_names_the_first_rank_and_expert() -> None:
    allocation = made()[0]
    remote = int(allocation.slots[0, 0])
    taken = int(allocation.alloc[0, remote])
    assert refused(changed("alloc", 0, remote, add=-taken - 1)) == f"rank 0, expert {remote}: negative rows"
    lost = refused(changed("alloc", 0, remote, add=-1))
    assert lost == f"expert {remote}: not every entry is computed once"
    home = allocation.alloc.clone()
    home[0, remote] -= taken
    home[remote // CASE.places, remote] += taken
    assert refused(replace(allocation, alloc=home)) == "rank 0: not its capacity of rows"


def test_more_remote_experts_than_slots_are_refused() -> None:
    counts = torch.tensor([[2, 2, 2, 2, 2, 2, 0, 0]] * 4)
    alloc = torch.zeros(4, 8, dtype=torch.int32)
    for rank, row in enumerate(
        [[8, 4, 0, 0, 0, 0], [0, 4, 8, 0, 0, 0], [0, 0, 0, 6, 6, 0], [0, 0, 0, 2, 2, 8]]
    ):
        alloc[rank, :6] = torch.tensor(row)
    with pytest.raises(PlanError, match="^rank 3: more than 2 slots used$"):
        check_allocation(alloc, counts)


def test_cases_beside_each_other_are_told_apart() -> None:
    allocation, counts = made()
    both = torch.stack([allocation.alloc, changed("alloc", 1, 2, add=1).alloc])
    with pytest.raises(PlanError, match="^case 1, expert 2: not every entry"):
        check_allocation(both, torch.stack([counts, counts]))


def test_segments_that_do_not_fit_are_refused() -> None:
    whole = made()[0]
    assert refused(changed("ends", 2, 4, add=4)) == "rank 2, segment 4: segments overlap or leave a gap"
    last = int(whole.ends[:, -1].max())
    assert "more rows than the buffer's" in refused(replace(whole, stride=last - 1))
    slots = whole.slots.clone()
    expert = int(slots[0, 0])
    slots[0, 0] = -1
    assert "overlap or leave a gap" in refused(replace(whole, slots=slots))
    assert refused(changed("starts", 0, expert, add=1)) == (
        f"rank 0, expert {expert}: rows start outside their segment"
    )


def test_rows_and_announced_entries_must_agree() -> None:
    whole = made()[0]
    rows = whole.rows.clone()
    rows[1] = rows[0]
    assert "two entries in one row" in refused(replace(whole, rows=rows))
    rows = whole.rows.clone()
    rows[5] = 4 * whole.stride + whole.stride - 1 if rows[5] < 4 * whole.stride else whole.stride - 1
    assert "sends otherwise than announced" in refused(replace(whole, rows=rows))
    assert refused(changed("send", 2, 1, add=1)) == "rank 2: does not send all its entries"
    send = whole.send.clone()
    send[1, 0] += 1
    send[1, 1] -= 1
    assert "rank 0: does not receive all its rows" in refused(replace(whole, send=send))
