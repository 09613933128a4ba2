"""A run from its first step, or its last checkpoint, to its end."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from parallel.groups import assert_same_everywhere, initialize, regroup
from parallel.pipeline.clock import BusyClock

from .. import flops, shapes, vision_shapes
from ..checkpoint.folders import check_writable, lock_folder
from ..checkpoint.huggingface.assets import carry
from ..checkpoint.local import LocalDisk, join
from ..checkpoint.manager import CheckpointManager, Found
from ..checkpoint.saving import SaveError
from ..checkpoint.sources import open_weights
from ..checkpoint.weights import fill
from ..config import Config, digest
from ..config_file import keep_before, to_yaml
from ..curriculum import is_border, may_change, place, row, shrinking, stage_of, stages
from ..errors import UserError
from ..layout import layout_of
from ..log import timeline
from ..log import trace as tracing
from ..log.metrics import replace_file
from ..log.progress import Progress
from ..log.report import write_report
from ..log.trace import Trace
from ..log.tracker import Tracker
from ..memory import gradient_warning
from ..resume import Change, fixed_keys
from . import activations, health, summary
from .assemble import build_trainer, set_numerics
from .diagnose import explain_nonfinite
from .inputs import Inputs
from .measure import step_metrics
from .record import Recorder
from .routing import RoutingTrace
from .signals import StopRequest
from .spike import Spike, SpikeError, SpikeWatch
from .step import Batch, StepResult, caption_accuracy, evaluate, train_step
from .straggler import Stragglers
from .watchdog import Watchdog

MOST_SKIPS = 10
"""Skipped steps in a row after which a run has nothing left to save."""


class Session:
    """One process's part of a run. Every method is called on every rank, in the same order."""

    def __init__(
        self,
        configs: Sequence[Config],
        stages_behind: Callable[[int], Sequence[Config]] | None = None,
    ) -> None:
        """`configs` and `stages_behind` are as in `loop.train`."""
        self.stages_behind = stages_behind
        config, *self.ahead = configs
        self.stop = StopRequest()
        self.stopped = False
        self.started = time.time()
        self.run_dir = Path(config.run.dir)
        if os.environ.get("RANK", "0") == "0":
            check_writable(self.run_dir, _checkpoint_bytes(config))
            self.lock = lock_folder(self.run_dir)
        set_numerics(config)
        self.watch = Watchdog(config.fault, self.run_dir)
        self.watch.start()
        self.progress: Progress | None = None
        self.spikes = SpikeWatch(config.fault.spike)
        self.step = 0
        self.saved_step: int | None = None
        self.skipped = self.skipped_in_a_row = 0
        self.last: dict[str, Any] = {}
        with self.watch.until_failure():
            self._meet(configs)
            self._build(config)

    def _meet(self, configs: Sequence[Config]) -> None:
        """Look at this machine where that is asked for, and join the other ranks."""
        config, minutes = configs[0], configs[0].parallel.timeout_minutes
        with self.watch.phase("health", 0):
            facts = health.of_rank(self.run_dir, config.run.device) if config.fault.health else None
        layout, device = layout_of(config), config.run.device
        self.groups = initialize(layout, device=device, timeout_minutes=minutes, seed=config.run.seed)
        if facts is not None:
            health.meet(facts, self.groups.device, config.fault)
        for stage in configs:
            assert_same_everywhere("configuration", digest(stage))
        self.watch.enter("start")

    def _build(self, config: Config) -> None:
        """What a stage has of its own."""
        self.config, self.stage = config, stage_of(config)
        self.inputs = Inputs(config, self.groups, self._say)
        self.trainer = build_trainer(config, self.groups)
        self.watch.follow(self.trainer.pipeline.place, self.groups)
        self.stragglers = Stragglers(config, self.groups)
        self.checkpoints = CheckpointManager(
            self.run_dir / "checkpoints",
            groups=self.groups,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            skip_when_busy=config.checkpoint.when_busy == "skip",
            asynchronous=config.checkpoint.asynchronous,
            local=self._join_disks if config.checkpoint.local_dir is not None else None,
            fixed=fixed_keys(config),
            message=self._say,
        )

    def _join_disks(self) -> LocalDisk:
        own = self.config.checkpoint
        assert own.local_dir is not None
        root, need = self.run_dir / "checkpoints", _checkpoint_bytes(self.config)
        return join(own.local_dir, root, self.groups.rank, keep=own.local_keep, need_bytes=need)

    def run(self) -> None:
        """Train to `run.steps`, or until a stop signal; either way the state is saved before it returns."""
        with self.watch.until_failure():
            self._run()

    def _run(self) -> None:
        resumed = self._resume()
        if not resumed and self.config.init_from is not None:
            self._start_from(self.config.init_from)
        if self.step >= self.stage.last:
            self._say(self._nothing_left())
            self._let_go()
            return
        self._open_tracker(resumed)
        self._open_logs()
        for line in shrinking([self.config, *self.ahead]):
            self._say(line)
        if warning := gradient_warning(self.config, self.groups.topology):
            self._say(warning)
        try:
            self.progress = Progress(
                self.config.run.steps,
                start=self.step,
                writer=self.groups.is_first,
                steps_shown=self.config.log.progress,
            )
            with self.progress:
                self._announce()
                self._train(self.progress)
                while self.ahead and self.step == self.stage.last and not self.stopped:
                    self._enter(self.ahead.pop(0))
                    self._train(self.progress)
                self._finish()
        finally:
            self.tracker.close()
            self._let_go()

    @property
    def unfinished(self) -> bool:
        """Whether a stop signal came before the last step."""
        return self.stopped and self.step < self.config.run.steps

    def _let_go(self) -> None:
        self.inputs.close()
        self.watch.stop()
        self.stop.restore()

    def _say(self, text: str) -> None:
        """Print a line on the first rank, above the progress bar when there is one."""
        if self.progress is not None:
            self.progress.message(text)
        elif self.groups.is_first:
            print(text, flush=True)

    def _resume(self) -> bool:
        if not self.config.run.resume:
            return False
        found = self.checkpoints.newest()
        if found is None:
            return False
        step = found[1]["extra"]["step"]
        # Ahead of this stage where the run's folder has not yet what the nodes' disks have.
        behind, ahead = step < self.stage.first, bool(self.ahead) and step >= self.stage.last
        if (behind or ahead) and self.stages_behind is not None:
            self._go_to(self.stages_behind(step))
        self._load(found)
        self._say(f"continuing {self.run_dir} behind step {self.step}")
        if self.checkpoints.changes:
            self._say(f"in another layout: {_listed(self.checkpoints.changes)}")
        return True

    def _go_to(self, configs: Sequence[Config]) -> None:
        """Begin with another stage, the one of the newest checkpoint that is intact."""
        config, *self.ahead = configs
        for stage in configs:
            assert_same_everywhere("configuration", digest(stage))
        self._say(f"going to stage {config.curriculum.stage}")
        self._change(config)

    def _load(self, found: Found, spike: Spike | None = None) -> None:
        """Take over the state of a checkpoint; with `spike`, leave its samples out from then on."""
        extra = found[1]["extra"]
        border = is_border(self.config, extra["step"], extra)
        with self.trainer.at_hand():
            self.checkpoints.load(
                self.trainer.modules,
                self.trainer.optimizer,
                found,
                free=lambda key: border and may_change(key),
            )
        self.step = self.saved_step = extra["step"]
        self.skipped = extra["skipped"]
        self.skipped_in_a_row = extra.get("skipped_in_a_row", 0)
        if spike is None:
            self.spikes.restore(extra)
        else:
            self.spikes.go_back(spike, extra)
        self.inputs.seek(self.step, self.spikes.skips)

    def _enter(self, config: Config) -> None:
        """Save at the border of two stages and go on in the next one's layout, in the same processes.

        Raises:
            UserError: the state could not be saved, and so not be brought into the next layout.
        """
        self.watch.enter("start")
        if not self._save_surely():
            raise UserError(
                f"stage {self.stage.name} is done, and step {self.step} could not be saved, which the next "
                "stage starts from; make room and start the same command again"
            )
        self._write_pictures()
        del self.recorder, self.routing, self.trace
        self._change(config)
        found = self.checkpoints.newest()
        assert found and found[1]["extra"]["step"] == self.step, "the checkpoint of the border is gone"
        self._load(found)
        self._open_logs()
        self._announce()

    def _change(self, config: Config) -> None:
        """Take a stage down and build another one on the same ranks."""
        self._take_down()
        self.groups = regroup(
            self.groups,
            layout_of(config),
            timeout_minutes=config.parallel.timeout_minutes,
            seed=config.run.seed,
        )
        self._build(config)

    def _take_down(self) -> None:
        """Let go of what a stage has of its own, and of its memory."""
        self.inputs.close()
        if self.trainer.pipeline.activations is not None:
            self.trainer.pipeline.activations.close()
        del self.trainer, self.checkpoints
        gc.collect()
        if self.groups.device.type == "cuda":
            torch.cuda.empty_cache()

    def _announce(self) -> None:
        """Tell which stage begins."""
        if not self.stage.name:
            return
        shown = row(self.config)
        text = (
            f"stage {self.stage.name}: steps {shown['steps']}, {shown['samples_per_step']} samples of "
            f"{shown['sequence_length']:,} tokens a step, {shown['layout']}"
        )
        self._say(text)
        self.tracker.event(self.step, "stage", text)

    def _start_from(self, folder: str) -> None:
        """Take over the weights of another run or of a Hugging Face folder; the optimizer starts afresh."""
        source = Path(folder).expanduser()
        absent = fill(unwrap_model(self.trainer.modules), open_weights(source))
        if self.groups.is_first:
            carry(source, self.run_dir)
        with self.trainer.at_hand():
            self.trainer.optimizer.reload_model_params()
        parts = {"mtp": "the multi-token-prediction layer", "vision": "the vision tower"}
        missing: list[set[str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(missing, absent)
        kept = [parts[name] for name in sorted(set().union(*(part or set() for part in missing)))]
        new = f"; {' and '.join(kept)} not among them, so at initial values" if kept else ""
        self._say(f"weights of {folder}{new}")

    def _open_tracker(self, resumed: bool) -> None:
        if self.groups.is_first:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.tracker = Tracker(
            self.config,
            self.run_dir,
            resume_step=self.step,
            writer=self.groups.is_first,
            warn=self._say,
        )
        if not resumed:
            return
        self.tracker.event(self.step, "resumed", f"behind step {self.step}")
        if self.checkpoints.changes:
            self.tracker.event(self.step, "layout", _listed(self.checkpoints.changes))
            if self.groups.is_first:
                keep_before(self.run_dir, self.step)

    def _open_logs(self) -> None:
        """What a stage writes of itself."""
        if self.groups.is_first:
            replace_file(self.run_dir / "config.yaml", to_yaml(self.config).encode())
        self.trace = Trace(
            self.groups.rank,
            first_step=self.step + 1,
            last_step=self.stage.last,
            trace_steps=self.config.log.trace_steps,
            synchronize=torch.cuda.synchronize if self.groups.device.type == "cuda" else None,
        )
        self.recorder = Recorder(
            self.trainer.pipeline,
            self.groups,
            first=self.step + 1,
            last=self.stage.last,
            steps=self.config.log.trace_steps,
        )
        self.routing = RoutingTrace(
            self.trainer.models,
            self.groups,
            self.run_dir,
            first=self.step + 1,
            steps=self.config.log.routing_steps,
        )

    @contextmanager
    def _phase(self, name: str, step: int) -> Iterator[None]:
        """A phase that the trace times and the watchdog knows of."""
        with self.watch.phase(name, step), self.trace.phase(name, step):
            yield

    def _train(self, progress: Progress) -> None:
        self.watch.enter("step")
        clock = time.perf_counter()
        while self.step < self.stage.last:
            self.step += 1
            reporting = self.stragglers.active and self._due(self.config.log.every)
            self.trainer.pipeline.busy = BusyClock() if reporting else None
            with self._phase("data", self.step):
                batches = self.inputs.next_step()
                if self.trainer.tower is not None and self.step < self.stage.last:
                    self.trainer.pipeline.prepare(self.inputs.images_ahead())
            with self.recorder.step(self.step), self.routing.step(self.step):
                result = train_step(self.trainer, batches, self.step, self._phase)
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            self.watch.took(seconds)
            self.skipped_in_a_row = 0 if result.updated else self.skipped_in_a_row + 1
            if not result.updated:
                self._handle_nonfinite(batches)
            stopping, slow = self._exchange()
            metrics = self._report(result, seconds, slow)
            progress.update(self.step, loss=metrics["loss"], tokens_per_second=metrics["tokens_per_second"])
            if spike := self.spikes.observe(self.step, metrics["loss"]):
                self._roll_back(spike)
            if stopping:
                self._say(f"{self.stop.received or 'stopping'}: saving at step {self.step}")
            # Weights behind a skipped step may be what broke it, and those behind a suspect loss are suspect:
            # they must not push out older checkpoints.
            suspect = self.skipped_in_a_row or self.spikes.suspects
            if stopping or (self._due(self.config.checkpoint.every) and not suspect):
                self._save(may_skip=not stopping and self.step < self.stage.last)
            self.checkpoints.poll()
            if stopping:
                self.stopped = True
                return
            # Evaluation and saving are not part of a step's time.
            clock = time.perf_counter()

    def _handle_nonfinite(self, batches: list[Batch]) -> None:
        error = explain_nonfinite(self.trainer, batches, self.step)
        given_up = self.skipped_in_a_row > MOST_SKIPS
        if given_up or not self.config.optim.skip_nonfinite:
            self.tracker.event(self.step, "diverged", str(error))
            if self.groups.is_first:
                write_report(self.run_dir)
            raise error
        self.skipped += 1
        self.tracker.event(self.step, "skipped", str(error))
        self._say(f"skipped {error}")

    def _roll_back(self, spike: Spike) -> None:
        """Return to the checkpoint before a spike; its samples are left out from then on.

        Raises:
            SpikeError: the run has gone back as often as it may.
        """
        at, most = self.step, self.config.fault.spike.rollbacks
        if self.spikes.rollbacks >= most:
            text = f"{spike}, and the run has gone back {most} times (fault.spike.rollbacks)"
            self.tracker.event(at, "diverged", text)
            raise SpikeError(text)
        with self.watch.phase("checkpoint", at):
            found = self.checkpoints.newest(before=spike.first)
            if found is None or found[1]["extra"]["step"] < self.stage.first:
                self._note(at, "spike", f"{spike}; no checkpoint before it, so the run goes on")
                self.spikes.give_up()
                return
            self._load(found, spike)
        # The lines behind the checkpoint are those of a future that is given up.
        self.tracker.close()
        self._open_tracker(resumed=False)
        steps = f"step {spike.last}" if spike.first == spike.last else f"steps {spike.first} to {spike.last}"
        self._note(
            at,
            "rollback",
            f"{spike}; back to step {self.step}, and on without the samples of {steps} "
            f"({self.spikes.rollbacks} of {most} rollbacks)",
        )

    def _note(self, step: int, kind: str, text: str) -> None:
        """Tell a person, and the history of the run."""
        self._say(text)
        self.tracker.event(step, kind, text)

    def _exchange(self) -> tuple[bool, dict[str, float]]:
        """Whether any rank was asked to stop, learnt by all at the same step, and who was slow in it."""
        stop, busy = self.stop.received is not None, self.trainer.pipeline.busy
        if busy is None:
            return self._stop_requested(), {}
        stopping, report = self.stragglers.exchange(stop, busy.take(), self.trace.spent("data"))
        for rank, text in self.stragglers.judge(report):
            self._note(self.step, "straggler", f"rank {rank}{self.watch.host_of(rank)} {text}")
        return stopping, report.metrics()

    def _report(self, result: StepResult, seconds: float, slow: dict[str, float]) -> dict[str, Any]:
        """Put the step into the logs, with the validation loss where one is due, so that a line is whole."""
        validation = captions = needles = None
        if self._due(self.config.eval.every) or self.step == self.stage.last:
            with self._phase("eval", self.step):
                held_out = self.inputs.validation()
                validation = evaluate(self.trainer, held_out).loss
                if self.config.data.source == "needles":
                    needles = caption_accuracy(self.trainer, held_out)
                if digits := self.inputs.captions():
                    captions = caption_accuracy(self.trainer, digits)
        metrics = step_metrics(
            self.config,
            result,
            seconds,
            flops.train_flops_per_token(self.config.model, self.config.data.sequence_length),
            self.groups,
        )
        if validation is not None:
            metrics["val_loss"] = validation
        if captions is not None:
            metrics["caption_accuracy"] = captions
        if needles is not None:
            metrics["needle_accuracy"] = needles
        if self.stage.name:
            metrics |= {"stage": self.stage.name, "stage_number": self.stage.index + 1}
            metrics["sequence_length"] = self.config.data.sequence_length
        if self.skipped:
            metrics["skipped_steps"] = self.skipped
        metrics |= self.trace.phase_seconds() | slow
        self.last |= metrics
        if self._due(self.config.log.every) or validation is not None:
            self.tracker.log(self.step, metrics)
        return metrics

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _stop_requested(self) -> bool:
        """Whether any rank was asked to stop; all ranks learn it at the same step."""
        flag = torch.tensor([self.stop.received is not None], dtype=torch.int32, device=self.groups.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _save(self, may_skip: bool = False) -> None:
        """Save this step, once; `may_skip` as in `CheckpointManager.save`."""
        if self.saved_step == self.step:
            return
        with self._phase("checkpoint", self.step), self.trainer.at_hand():
            extra = {"step": self.step, "skipped": self.skipped, **place(self.config), **self.spikes.state()}
            if self.skipped_in_a_row:
                extra["skipped_in_a_row"] = self.skipped_in_a_row
            modules, optimizer = self.trainer.modules, self.trainer.optimizer
            saved = self.checkpoints.save(self.step, modules, optimizer, extra, may_skip=may_skip)
        if saved:
            self.saved_step = self.step

    def _save_surely(self) -> bool:
        """Save this step and wait until it is where it belongs; False if it cannot be."""
        local = self.checkpoints.saves_locally
        self._save()
        saved = self.checkpoints.finish()
        if not saved and local and not self.checkpoints.saves_locally:
            # A local disk has failed, and the run's folder is left.
            self.saved_step = None
            self._save()
            saved = self.checkpoints.finish()
        return saved

    def _finish(self) -> None:
        self.watch.enter("finish")
        if not self._save_surely():
            raise SaveError(
                f"step {self.step} could not be saved; make room and start the same command again"
            )
        self._write_pictures()
        left_out = self.inputs.left_out()
        complete = self.step == self.config.run.steps
        bigram = self.inputs.bigram_loss() if complete and self.groups.is_first else None
        if not self.groups.is_first:
            return
        self.tracker.close()
        if left_out:
            counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            self._say(f"left out of the data so far: {counts}")
        summary.write(self.config, self.run_dir, self.groups, self.started, self.step, bigram, left_out)
        report = write_report(self.run_dir)
        self._say_goodbye(report, complete, bigram)

    def _write_pictures(self) -> None:
        """What was recorded of this stage's steps, in place of what the stage before left; a collective."""
        traces: list[Any] | None = [None] * dist.get_world_size() if self.groups.is_first else None
        dist.gather_object(self.trace.events(), traces)
        recording, held = self.recorder.gather(), self.recorder.gather_held()
        if not self.groups.is_first:
            return
        if traces and self.config.log.trace_steps:
            tracing.write(self.run_dir / "trace.json", traces)
        if recording is not None:
            timeline.write(self.run_dir, recording)
        if held:
            text = "".join(line + "\n" for line in held)
            replace_file(self.run_dir / activations.FILE, text.encode())

    def _say_goodbye(self, report: Path, complete: bool, bigram: float | None) -> None:
        if not complete and not self.stopped:
            self._say(self._nothing_left())
            return
        if not complete:
            why = self.stop.received or "a signal on another rank"
            self._say(f"{why}: saved {self.run_dir} at step {self.step}; the same command continues it")
            return
        lines = [f"loss {self.last['loss']:.4f}"]
        if "val_loss" in self.last:
            lines.append(f"validation loss {self.last['val_loss']:.4f}")
        if "caption_accuracy" in self.last:
            lines.append(f"held-out digits named rightly {self.last['caption_accuracy']:.1%}")
        if "needle_accuracy" in self.last:
            lines.append(f"codes found {self.last['needle_accuracy']:.1%}")
        if bigram is not None:
            lines.append(f"bigram model {bigram:.4f}")
        self._say(", ".join(lines))
        tool = "k3train" if shutil.which("k3train") else str(Path(sys.executable).with_name("k3train"))
        folder = shlex.quote(str(self.run_dir))
        chats = self.config.data.source == "chat"
        goes_on, example = ("ask it", 'chat="2+3?"') if chats else ("continue text", 'prompt="def "')
        self._say(
            f"{self.run_dir} is complete: open {report}, or {goes_on} with `{tool} sample {folder} {example}`"
        )

    def _nothing_left(self) -> str:
        """Why this run ends here."""
        if self.step < self.config.run.steps:
            following = stages(self.config.curriculum)[self.stage.index + 1]
            return (
                f"{self.run_dir} has stage {self.stage.name} behind it, at step {self.step}: leave "
                f"curriculum.stop_behind out to go on with stage {following.name}"
            )
        if self.stage.name:
            return f"{self.run_dir} is complete at step {self.step}: add a stage to go on"
        return (
            f"{self.run_dir} is complete at step {self.step}: raise run.steps to go on, "
            "or choose another run.dir to start anew"
        )


def _listed(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes))


def _checkpoint_bytes(config: Config) -> int:
    """Upper bound of one checkpoint: weights, FP32 master weights and two FP32 moments."""
    master = 4 if config.model.dtype == "bfloat16" else 0
    numel = shapes.total(config.model)
    if config.vision.enabled:
        numel += sum(vision_shapes.count_by_kind(config.vision, config.model.hidden_size).values())
    return numel * (shapes.BYTES["bf16" if master else "fp32"] + master + 8)
