"""Images that cannot be used: why, how many, and which came first."""

from __future__ import annotations

from collections.abc import Callable

# Reasons that the next run may not meet.
TRANSIENT = frozenset({"missing", "unreadable", "out of memory"})


class ImageError(Exception):
    """An image that cannot be used. `reason` is a few words, the same for every image of its kind."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Skips:
    """Counts what was left out, by reason, and warns once for each reason.

    An item that fails again, as in a second epoch, is not counted again.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.examples: dict[str, str] = {}
        # Dicts in place of sets, for their order.
        self._seen: dict[str, dict[str, None]] = {}

    def add(self, reason: str, where: str) -> None:
        """Count `where`, the name of an image, annotation or document."""
        # JSON can hold half of a surrogate pair, which cannot be printed.
        where = where.encode("utf-8", "backslashreplace").decode()
        if reason not in self.examples:
            self.examples[reason] = where
            self.warn(f"data: {where} is left out ({reason}); more of this kind are counted, not listed")
        self._seen.setdefault(reason, {})[where] = None

    def entries(self) -> list[tuple[str, str]]:
        """All that was left out, as (reason, name)."""
        return [(reason, name) for reason, names in self._seen.items() for name in names]

    @property
    def counts(self) -> dict[str, int]:
        """How many were left out, by reason."""
        return {reason: len(names) for reason, names in self._seen.items()}

    @property
    def total(self) -> int:
        """How many were left out."""
        return sum(self.counts.values())

    def summary(self) -> str:
        """Total and reasons with their first example, in one line; empty when nothing was left out."""
        if not self.total:
            return ""
        parts = (f"{count} {reason} (first {self.examples[reason]})" for reason, count in self.counts.items())
        return f"left out {self.total}: {', '.join(parts)}"
