"""`k3train plan`: what a configuration needs and how long a step takes, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Sequence

from k3train.plan import plan, render

from .compose import ready, world_size


def main(arguments: Sequence[str]) -> int:
    """Print the plan; with --json as one JSON object."""
    overrides = [argument for argument in arguments if argument != "--json"]
    config = ready(overrides, inputs=False)
    result = plan(config, world_size(config))
    if "--json" in arguments:
        print(json.dumps(result))
    else:
        from rich.console import Console

        Console().print(render(result))
    return 0
