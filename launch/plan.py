"""`k3train plan`: parameters, memory, traffic, bubbles and step time of a configuration, without allocating it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .compose import ready


def main(arguments: Sequence[str]) -> int:
    """Print the plan; with --json as one JSON object."""
    overrides = [argument for argument in arguments if argument != "--json"]
    config = ready(overrides, inputs=False)
    from k3train.plan import plan, render

    result = plan(config)
    print(json.dumps(result) if "--json" in arguments else render(result))
    return 0
