"""Stands in for `k3train.train.loop` in worker processes; FAKE_LOOP chooses what it does."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import ModuleType

from k3train.config import Config
from k3train.errors import UserError
from k3train.exit_status import FAILED, SAVED
from k3train.train.signals import stop_signals


def module() -> ModuleType:
    """A module object with the `train` that FAKE_LOOP names."""
    made = ModuleType("k3train.train.loop")
    loops = (refuse, crash, wait, watched, meet, reduce, log)
    chosen = {loop.__name__: loop for loop in loops}[os.environ["FAKE_LOOP"]]
    made.train = lambda stages, stages_behind: chosen(stages)  # type: ignore[attr-defined]
    return made


def refuse(stages: list[Config]) -> int:
    if os.environ.get("RANK", "0") == "1":
        raise UserError("data.train=[x]: torn")
    return _blocked()


def crash(stages: list[Config]) -> int:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return _blocked()


def wait(stages: list[Config]) -> int:
    """Save on a stop signal, slowly, as a large checkpoint would be."""
    received = []
    for number in stop_signals():
        signal.signal(number, lambda number, frame: received.append(number))
    _note(stages[0], "ready", "")
    deadline = time.monotonic() + 60
    while not received and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1.0)
    _note(stages[0], "saved", str([int(number) for number in received]))
    return SAVED if received else FAILED


def watched(stages: list[Config]) -> int:
    """Wait as one that watches itself: for the agent it may stand still."""
    from k3train.train.standing import Board, Standing

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = Board(Path(stages[0].run.dir), rank, ranks)
    board.open()
    board.post(Standing(rank, socket.gethostname(), os.getpid(), 0, 0, 0, "meet"))
    return wait(stages)


def meet(stages: list[Config]) -> int:
    """Meet the others until all are asked to stop; fails when one of them is lost."""
    import torch
    import torch.distributed as dist

    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    dist.init_process_group("gloo")
    _note(stages[0], "ready", f"resume {stages[0].run.resume}")
    asked = torch.zeros(1)
    while not asked:
        asked[0] = len(received)
        dist.all_reduce(asked)
        time.sleep(0.05)
    return 0


def reduce(stages: list[Config]) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    (config,) = stages
    node = f"{config.cluster.nodes} {config.cluster.ranks_per_node} {config.parallel.data}"
    _note(config, "rank", f"{dist.get_world_size()} {total.item():g} {node}")
    dist.destroy_process_group()
    return 0


def log(stages: list[Config]) -> int:
    folder = Path(stages[0].run.dir)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(f'{{"step": 2, "loss": {stages[0].optim.lr}}}\n{{"st')
    return 1 if stages[0].run.seed == 2 else 0


def _blocked() -> int:
    """Wait for a peer that will not come, until the agent ends this rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)
    return 0


def _note(config: Config, kind: str, text: str) -> None:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{os.environ.get('RANK', '0')}"
    draft.write_text(text)
    draft.replace(folder / f"{kind}-{os.environ.get('RANK', '0')}")
