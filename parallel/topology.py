"""Arithmetic of a layout: which rank plays which part. Imports no torch.

Ranks are ordered as megatron-core orders them: context fastest, then data, then pipeline. Expert
parallelism is carved out of the ranks of one pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


class LayoutError(ValueError):
    """A layout that cannot be built."""


@dataclass(frozen=True)
class Topology:
    """Sizes of each way to be parallel; `virtual` is the number of model chunks on a pipeline rank."""

    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    context: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name in ("pipeline", "virtual", "expert", "context", "data"):
            if getattr(self, name) < 1:
                raise LayoutError(f"parallel.{name}={getattr(self, name)}; use 1 or more")
        if (self.data * self.context) % self.expert:
            raise LayoutError(
                f"parallel.expert.size={self.expert} must divide data x context = {self.data * self.context}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.context * self.data

    @property
    def is_interleaved(self) -> bool:
        """Whether several pipeline ranks have several chunks each."""
        return self.pipeline > 1 and self.virtual > 1

    @property
    def num_chunks(self) -> int:
        """Model chunks in the whole pipeline."""
        return self.pipeline * self.virtual

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same routed experts."""
        return self.data * self.context // self.expert

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank along each way to be parallel."""
        within, pipeline = rank % (self.context * self.data), rank // (self.context * self.data)
        return {
            "pipeline": pipeline,
            "data": within // self.context,
            "context": within % self.context,
            "expert": within % self.expert,
            "expert_data": within // self.expert,
        }

    def groups(self, kind: str) -> list[list[int]]:
        """Ranks of every group of a kind: pipeline, data, context, expert or expert_data."""
        others = ("expert", "expert_data") if kind in ("expert", "expert_data") else ("data", "context")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            rest = tuple(place[name] for name in ("pipeline", *others) if name != kind)
            members.setdefault(rest, []).append(rank)
        return sorted(members.values())

    def stage_of(self, pipeline_rank: int, chunk: int) -> int:
        """Position in the forward pass of chunk `chunk` of a pipeline rank."""
        return chunk * self.pipeline + pipeline_rank

    def stages(self) -> Iterator[tuple[int, int]]:
        """(pipeline rank, chunk) of every stage in the order of the forward pass."""
        return ((stage % self.pipeline, stage // self.pipeline) for stage in range(self.num_chunks))


def split_layers(num_layers: int, num_chunks: int, explicit: list[int] | None = None) -> list[range]:
    """Layers of each chunk in the order of the forward pass.

    Args:
        explicit: number of layers of each chunk; when left out they are spread evenly and the first chunks
            take the remainder, since the last one also has the head.

    Raises:
        LayoutError: a chunk would be empty, or the numbers do not add up.
    """
    counts = explicit
    if counts is None:
        share, remainder = divmod(num_layers, num_chunks)
        counts = [share + (chunk < remainder) for chunk in range(num_chunks)]
    if len(counts) != num_chunks:
        raise LayoutError(f"parallel.layers_per_chunk={counts} names {len(counts)} chunks of {num_chunks}")
    if min(counts) < 1:
        raise LayoutError(f"{num_layers} layers over {num_chunks} chunks leave a chunk empty: {counts}")
    if sum(counts) != num_layers:
        raise LayoutError(f"parallel.layers_per_chunk={counts} adds up to {sum(counts)}, not {num_layers}")
    starts = [sum(counts[:chunk]) for chunk in range(num_chunks)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
