"""One name for every parameter, whatever the layout.

A chunk's own names differ from rank to rank where experts are cut over ranks and between the local and
the grouped experts; initialisation, parity tests and reports need one name per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from parallel.moonep.plan.place import dealt, inverse

from .decoder import LanguageModelChunk

_LOCAL = re.compile(r"^(?P<head>.*\.mlp\.experts\.)local_experts\.(?P<index>\d+)\.(?P<tail>.*)$")
_GROUPED = re.compile(r"^(?P<head>.*\.mlp\.experts\.)(?P<linear>linear_fc[12])\.weight(?P<index>\d+)$")


def global_name(name: str, experts: Sequence[int]) -> str:
    """Name over the whole model of a chunk's parameter; `experts` are those of the rank, by their numbers."""
    if local := _LOCAL.match(name):
        return f"{local['head']}{experts[int(local['index'])]}.{local['tail']}"
    if grouped := _GROUPED.match(name):
        return f"{grouped['head']}{experts[int(grouped['index'])]}.{grouped['linear']}.weight"
    return name


def named_parameters(chunk: LanguageModelChunk) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, parameter) of a bare chunk."""
    rank, ranks = chunk.pg_collection.ep.rank(), chunk.pg_collection.ep.size()
    num_experts = chunk.config.num_moe_experts or 0
    places = num_experts // ranks
    experts = inverse(dealt(num_experts, ranks))[rank * places : (rank + 1) * places]
    for name, parameter in chunk.named_parameters():
        yield global_name(name, experts), parameter
