"""One process of `k3train bench calibrate`: `python -m launch.calibrate KIND FILE STEPS OVERRIDE...`.

KIND is layers, coefficients or collectives; the answer goes into FILE as JSON, progress to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from k3train.quiet import quiet


def main(arguments: Sequence[str]) -> int:
    """Measure one kind and leave."""
    kind, file, steps, *overrides = arguments
    quiet()
    from parallel.cpu import enable_cpu

    enable_cpu()
    from k3train.train import calibrate

    from .compose import compose, resolve_layout, world_size

    def say(line: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{kind}: {line}", file=sys.stderr, flush=True)

    composed = compose(overrides)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    config = resolve_layout(composed, world_size(composed, environment), environment)
    answer: object
    if kind == "layers":
        answer = calibrate.layers(config, steps=int(steps), say=say)
    elif kind == "coefficients":
        answer = calibrate.coefficients(config, say)
    else:
        answer = calibrate.collectives("cuda" if config.run.device == "cuda" else "cpu", say)
    Path(file).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
