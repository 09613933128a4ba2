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
BYTES, TOKENS, STOP = range(3)


class Sized(Protocol):
    """Work of which the size in bytes is known."""

    number: int
    size: int


class Stopped(Exception):
    """Another shard failed, so this one gave up."""


# (job, shard, report): `report(bytes, tokens)` counts what was done, and raises Stopped to end the work.
Work = Callable[[Any, Any, Callable[[int, int], None]], None]


class Progress:
    """A bar of bytes read, with MB/s and tokens."""

    def __init__(self, shards: Sequence[Sized], todo: Sequence[Sized], *, shown: bool) -> None:
        self.total = sum(shard.size for shard in shards)
        self.kept = self.total - sum(shard.size for shard in todo)
        self.shown = shown

    @contextmanager
    def bar(self, counters: Any) -> Iterator[Callable[[], None]]:
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
                display.update(task, completed=self.kept + counters[BYTES], tokens=counters[TOKENS])

            yield refresh
            refresh()


def run_shards(work: Work, job: Any, shards: Sequence[Sized], workers: int, progress: Progress) -> None:
    """Run `work(job, shard, report)` for every shard; the first shard's error wins, whatever the timing.

    Raises:
        UserError: a worker died.
    """
    workers = min(workers, len(shards))
    if workers <= 1:
        _run_here(work, job, shards, progress)
        return
    # Spawned, so that no thread or lock of the caller is copied half-way.
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 3)
    with ProcessPoolExecutor(workers, context, _start_worker, (counters,)) as pool:
        futures = {pool.submit(_run_in_worker, work, job, shard): shard.number for shard in shards}
        try:
            with progress.bar(counters) as refresh:
                _wait(futures, refresh)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died (out of memory?); finished parts are kept, run again with fewer workers"
            ) from error
        finally:
            counters[STOP] = 1
            pool.shutdown(cancel_futures=True)


def _run_here(work: Work, job: Any, shards: Sequence[Sized], progress: Progress) -> None:
    counters = [0, 0, 0]
    with progress.bar(counters) as refresh:
        shown = time.monotonic()

        def report(num_bytes: int, num_tokens: int) -> None:
            nonlocal shown
            counters[BYTES] += num_bytes
            counters[TOKENS] += num_tokens
            if time.monotonic() - shown > REFRESH_SECONDS:
                refresh()
                shown = time.monotonic()

        for shard in shards:
            work(job, shard, report)


def _wait(futures: dict[Future[None], int], refresh: Callable[[], None]) -> None:
    waiting: set[Future[None]] = set(futures)
    while waiting:
        done, waiting = wait(waiting, REFRESH_SECONDS, FIRST_EXCEPTION)
        refresh()
        if any(future.exception() for future in done):
            break
    # A shard ahead of the failed one may fail too; its error is the one to show.
    failed = min((number for future, number in futures.items() if _failed(future)), default=None)
    for future, number in sorted(futures.items(), key=lambda entry: entry[1]):
        if failed is not None and number <= failed:
            future.result()


def _failed(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


_counters: Any = None


def _start_worker(counters: Any) -> None:
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


def _run_in_worker(work: Work, job: Any, shard: Any) -> None:
    def report(num_bytes: int, num_tokens: int) -> None:
        with _counters.get_lock():
            _counters[BYTES] += num_bytes
            _counters[TOKENS] += num_tokens
        if _counters[STOP]:
            raise Stopped

    work(job, shard, report)
