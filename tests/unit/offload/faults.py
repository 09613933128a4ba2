"""File engines that fail as they are told to."""

from __future__ import annotations

import errno
import os
import time

from torch import Tensor

from offload.files.engine import ThreadEngine, Transfer


class Faulty(ThreadEngine):
    """An engine that fails as it is told to."""

    def __init__(self, *, direct: bool = True) -> None:
        super().__init__(direct=direct)
        self.fail_writes_after: int | None = None
        self.writes = 0
        self.drop_writes = False
        self.delay = 0.0

    def write(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """See `FileEngine`."""
        self.writes += 1
        if self.fail_writes_after is not None and self.writes > self.fail_writes_after:
            return Broken(errno.ENOSPC)
        if self.delay:
            time.sleep(self.delay)
        return Done() if self.drop_writes else super().write(file, offset, memory)


class Broken:
    """A transfer that failed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        """See `Transfer`."""
        raise OSError(self.number, os.strerror(self.number))


class Done:
    """A transfer that did nothing."""

    def wait(self) -> None:
        """See `Transfer`."""
