"""Shards of work spread over processes, with one progress bar and one error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

import rich.progress

from ..errors import UserError

REFRESH_SECONDS = 0.2


class Sized(Protocol):
    """Work of which the size in bytes is known."""

    @property
    def size(self) -> int: ...


class Stopped(Exception):
    """Another shard failed, so this one gave up."""


# (job, shard, report): `report(bytes, tokens)` counts what was done, and raises Stopped to end the work.
Work = Callable[[Any, Any, Callable[[int, int], None]], None]


class Counters:
    """Bytes and tokens done, in memory that processes share: a slot for each shard, so no lock."""

    def __init__(self, num_shards: int) -> None:
        self.values = multiprocessing.RawArray("q", 2 * num_shards + 1)

    def add(self, slot: int, num_bytes: int, num_tokens: int) -> None:
        """Count work done on the shard of `slot`."""
        self.values[2 * slot] += num_bytes
        self.values[2 * slot + 1] += num_tokens

    def totals(self) -> tuple[int, int]:
        """Bytes and tokens over all shards."""
        return sum(self.values[:-1:2]), sum(self.values[1:-1:2])

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return bool(self.values[-1])

    def stop(self) -> None:
        """Ask every worker to give up."""
        self.values[-1] = 1


class Progress:
    """A bar of bytes read, with MB/s and tokens."""

    def __init__(self, shards: Sequence[Sized], todo: Sequence[Sized], *, shown: bool) -> None:
        self.total = sum(shard.size for shard in shards)
        self.kept = self.total - sum(shard.size for shard in todo)
        self.shown = shown

    @contextmanager
    def bar(self, counters: Counters) -> Iterator[Callable[[], None]]:
        """A function that brings the bar up to date with `counters`."""
        columns = (
            rich.progress.TextColumn("preparing"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TextColumn("{task.fields[tokens]:,} tokens"),
            rich.progress.TimeRemainingColumn(),
        )
        with rich.progress.Progress(*columns, disable=not self.shown) as display:
            task = display.add_task("", total=self.total, completed=self.kept, tokens=0)

            def refresh() -> None:
                num_bytes, num_tokens = counters.totals()
                display.update(task, completed=self.kept + num_bytes, tokens=num_tokens)

            yield refresh
            refresh()


def run_shards(work: Work, job: Any, shards: Sequence[Sized], workers: int, progress: Progress) -> None:
    """Run `work(job, shard, report)` for every shard; the first shard's error wins, whatever the timing.

    Raises:
        UserError: a worker died.
    """
    workers = min(workers, len(shards))
    counters = Counters(len(shards))
    if workers <= 1:
        _run_here(work, job, shards, counters, progress)
        return
    # Spawned, so that no thread or lock of the caller is copied half-way.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (counters,)) as pool:
        futures = [pool.submit(_run_in_worker, work, job, shard, slot) for slot, shard in enumerate(shards)]
        try:
            with progress.bar(counters) as refresh:
                _wait(futures, refresh)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died (out of memory?); finished parts are kept, try fewer workers"
            ) from error
        finally:
            counters.stop()
            pool.shutdown(cancel_futures=True)


def _run_here(work: Work, job: Any, shards: Sequence[Sized], counters: Counters, progress: Progress) -> None:
    with progress.bar(counters) as refresh:
        shown = time.monotonic()
        for slot, shard in enumerate(shards):

            def report(num_bytes: int, num_tokens: int, slot: int = slot) -> None:
                nonlocal shown
                counters.add(slot, num_bytes, num_tokens)
                if time.monotonic() - shown > REFRESH_SECONDS:
                    refresh()
                    shown = time.monotonic()

            work(job, shard, report)


def _wait(futures: list[Future[None]], refresh: Callable[[], None]) -> None:
    waiting: set[Future[None]] = set(futures)
    failed = False
    while waiting and not failed:
        done, waiting = wait(waiting, REFRESH_SECONDS, FIRST_EXCEPTION)
        failed = any(future.exception() for future in done)
        refresh()
    if failed:
        # A shard ahead of the failed one, still running, may fail too; the first in order is the one to show.
        for future in futures:
            future.result()


_counters: Counters | None = None


def _start_worker(counters: Counters) -> None:
    global _counters
    _counters = counters
    # The caller decides what Ctrl-C means; a worker whose caller was killed must not stay behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(work: Work, job: Any, shard: Any, slot: int) -> None:
    counters = _counters
    assert counters is not None

    def report(num_bytes: int, num_tokens: int) -> None:
        counters.add(slot, num_bytes, num_tokens)
        if counters.stopped:
            raise Stopped

    work(job, shard, report)
