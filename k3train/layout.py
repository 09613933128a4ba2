"""The layout of a configuration. Needs no torch."""

from __future__ import annotations

from parallel.topology import Topology

from .config import Config


def layout_of(config: Config, world_size: int | None = None) -> Topology:
    """The layout on so many ranks, or of a resolved configuration on its own. Raises LayoutError."""
    parallel = config.parallel
    data = parallel.data
    if data is None:
        assert world_size is not None, "the layout has not been resolved"
        data = world_size // (parallel.pipeline * parallel.context)
    return Topology(
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        expert=parallel.expert.size,
        context=parallel.context,
        data=data,
    )
