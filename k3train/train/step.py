"""One optimizer step over a list of micro-batches, and the same forward pass for evaluation.

Shapes: b batch, s sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import Tensor

from parallel.groups import Groups

from ..config import Config
from ..model.decoder import LanguageModelChunk
from ..optim.clip import clip_gradients, gradient_norm
from ..optim.qk_clip import QKClip
from ..optim.stream import StreamedUpdate
from ..quant.qat import ExpertQuantiser
from .balance import Balance, balance_experts
from .pipeline import Pipeline
from .tower import Tower

Batch = dict[str, Any]
"""One micro-batch: tokens, labels int64 [b, s]; loss_mask FP32 [b, s]; sample_ids int64 [b]; packing."""


Phase = Callable[[str, int], AbstractContextManager[Any]]


def unmeasured(name: str, step: int) -> AbstractContextManager[Any]:
    """A phase that nobody times."""
    return nullcontext()


@dataclass
class Trainer:
    """Everything one rank needs to take a step, built by `assemble`."""

    config: Config
    groups: Groups
    chunks: list[DistributedDataParallel]
    tower: Tower | None
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    pipeline: Pipeline
    qk_clip: QKClip | None = None
    stream: StreamedUpdate | None = None
    """Updates parameters where gradients or optimizer states are not all on the device."""
    quantiser: ExpertQuantiser | None = None
    """What routed experts are rounded by, in quantisation-aware training."""

    @property
    def modules(self) -> list[DistributedDataParallel]:
        """Everything that has parameters: the chunks, then the tower."""
        return [*self.chunks, *([self.tower.model] if self.tower else [])]

    def at_hand(self) -> AbstractContextManager[None]:
        """While it lasts, optimizer states are in memory for a checkpoint to read or replace."""
        states = self.stream.states if self.stream else None
        return states.at_hand() if states else nullcontext()

    def weights_held(self) -> AbstractContextManager[None]:
        """While it lasts no parameter changes, as between two updates."""
        return self.quantiser.held() if self.quantiser else nullcontext()

    @property
    def models(self) -> list[LanguageModelChunk]:
        """The bare chunks."""
        return unwrap_model(self.chunks)


@dataclass(frozen=True)
class Losses:
    """Sums over the tokens of a step; the same on every rank."""

    loss_sum: float
    tokens: float
    mtp_sum: float
    mtp_tokens: float
    vision_flops: float
    """Of the tower, forward and backward, on all images."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the next token, nats."""
        return self.loss_sum / max(self.tokens, 1)

    @property
    def mtp_loss(self) -> float | None:
        """Mean cross-entropy of the token after the next, nats."""
        return self.mtp_sum / self.mtp_tokens if self.mtp_tokens else None


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    losses: Losses
    grad_norm: float
    learning_rate: float
    updated: bool
    balance: Balance


def train_step(trainer: Trainer, batches: list[Batch], step: int, phase: Phase = unmeasured) -> StepResult:
    """Forward, backward, clip, update, balance. A step that is not finite updates nothing.

    Args:
        batches: this rank's micro-batches.
        step: number of this step, from 1.
        phase: context manager around each named phase, to time it.
    """
    optimizer, config, groups = trainer.optimizer, trainer.config, trainer.groups
    for module in trainer.modules:
        module.train()
        module.zero_grad_buffer()
    optimizer.zero_grad()
    if trainer.qk_clip is not None:
        trainer.qk_clip.reset()
    with phase("forward_backward", step):
        losses = run_batches(trainer, batches)
    with phase("optimizer", step):
        optimizer.prepare_grads()
        stream, sharded = trainer.stream, config.parallel.zero != 0
        if stream is not None:
            stream.prepare()
        norm = gradient_norm(optimizer, groups.pg_collection, groups.device, sharded=sharded, stream=stream)
        finite = all(math.isfinite(value) for value in (losses.loss_sum, losses.mtp_sum, norm))
        trainer.scheduler.num_steps = step
        trainer.scheduler.step(0)
        if finite:
            clip_gradients(optimizer, norm, config.optim.clip_norm, stream)
            if trainer.qk_clip is not None:
                trainer.qk_clip.prepare(optimizer)
            (stream.step if stream is not None else optimizer.step_with_ready_grads)()
    with phase("balance", step):
        balance = balance_experts(trainer.models, groups.pg_collection, update=finite)
    return StepResult(losses, norm, _learning_rate(trainer), finite, balance)


@torch.no_grad()
def evaluate(trainer: Trainer, batches: list[Batch]) -> Losses:
    """Loss on micro-batches, without a trace in any state."""
    for module in trainer.modules:
        module.eval()
    return run_batches(trainer, batches, forward_only=True)


@torch.no_grad()
def caption_accuracy(trainer: Trainer, batches: list[Batch]) -> float:
    """Share of the `answer_positions` whose label is the likeliest token; a collective over all ranks."""
    for module in trainer.modules:
        module.eval()
    total = torch.zeros(2, dtype=torch.float64, device=trainer.groups.device)
    for answered in trainer.pipeline.run(
        forward_step_func=_answer_step, batches=batches, chunks=list(trainer.chunks), forward_only=True
    ):
        total += answered
    dist.all_reduce(total)
    right, asked = total.tolist()
    return right / max(asked, 1)


def run_batches(trainer: Trainer, batches: list[Batch], *, forward_only: bool = False) -> Losses:
    """Run the pipeline over micro-batches and sum the losses over all ranks; a collective."""
    config = trainer.config
    chunks: list[Any] = list(trainer.chunks)
    with trainer.weights_held():
        reported = trainer.pipeline.run(
            forward_step_func=partial(_forward_step, mtp_weight=config.model.mtp_loss_weight),
            batches=batches,
            chunks=chunks,
            forward_only=forward_only,
        )
    total = torch.zeros(5, dtype=torch.float64, device=trainer.groups.device)
    for sums in reported:
        total[:4] += sums
    if trainer.tower is not None and _speaks_for_images(trainer.groups):
        total[4] = trainer.tower.flops
    # One rank of each pipeline reports, its own tokens: a sum over the world is the total.
    dist.all_reduce(total)
    return Losses(*total.tolist())


def _speaks_for_images(groups: Groups) -> bool:
    """Of the ranks that read the same samples, one."""
    return groups.pg_collection.pp.rank() == 0 and groups.pg_collection.cp.rank() == 0


def _forward_step(
    iterator: Iterator[Batch], model: DistributedDataParallel, *, mtp_weight: float
) -> tuple[Any, Any]:
    """megatron-core's forward_step_func: run a chunk on the next micro-batch."""
    batch = next(iterator)
    loss_mask = batch["loss_mask"]
    output = model(
        batch["tokens"],
        batch["packing"],
        labels=batch["labels"],
        loss_mask=loss_mask,
        valid=batch.get("valid"),
        image_positions=batch.get("feature_positions"),
    )
    return output, partial(_loss, loss_mask=loss_mask, mtp_weight=mtp_weight)


def _answer_step(iterator: Iterator[Batch], model: DistributedDataParallel) -> tuple[Any, Any]:
    """megatron-core's forward_step_func for `caption_accuracy`."""
    batch = next(iterator)
    output = model(
        batch["tokens"],
        batch["packing"],
        image_positions=batch.get("feature_positions"),
        logits_at=batch["answer_positions"],
    )
    return output, partial(_count_answers, batch=batch)


def _count_answers(logits: Tensor, *, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The last stage's report [right, asked], in the form of `_loss`; logits [n, v] at `answer_positions`."""
    places = batch["answer_positions"]
    right = (logits.argmax(-1) == batch["labels"].flatten()[places]).sum()
    asked = torch.tensor(len(places), dtype=torch.int, device=logits.device)
    return logits.sum(), asked, torch.stack([right.double(), asked.double()])


def _loss(
    output: tuple[Tensor, ...], *, loss_mask: Tensor, mtp_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum to differentiate, number of tokens, sums to report) of one micro-batch on the last stage."""
    losses, *mtp = output
    loss_sum, tokens = (losses * loss_mask).sum(), loss_mask.sum()
    total = loss_sum
    sums = [loss_sum, tokens, torch.zeros_like(tokens), torch.zeros_like(tokens)]
    if mtp:
        mtp_losses, mtp_mask = mtp
        sums[2:] = (mtp_losses * mtp_mask).sum(), mtp_mask.sum()
        total = loss_sum + mtp_weight * sums[2]
    return total, tokens.int(), torch.stack(sums).detach().double()


def _learning_rate(trainer: Trainer) -> float:
    """The schedule's rate at this step, whichever parameter groups this rank holds."""
    scheduler = trainer.scheduler
    return float(scheduler.get_lr({"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}))
