"""The board of the watchdog, and what it says of a run that hangs."""

from __future__ import annotations

from pathlib import Path

from k3train.train.standing import Board, Standing, describe, named, suspects


def standing(rank: int, waiting: str = "", step: int = 5) -> Standing:
    return Standing(rank, f"node{rank}", 10, 3, 4, step, "forward_backward", "B(1,3)", waiting, 30.0)


def test_ranks_are_named_in_runs() -> None:
    assert named([3]) == "rank 3"
    assert named([9, 0, 1, 2]) == "ranks 0-2, 9"


def test_the_silent_are_suspected_first_then_who_waits_for_nobody_then_who_is_behind() -> None:
    waits = "in all_reduce of ranks 0-2"
    board = {0: standing(0, waits), 1: standing(1), 2: standing(2, waits, step=4)}
    assert suspects(board, [2]) == [2]
    assert suspects(board, []) == [1]
    assert suspects({0: board[0], 2: board[2]}, []) == [2]


def test_one_line_names_ranks_operations_and_groups() -> None:
    waits = "in all_reduce of ranks 0-2"
    text = describe({0: standing(0, waits), 1: standing(1), 2: standing(2, waits)}, [1], 31.0, 4)
    assert text == (
        "hang: no rank has moved for 31 s; ranks 1, 3 look stuck. "
        "rank 1 on node1: silent since step 5, forward_backward, B(1,3); "
        "ranks 0, 2: step 5, forward_backward, B(1,3), in all_reduce of ranks 0-2; rank 3: no entry"
    )


def test_entries_are_read_back_and_only_one_rank_condemns(tmp_path: Path) -> None:
    boards = [Board(tmp_path, rank, 2) for rank in (0, 1)]
    for board, waiting in zip(boards, ("a long wait " * 20, ""), strict=True):
        board.open()
        board.post(standing(board.rank, waiting))
    boards[0].post(standing(0))
    assert boards[1].read() == {0: standing(0), 1: standing(1)}
    assert not boards[0].condemned()
    assert [board.condemn("x") for board in boards] == [True, False]
    boards[0].open()
    assert not boards[0].condemned()
