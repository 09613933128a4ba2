import io

import pytest
from rich.console import Console

from k3train.log.progress import Progress, describe, short_number, short_time


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)


def test_without_a_terminal_lines_come_by_steps_and_seconds():
    clock, console = Clock(), plain()
    with Progress(40, console=console, every=10, seconds=5.0, clock=clock) as progress:
        for step in range(1, 41):
            clock.now += 0.4
            progress.update(step, loss=2.0, tokens_per_second=12345.0)
    steps = [line.split()[1] for line in console.file.getvalue().splitlines()]
    assert steps == ["1/40", "14/40", "27/40", "40/40"]
    assert console.file.getvalue().splitlines()[1] == "step 14/40  loss 2.0000  12.3k tok/s  ETA 10s"


def test_long_messages_and_brackets_are_printed_as_they_are():
    console = plain()
    text = "[rank 0] " + "word " * 40 + "[/bold] :smile:"
    Progress(1, console=console).message(text)
    assert console.file.getvalue() == text + "\n"


def test_other_ranks_print_nothing():
    console = plain()
    with Progress(1, console=console, writer=False) as progress:
        progress.update(1, loss=1.0)
        progress.message("hello")
    assert console.file.getvalue() == ""


def test_messages_remain_when_steps_are_not_shown():
    console = plain()
    with Progress(1, console=console, steps_shown=False) as progress:
        progress.update(1, loss=1.0)
        progress.message("saved")
    assert console.file.getvalue() == "saved\n"


@pytest.mark.parametrize("width", [140, 80, 40])
def test_the_bar_fits_its_terminal(width):
    console = terminal(width)
    with Progress(100, console=console) as progress:
        progress.update(50, loss=1.2345, tokens_per_second=99.0)
        progress.message("[saved] step 50")
    text = console.file.getvalue()
    assert "50" in text
    assert "1.2345" in text
    assert "[saved] step 50" in text
    bar = Progress(100, console=terminal(width))
    bar.update(50, loss=1.2345, tokens_per_second=99.0)
    rendered = Console(width=width, file=io.StringIO())
    assert bar._bar is not None
    rendered.print(bar._bar.get_renderable())
    bar.close()
    assert len(rendered.file.getvalue().splitlines()) == 1
    assert ("━" in rendered.file.getvalue()) == (width >= 72)


def test_an_exception_leaves_the_cursor_visible():
    console = terminal(80)
    with pytest.raises(ZeroDivisionError), Progress(10, console=console) as progress:
        progress.update(1)
        raise ZeroDivisionError
    text = console.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    progress.close()


def test_time_left_counts_only_the_steps_of_this_start():
    clock = Clock()
    progress = Progress(1000, start=900, console=plain(), clock=clock)
    assert progress.seconds_left() is None
    for step in range(901, 911):
        clock.now += 2.0
        progress.update(step)
    assert progress.seconds_left() == pytest.approx(180.0)


def test_numbers_are_short():
    assert [short_number(value) for value in (0.5, 999.0, 999.9, 12345.0, 2.5e9)] == [
        "0.5",
        "999",
        "1k",
        "12.3k",
        "2.5G",
    ]
    assert [short_time(value) for value in (59.4, 61, 3725, 90000)] == ["59s", "1m01s", "1h02m", "1d01h"]
    assert describe(float("nan"), None, None) == "loss nan"
