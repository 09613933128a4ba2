"""What the device did in one call: computing, copying to and from the host, both at once, nothing."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

Interval = tuple[float, float]

COMPUTING = ("kernel", "gpu_memset")


def device_time(function: Callable[[], None], trace: Path | None = None) -> dict[str, float]:
    """Milliseconds of one call: `wall`, `computing`, `out` and `back` (copies to and from the host), `hidden`
    (copies beneath kernels), `idle` (no kernel runs). Its Chrome trace is left in the file `trace`.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        text = file.read_bytes()
    if trace is not None:
        trace.write_bytes(gzip.compress(text, 6))
    return summary(json.loads(text)["traceEvents"])


def summary(events: list[dict]) -> dict[str, float]:  # type: ignore[type-arg]
    """The figures of `device_time` from the events of a Chrome trace, whose times are microseconds."""
    kernels = merged(_spans(events, lambda e: e.get("cat") in COMPUTING or "DtoD" in e.get("name", "")))
    out = merged(_spans(events, lambda e: "DtoH" in e.get("name", "") and e.get("cat") == "gpu_memcpy"))
    back = merged(_spans(events, lambda e: "HtoD" in e.get("name", "") and e.get("cat") == "gpu_memcpy"))
    everything = merged([*kernels, *out, *back])
    wall = everything[-1][1] - everything[0][0] if everything else 0.0
    copies = merged([*out, *back])
    return {
        "wall": wall / 1e3,
        "computing": total(kernels) / 1e3,
        "out": total(out) / 1e3,
        "back": total(back) / 1e3,
        "hidden": (total(kernels) + total(copies) - total(everything)) / 1e3,
        "idle": (wall - total(kernels)) / 1e3,
    }


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order and without overlap."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def total(spans: Iterable[Interval]) -> float:
    """Length of intervals that do not overlap."""
    return sum(end - begin for begin, end in spans)


def _spans(events: list[dict], wanted: Callable[[dict], bool]) -> list[Interval]:  # type: ignore[type-arg]
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if "dur" in e and "cat" in e and wanted(e)]
