"""What a person at the terminal sees of a run: a bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

WIDE = 72
WINDOW = 32


class Progress:
    """Steps done of steps to do, with loss, tokens/s and the time left. Use as a context manager."""

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        writer: bool = True,
        steps_shown: bool = True,
        console: Console | None = None,
        every: int = 10,
        seconds: float = 5.0,
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` steps, or other units, `start` of them done before. Only the `writer` rank prints.

        `steps_shown=False` leaves messages only. Without a terminal a line is printed for the first and the
        last step and, in between, each `every` steps but no oftener than every `seconds`.
        """
        self._total = total
        self._step = start
        self._writer = writer
        self._steps_shown = steps_shown
        self._console = console or Console()
        self._every = every
        self._seconds = seconds
        self._unit = unit
        self._clock = clock
        self._times: deque[tuple[int, float]] = deque([(start, clock())], maxlen=WINDOW)
        self._printed_at = -float("inf")
        self._printed_step = start
        self._bar: RichProgress | None = None
        if writer and steps_shown and self._console.is_terminal:
            self._bar = make_bar(self._console)
            self._task = self._bar.add_task("", total=total, completed=start, numbers="")
            self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, step: int, *, loss: float | None = None, tokens_per_second: float | None = None) -> None:
        """`step` is done."""
        self._step = step
        self._times.append((step, self._clock()))
        if not self._writer or not self._steps_shown:
            return
        wide = self._console.width >= WIDE
        numbers = describe(loss, tokens_per_second, self.seconds_left(), wide=wide)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif self._line_due(step):
            self._printed_at, self._printed_step = self._clock(), step
            self._print(f"{self._unit} {step}/{self._total}  {numbers}")

    def message(self, text: str) -> None:
        """Print `text` as it is, above the bar."""
        if self._writer:
            self._print(text)

    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the latest steps; None before the first."""
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step <= first_step:
            return None
        return (last_time - first_time) / (last_step - first_step) * max(0, self._total - last_step)

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back; safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line_due(self, step: int) -> bool:
        if step == self._total or self._printed_at == -float("inf"):
            return True
        return step - self._printed_step >= self._every and self._clock() - self._printed_at >= self._seconds

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            # Rich would wrap at 80 columns here, and one write keeps lines of several ranks apart.
            self._console.file.write(text + "\n")
            self._console.file.flush()


def make_bar(console: Console) -> RichProgress:
    """A bar that gives its width to the numbers on a narrow terminal."""
    columns: list[Any] = [TextColumn("[bold]{task.completed:.0f}[/]/{task.total:.0f}")]
    if console.width >= WIDE:
        columns.insert(0, BarColumn(bar_width=None))
    columns.append(TextColumn("{task.fields[numbers]}", markup=False))
    return RichProgress(*columns, console=console, expand=console.width >= WIDE, refresh_per_second=4)


def describe(
    loss: float | None, tokens_per_second: float | None, seconds_left: float | None, *, wide: bool = True
) -> str:
    """The numbers beside a step."""
    parts = []
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if tokens_per_second is not None:
        parts.append(f"{short_number(tokens_per_second)} tok/s")
    if seconds_left is not None:
        parts.append(f"{'ETA ' if wide else ''}{short_time(seconds_left)}")
    return ("  " if wide else " ").join(parts)


def short_number(value: float) -> str:
    """Three significant digits with k, M, G, T: 12345 -> 12.3k."""
    for suffix in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}T"


def short_time(seconds: float) -> str:
    """The two largest units of a duration: 3725 -> 1h02m."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{whole % 60:02d}s"
    return f"{whole}s"
