"""Own times against peers."""

from __future__ import annotations

from types import SimpleNamespace

from k3train.config import Config
from k3train.fault_config import FaultConfig
from k3train.train.straggler import Stragglers, compare
from parallel.topology import Topology


def test_ranks_of_a_stage_are_compared_with_each_other() -> None:
    report = compare([1.0, 1.0, 1.5, 3.0, 3.0, 3.0], [0.0] * 6, [0, 0, 0, 1, 1, 1], [])
    assert report.slowest == 2
    assert report.ratios == [1.0, 1.0, 1.5, 1.0, 1.0, 1.0]
    assert report.metrics() == {"rank_time_max_over_median": 1.5, "rank_time_slowest": 2}


def test_of_two_ranks_the_slower_is_compared_with_the_faster_and_data_counts() -> None:
    report = compare([1.0, 1.0], [0.0, 1.0], [0, 0], [])
    assert report.ratios == [1.0, 2.0]
    assert "0.000" not in report.describe(1) and "1.000 s for data" in report.describe(1)


def test_stages_of_one_rank_are_compared_by_their_usual_share() -> None:
    report = compare([1.0, 4.0], [0.0, 0.0], [0, 1], [1.0, 2.0])
    assert report.ratios == [1.0, 2.0]


def stragglers(reports: int) -> Stragglers:
    config = Config(fault=FaultConfig(straggler_ratio=1.3, straggler_reports=reports))
    return Stragglers(config, SimpleNamespace(rank=0, topology=Topology(data=3)))  # type: ignore[arg-type]


def test_a_rank_is_named_once_after_enough_reports_in_a_row_and_again_when_it_is_well() -> None:
    watch, slow, well = stragglers(3), [1.0, 1.0, 1.3], [1.0, 1.0, 1.29]
    told = [
        watch.judge(compare(own, [0.0] * 3, [0] * 3, []))
        for own in (slow, slow, well, slow, slow, slow, slow, slow, well, well)
    ]
    assert [len(found) for found in told] == [0, 0, 0, 0, 0, 1, 0, 0, 1, 0]
    assert told[5] == [
        (2, "is slow in 3 reports in a row, 1.30 times the median of its peers: 1.300 s in operations, "
            "0.000 s for data")
    ]  # fmt: skip
    (rank, text), = told[8]  # fmt: skip
    assert rank == 2 and text.startswith("is no longer slow, 1.29 times")


def test_streaks_of_ranks_are_their_own() -> None:
    watch = stragglers(2)
    first, both = [1.0, 2.0, 1.0], [2.0, 2.0, 1.0]
    assert watch.judge(compare(first, [0.0] * 3, [0] * 3, [])) == []
    # Where most are slow none is: the median is theirs.
    assert watch.judge(compare(both, [0.0] * 3, [0] * 3, [])) == []
    assert watch.judge(compare(first, [0.0] * 3, [0] * 3, [])) == []
    watch.judge(compare(first, [0.0] * 3, [0] * 3, []))
