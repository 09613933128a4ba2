"""A run in stages: what each stage changes, which steps are its own, and what stands at its borders.

Step numbers, the learning-rate schedule and the state of model and optimizer run on through all stages; the
place in the data is counted from the stage's first step. Imports no torch.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import Config, CurriculumConfig, flatten
from .errors import UserError

CHANGEABLE = (
    "run.microbatches", "data.sequence_length", "data.micro_batch_size", "data.source", "data.train",
    "data.train_weights", "data.valid", "data.image_share", "data.max_patches",
    "parallel.pipeline", "parallel.virtual", "parallel.context", "parallel.data", "parallel.zero",
    "parallel.expert.size", "parallel.expert.slots", "parallel.microbatch_group", "parallel.layers_per_chunk",
    "optim.lr", "eval.every", "eval.batches",
)  # fmt: skip
CHANGEABLE_SECTIONS = ("data.long_documents", "data.needles", "offload")
"""What a stage may set beside its steps: length and source of samples, and where they are computed."""

STAGE_SALT = 1 << 40
"""Every stage but the first puts the documents into orders of its own."""


@dataclass(frozen=True)
class Stage:
    """One stage; its steps are numbered from `first` + 1 to `last`."""

    name: str
    index: int
    first: int
    steps: int
    changes: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""

    @property
    def last(self) -> int:
        """Number of its last step in the whole run."""
        return self.first + self.steps


def stages(curriculum: CurriculumConfig) -> list[Stage]:
    """All stages in order. Raises UserError for the first thing that is wrong with one of them."""
    found: list[Stage] = []
    for name, entry in curriculum.stages.items():
        where = f"curriculum.stages.{name}"
        if not isinstance(entry, Mapping):
            raise UserError(f"{where}={entry}: write its steps and keys, as {{steps: 100, data: {{...}}}}")
        steps = entry.get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise UserError(f"{where}.steps={'null' if steps is None else steps}: an integer of at least 1")
        rest = {key: value for key, value in entry.items() if key != "steps"}
        changes = dict(_leaves(rest, "", where))
        found.append(Stage(str(name), len(found), found[-1].last if found else 0, steps, changes))
    for key in ("stop_behind", "stage"):
        value = getattr(curriculum, key)
        if value is not None and value not in curriculum.stages:
            valid = ", ".join(map(str, curriculum.stages)) or "none, as curriculum.stages is empty"
            raise UserError(f"curriculum.{key}={value}: no such stage; valid are {valid}")
    return found


def _leaves(tree: Mapping[Any, Any], prefix: str, where: str) -> Iterator[tuple[str, Any]]:
    known = flatten(Config())
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known:
            if not may_change(key):
                raise UserError(
                    f"{where}.{key}={value}: the same in all stages, so set {key} itself; a stage may set "
                    f"{', '.join(CHANGEABLE)} and {', '.join(f'{name}.*' for name in CHANGEABLE_SECTIONS)}"
                )
            yield key, value
        elif isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in known):
            yield from _leaves(value, f"{key}.", where)
        else:
            near = difflib.get_close_matches(key, list(known), n=1)
            raise UserError(f"{where}.{key}: no such key{f'; did you mean {near[0]}?' if near else ''}")


def may_change(key: str) -> bool:
    """Whether a stage may set a dotted key."""
    return key in CHANGEABLE or key.startswith(tuple(f"{name}." for name in CHANGEABLE_SECTIONS))


def total_steps(found: Sequence[Stage]) -> int:
    """Steps of the whole run."""
    return found[-1].last


def last_step(config: Config) -> int:
    """Number of the step that a run ends behind: that of its last stage, or of `curriculum.stop_behind`."""
    found, stop_behind = stages(config.curriculum), config.curriculum.stop_behind
    if not found:
        return config.run.steps
    return next((stage.last for stage in found if stage.name == stop_behind), total_steps(found))


def at_step(found: Sequence[Stage], done: int) -> Stage:
    """The stage of the step behind `done` steps; the last one when all are done."""
    return next((stage for stage in found if done < stage.last), found[-1])


def to_run(found: Sequence[Stage], done: int, stop_behind: str | None) -> list[Stage]:
    """The stages from the step behind `done` on, up to `stop_behind`; at least one."""
    start = at_step(found, done).index
    stop = next((stage.index for stage in found if stage.name == stop_behind), len(found) - 1)
    return list(found[min(start, stop) : stop + 1])


def stage_of(config: Config) -> Stage:
    """The stage that a configuration is of; a run without stages is a single one."""
    if config.curriculum.stage is None:
        return Stage("", 0, 0, config.run.steps)
    return next(stage for stage in stages(config.curriculum) if stage.name == config.curriculum.stage)


def data_salt(config: Config) -> int:
    """What a stage adds to the seed of the order of its training data."""
    return STAGE_SALT * stage_of(config).index


def place(config: Config) -> dict[str, Any]:
    """What a checkpoint of a stage says about it; nothing without stages."""
    stage = stage_of(config)
    return {"stage": stage.name, "stage_first": stage.first} if stage.name else {}


def is_border(config: Config, step: int, saved: Mapping[str, Any]) -> bool:
    """Whether a state saved behind `step` is the end of the stage before that of `config`.

    Args:
        saved: what `place` said when it was saved.

    Raises:
        UserError: the state is of no stage that the curriculum has there.
    """
    stage, name = stage_of(config), saved.get("stage")
    if stage.first <= step <= stage.last:
        if (name or "", saved.get("stage_first", 0)) == (stage.name, stage.first):
            return False
        # What a run without stages has done may be the first stage of one.
        if name is None and stage.index == 0:
            return False
        before = next((s for s in stages(config.curriculum) if s.last == stage.first), None)
        first = before is not None and before.index == 0
        if step == stage.first and before is not None and (name == before.name or (first and name is None)):
            return True
    if name is None and not stage.name:
        return False
    raise UserError(f"the checkpoint of step {step} is of {_misfit(config, step, saved)}")


def _misfit(config: Config, step: int, saved: Mapping[str, Any]) -> str:
    """What a state of another stage is of, and what would make it fit."""
    name, first, stage = saved.get("stage"), saved.get("stage_first", 0), stage_of(config)
    same = next((s for s in stages(config.curriculum) if s.name == name), None)
    if same is not None and same.first != first:
        return (
            f"stage {name}, which began behind step {first} and would now begin behind step {same.first}; "
            "set the steps of the stages before it as they were, or start a new run in another run.dir"
        )
    if same is not None and same.last < step:
        return (
            f"stage {name}, which would now end behind step {same.last}; "
            f"set curriculum.stages.{name}.steps to at least {step - first}"
        )
    was = f"stage {name} that begins behind step {first}" if name else "a run without stages"
    now = f"in stage {stage.name}" if stage.name else "a run without stages"
    return (
        f"{was}, and the run is now {now}; set curriculum.stages as they were, or start a new run in another "
        "run.dir"
    )


def shrinking(found: Sequence[Config]) -> list[str]:
    """A warning for each stage whose samples are shorter than those of the stage before."""
    return [
        f"stage {after.curriculum.stage} has samples of {after.data.sequence_length:,} tokens, behind "
        f"{before.data.sequence_length:,} in stage {before.curriculum.stage}"
        for before, after in itertools.pairwise(found)
        if after.data.sequence_length < before.data.sequence_length
    ]


def row(config: Config) -> dict[str, Any]:
    """A stage as a table shows it; of a resolved configuration."""
    stage, parallel, data = stage_of(config), config.parallel, config.data
    assert parallel.data is not None, "the layout has not been resolved"
    batch = data.micro_batch_size * config.run.microbatches * parallel.data
    layout = {
        "PP": parallel.pipeline,
        "VPP": parallel.virtual,
        "CP": parallel.context,
        "DP": parallel.data,
        "EP": parallel.expert.size,
    }
    long = data.long_documents
    return {
        "stage": stage.name,
        "steps": f"{stage.first + 1}-{stage.last}",
        "sequence_length": data.sequence_length,
        "samples_per_step": batch,
        "tokens": stage.steps * batch * data.sequence_length,
        "ranks": parallel.pipeline * parallel.context * parallel.data,
        "layout": " x ".join(f"{name}{size}" for name, size in layout.items() if size > 1) or "one rank",
        "long_documents": None if long.at_least is None else f"{long.times} x from {long.at_least:,}",
    }
