"""Where a rank stands in its table: the executor writes it, other threads read it. Imports no torch."""

from __future__ import annotations

from typing import Any


class Place:
    """What the executor is at; a few attributes, so that keeping it costs nothing."""

    __slots__ = ("action", "beats", "item")

    def __init__(self) -> None:
        self.action = ""
        """run, recv, wait or send; empty outside of a table."""
        self.item: Any = None
        """The `table.Op` that runs, or the `messages.Message` that is moved or waited for."""
        self.beats = 0
        """Counts everything that was begun."""

    def at(self, action: str, item: Any) -> None:
        """`item` begins."""
        self.action, self.item = action, item
        self.beats += 1
