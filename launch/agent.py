"""torchrun's agent of one node, for ranks that save when signalled and whose exit statuses mean something.

It starts all ranks again when one has died or hung, as often as that brings a new checkpoint, and never when
the same start would end the same way. What is left of a broken start is ended within seconds.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

GRACE_SECONDS = 5
"""For ranks that have lost another one: what they could save is no whole."""
MANY = 1_000_000
"""Restarts are counted here; the number of each is part of the names under which its ranks meet."""

Verdict = Callable[[RunResult], bool]
"""Whether ranks that have failed so are started again."""


class Agent(LocalElasticAgent):
    """Asks before each restart, and gives ranks that lost one little time to end."""

    again: Verdict
    starting: Callable[[], None]
    """Called when nothing of an earlier start is left, before each start."""

    def _monitor_workers(self, *arguments: Any, **keywords: Any) -> RunResult:
        result = super()._monitor_workers(*arguments, **keywords)
        if result.is_failed() and not self.again(result):
            self._remaining_restarts = 0
        return result

    def _start_workers(self, *arguments: Any, **keywords: Any) -> dict[int, Any]:
        self.starting()
        started = super()._start_workers(*arguments, **keywords)
        # It ends what is left by itself when it sees a rank fail, and would wait 30 s for a stopped one.
        assert self._pcontext is not None
        close = self._pcontext.close

        def at_once(death_sig: Any = None, timeout: float = GRACE_SECONDS) -> None:
            close(death_sig, int(timeout))

        self._pcontext.close = at_once  # type: ignore[method-assign]
        return started

    def _stop_workers(self, *arguments: Any, **keywords: Any) -> None:
        self._shutdown(timeout=GRACE_SECONDS)


def run(options: Namespace, again: Verdict, starting: Callable[[], None]) -> None:
    """Run torchrun's parsed `options` on this node; the rest as in `Agent`.

    Raises:
        ChildFailedError: the ranks failed and were not started again.
    """
    config, command, arguments = _launch_config(options)
    # Each start meets at an address of its own: in a store that outlives it, addresses of the dead are found.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    handler = rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    host, port = None, None
    if config.rdzv_backend == "static":
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, options.master_port)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=MANY,
        monitor_interval=config.monitor_interval,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
    )
    agent = Agent(spec, config.logs_specs, config.start_method)  # type: ignore[arg-type]
    agent.again, agent.starting = again, starting
    try:
        result = agent.run()
    finally:
        handler.shutdown()
    if result.is_failed():
        raise ChildFailedError(str(command), result.failures)


def _launch_config(options: Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    """As torchrun's own `run` prepares it."""
    addressed = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    if options.standalone or (not addressed and options.nnodes in ("1", "1:1")):
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        options.rdzv_id = f"k3train-{os.getpid()}"
    if options.master_port is None:
        options.master_port = 29500
    return torchrun.config_from_args(options)
