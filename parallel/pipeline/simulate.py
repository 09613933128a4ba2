"""megatron-core's pipeline order on paper: who runs what, how long it takes, what is held. Imports no torch.

1F1B with one chunk on a rank, interleaved 1F1B with more; both orders equal the ones that megatron-core's
schedules execute. Letters: p pipeline ranks, v chunks of a rank, m micro-batches. Stage i of the p * v stages
of the forward pass is chunk i // p of rank i % p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXACT_ROUNDS = 8


@dataclass(frozen=True)
class Operation:
    """Forward or backward of one micro-batch through one stage."""

    forward: bool
    stage: int
    microbatch: int


def operations(rank: int, pipeline: int, virtual: int, microbatches: int) -> list[Operation]:
    """What a pipeline rank executes in one step, in order."""
    rounds = [range(start, min(start + pipeline, microbatches)) for start in range(0, microbatches, pipeline)]
    forward, backward = (
        [
            Operation(is_forward, chunk * pipeline + rank, microbatch)
            for batch in rounds
            for chunk in (range(virtual) if is_forward else reversed(range(virtual)))
            for microbatch in batch
        ]
        for is_forward in (True, False)
    )
    warm = pipeline - rank if virtual == 1 else 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1
    warm = min(warm, len(forward))
    steady = [operation for pair in zip(backward, forward[warm:], strict=False) for operation in pair]
    return forward[:warm] + steady + backward[len(forward) - warm :]


def makespan(
    forward: Sequence[float], backward: Sequence[float], pipeline: int, microbatches: int, hop: float = 0
) -> float:
    """Time of one step's forward and backward passes.

    Args:
        forward: time of each stage's forward for one micro-batch, in the order of the forward pass.
        backward: the same of its whole backward.
        pipeline: p; the number of stages must be a multiple of it.
        hop: time that a message takes from a stage to its neighbour on another rank.

    Long steps settle into rounds of p micro-batches: beyond `EXACT_ROUNDS` of them each costs what the last
    simulated round did.
    """
    full, rest = divmod(microbatches, pipeline)
    if full <= EXACT_ROUNDS:
        return _simulate(forward, backward, pipeline, microbatches, hop)
    shorter, longer = (
        _simulate(forward, backward, pipeline, rounds * pipeline + rest, hop)
        for rounds in (EXACT_ROUNDS - 1, EXACT_ROUNDS)
    )
    return longer + (full - EXACT_ROUNDS) * (longer - shorter)


def peak_held(saved: Sequence[Sequence[float]], rank: int, pipeline: int, microbatches: int) -> list[float]:
    """What a rank holds at the worst moment between a stage's forward and its backward, by kind.

    `saved[stage]` lists, kind by kind, what one micro-batch leaves behind in a stage. The worst moment is
    that of the largest sum. Warm-up spans at most two rounds of p micro-batches, and every later round
    repeats, so four are enough.
    """
    virtual = len(saved) // pipeline
    held = [0.0] * len(saved[0])
    worst = list(held)
    for operation in operations(rank, pipeline, virtual, min(microbatches, 4 * pipeline)):
        sign = 1 if operation.forward else -1
        held = [now + sign * part for now, part in zip(held, saved[operation.stage], strict=True)]
        worst = max(worst, held, key=sum)
    return worst


def _simulate(
    forward: Sequence[float], backward: Sequence[float], pipeline: int, microbatches: int, hop: float
) -> float:
    """Longest path over each rank's order and the messages between stages."""
    stages = len(forward)
    ended: dict[tuple[bool, int, int], float] = {}
    queues = [operations(rank, pipeline, stages // pipeline, microbatches) for rank in range(pipeline)]
    position, clock = [0] * pipeline, [0.0] * pipeline
    latency = hop if pipeline > 1 else 0
    remaining = sum(map(len, queues))
    while remaining:
        before = remaining
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                operation = queue[position[rank]]
                arrival = _arrival(operation, ended, stages, latency)
                if arrival is None:
                    break
                cost = (forward if operation.forward else backward)[operation.stage]
                clock[rank] = max(clock[rank], arrival) + cost
                ended[operation.forward, operation.stage, operation.microbatch] = clock[rank]
                position[rank] += 1
                remaining -= 1
        assert remaining < before, "the order deadlocks"
    return max(clock)


def _arrival(
    operation: Operation, ended: dict[tuple[bool, int, int], float], stages: int, latency: float
) -> float | None:
    """When the input of an operation is there; None if its producer has not run yet."""
    if operation.forward:
        if operation.stage == 0:
            return 0.0
        producer = (True, operation.stage - 1, operation.microbatch)
    elif operation.stage == stages - 1:
        return ended.get((True, operation.stage, operation.microbatch))
    else:
        producer = (False, operation.stage + 1, operation.microbatch)
    end = ended.get(producer)
    return None if end is None else end + latency
