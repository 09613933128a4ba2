"""TensorBoard event files, written with the `tensorboard` package alone.

Its own EventFileWriter queues to a thread and can block or lose an error there; records are written here
directly instead, so that a full disk shows as OSError in `log`.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from .panels import as_regex, sections

FILE_VERSION = "brain.Event:2"
_file_numbers = itertools.count()


class TensorBoardSink:
    """One event file in `run_dir/tensorboard`."""

    def __init__(self, run_dir: str | os.PathLike[str], *, resume_step: int) -> None:
        """Open a new event file that hides what earlier files hold beyond `resume_step`. Raises OSError."""
        folder = Path(run_dir) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names; the step orders restarts within a second.
        stamp = f"{int(time.time()):010d}.{resume_step:010d}"
        name = f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._records = RecordWriter(open(folder / name, "wb"))  # noqa: SIM115
        self._write(event_pb2.Event(wall_time=time.time(), file_version=FILE_VERSION))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(wall_time=time.time(), step=resume_step + 1, session_log=start))
        self._write(event_pb2.Event(wall_time=time.time(), summary=layout_summary()))
        self._records.flush()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write every number of `metrics` (rounded to float32, the format's own limit). Raises OSError."""
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, Real) and name != "step"
        ]
        summary = summary_pb2.Summary(value=values)
        self._write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())


def layout_summary() -> summary_pb2.Summary:
    """The panels as the layout of TensorBoard's "Custom Scalars" page."""
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=section,
                chart=[
                    layout_pb2.Chart(
                        title=panel.title,
                        multiline=layout_pb2.MultilineChartContent(
                            tag=[f"^{as_regex(pattern)}$" for pattern in panel.metrics]
                        ),
                    )
                    for panel in panels
                ],
            )
            for section, panels in sections().items()
        ]
    )
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        string_val=[layout.SerializeToString()],
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
    )
    value = summary_pb2.Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG, metadata=metadata.create_summary_metadata(), tensor=tensor
    )
    return summary_pb2.Summary(value=[value])
