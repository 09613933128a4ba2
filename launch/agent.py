"""torchrun's agent of one node, for ranks that save when signalled and whose exit statuses mean something.

It starts all ranks again when one has died or hung, as often as that brings a new checkpoint, and never when
the same start would end the same way. What is left of a broken start is ended within seconds.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any, Protocol

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from k3train.exit_status import HUNG

GRACE_SECONDS = 5
"""For ranks that have lost another one: what they could save is no whole."""
MANY = 1_000_000
"""Restarts are counted here; the number of each is part of the names under which its ranks meet."""


class LonelyError(RuntimeError):
    """The nodes of a run have not met; says why."""


class Judge(Protocol):
    """Decides over the ranks of a node."""

    def meeting(self) -> None:
        """No rank runs: this node waits for the others."""

    def starting(self) -> None:
        """Ranks are started now; nothing of an earlier start is left."""

    def started(self, ranks: dict[int, int]) -> None:
        """Ranks run; their process ids by rank."""

    def still(self) -> list[int]:
        """Ranks that hang before they can notice it themselves."""

    def again(self, result: RunResult) -> bool:
        """Whether ranks that have failed so are started again."""


class Agent(LocalElasticAgent):
    """Asks before each restart, and gives ranks that lost one little time to end."""

    judge: Judge

    def _rendezvous(self, *arguments: Any, **keywords: Any) -> None:
        self.judge.meeting()
        super()._rendezvous(*arguments, **keywords)

    def _monitor_workers(self, *arguments: Any, **keywords: Any) -> RunResult:
        result = super()._monitor_workers(*arguments, **keywords)
        if result.state == WorkerState.HEALTHY and (still := self.judge.still()):
            ranks = self._ranks()
            failures = {
                rank: ProcessFailure(local_rank=local, pid=pid, exitcode=HUNG, error_file="")
                for rank, (local, pid) in ranks.items()
                if rank in still
            }
            result = RunResult(state=WorkerState.FAILED, failures=failures)
        if result.is_failed() and not self.judge.again(result):
            self._remaining_restarts = 0
        return result

    def _ranks(self) -> dict[int, tuple[int, int]]:
        """Local rank and process id of this node's ranks."""
        assert self._pcontext is not None
        pids = self._pcontext.pids()
        found = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        return {rank: (local, pids[local]) for rank, local in found.items()}

    def _start_workers(self, *arguments: Any, **keywords: Any) -> dict[int, Any]:
        self.judge.starting()
        started = super()._start_workers(*arguments, **keywords)
        self.judge.started({rank: pid for rank, (_, pid) in self._ranks().items()})
        # It ends what is left by itself when it sees a rank fail, and would wait 30 s for a stopped one.
        assert self._pcontext is not None
        close = self._pcontext.close

        def at_once(death_sig: Any = None, timeout: float = GRACE_SECONDS) -> None:
            close(death_sig, int(timeout))

        self._pcontext.close = at_once  # type: ignore[method-assign]
        return started

    def _stop_workers(self, *arguments: Any, **keywords: Any) -> None:
        self._shutdown(timeout=GRACE_SECONDS)


def run(options: Namespace, judge: Judge) -> None:
    """Run torchrun's parsed `options` on this node.

    Raises:
        ChildFailedError: the ranks failed and were not started again.
        LonelyError: the nodes have not met.
    """
    config, command, arguments = _launch_config(options)
    handler = None
    # Each start meets at an address of its own: in a store that outlives it, addresses of the dead are found.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    judge.meeting()
    try:
        handler = rendezvous.get_rendezvous_handler(parameters)
        result = _agent(config, options, command, arguments, handler, judge).run()
    except (RendezvousError, DistStoreError, DistNetworkError) as error:
        raise LonelyError(_why(error, config)) from error
    finally:
        if handler is not None:
            handler.shutdown()
    if result is None:
        raise LonelyError("the other nodes have ended without this one")
    if result.is_failed():
        raise ChildFailedError(str(command), result.failures)


def _agent(
    config: LaunchConfig,
    options: Namespace,
    command: Any,
    arguments: list[str],
    handler: RendezvousHandler,
    judge: Judge,
) -> Agent:
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
    agent.judge = judge
    return agent


def _why(error: Exception, config: LaunchConfig) -> str:
    if isinstance(error, RendezvousClosedError):
        return "another node has ended the run"
    if isinstance(error, RendezvousTimeoutError):
        return f"{config.min_nodes} nodes have not met in time; one of them is lost, or was not started"
    where = config.rdzv_endpoint
    return f"the nodes meet at {where}, which cannot be reached; its node is lost, or was not started"


def _launch_config(options: Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    """As torchrun's own `run` prepares it."""
    addressed = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    if options.standalone or (not addressed and options.nnodes in ("1", "1:1")):
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        options.rdzv_id = f"k3train-{os.getpid()}"
    if options.master_port is None:
        options.master_port = 29500
    return torchrun.config_from_args(options)
