"""One name for every parameter, whatever the layout.

A chunk's own names differ from rank to rank where experts are cut over ranks and between the local and
the grouped experts; initialisation, parity tests and reports need one name per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from .decoder import LanguageModelChunk

_LOCAL = re.compile(r"^(?P<head>.*\.mlp\.experts\.)local_experts\.(?P<index>\d+)\.(?P<tail>.*)$")
_GROUPED = re.compile(r"^(?P<head>.*\.mlp\.experts\.)(?P<linear>linear_fc[12])\.weight(?P<index>\d+)$")


def global_name(name: str, first_expert: int) -> str:
    """Name over the whole model of a chunk's parameter; `first_expert` is the rank's first expert."""
    if local := _LOCAL.match(name):
        return f"{local['head']}{int(local['index']) + first_expert}.{local['tail']}"
    if grouped := _GROUPED.match(name):
        return f"{grouped['head']}{int(grouped['index']) + first_expert}.{grouped['linear']}.weight"
    return name


def named_parameters(chunk: LanguageModelChunk) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, parameter) of a bare chunk."""
    experts = chunk.config.num_moe_experts or 0
    first_expert = chunk.pg_collection.ep.rank() * (experts // chunk.pg_collection.ep.size())
    for name, parameter in chunk.named_parameters():
        yield global_name(name, first_expert), parameter
