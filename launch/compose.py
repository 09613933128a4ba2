"""From `conf/` and command-line overrides to one typed `Config`. Imports no torch."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf, open_dict

from k3train import calibration, curriculum
from k3train.activation_policy import TOWER_LAYER, policy_of, with_storage
from k3train.checkpoint import manifest
from k3train.checkpoint.folders import available, complete
from k3train.config import Config
from k3train.config_file import load_yaml, to_yaml
from k3train.errors import UserError
from k3train.initial import follow
from k3train.validate import validate

from .activations import rules
from .overrides import check_overrides, explain, parse

__all__ = ["compose", "load_yaml", "ready", "ready_stages", "resolve_layout", "to_yaml", "world_size"]

QK_CLIP = 100.0
"""Kimi K2's bound on an attention logit."""

SPECIAL, ESCAPED = r"([\\()\[\]{}:=, \t])", r"\\\1"
"""What Hydra's grammar wants escaped outside of quotes."""

ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `conf/` and `overrides` (Hydra's syntax) describe, interpolations resolved.

    Raises UserError, in one line, for an unknown key or option and for a value of the wrong type.
    """
    checked = check_overrides(overrides)
    GlobalHydra.instance().clear()
    with explain(overrides), initialize_config_module("conf", version_base="1.3"):
        tree = hydra_compose("config", checked, return_hydra_config=True)
        recipe = tree.hydra.runtime.choices.recipe
        with open_dict(tree):
            del tree["hydra"]
        tree.recipe = recipe
        config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    given = {override.key_or_group for override in parse(overrides)}
    _follow_budget(config, given)
    if config.cluster.calibration is not None:
        config.cluster = calibration.apply(
            config.cluster, calibration.read(config.cluster.calibration), given
        )
    config.offload.resolved = rules(config, given)
    return _follow_vision(_follow_pipeline(follow(config, given), given), given)


def ready(overrides: Sequence[str], *, inputs: bool = True) -> Config:
    """Compose, resolve and validate; `inputs=False` leaves files and folders unchecked (plan, job files).

    Of a run in stages, the stage that comes next.
    """
    return ready_stages(overrides, inputs=inputs)[0]


def ready_stages(
    overrides: Sequence[str], *, inputs: bool = True, from_start: bool = False, done: int | None = None
) -> list[Config]:
    """The configuration of each stage that is left to run, ready to be run on one number of ranks.

    A run without stages is one. With `from_start`, those too that the run's folder has behind it. `done`: the
    steps to go on behind, where these are not those of the newest checkpoint.
    Raises UserError for the first stage that cannot work.
    """
    composed = compose(overrides)
    if composed.curriculum.stage is not None:
        raise UserError(f"curriculum.stage={composed.curriculum.stage}: follows from the step; leave it out")
    found = curriculum.stages(composed.curriculum)
    if not found:
        return [_resolved(composed, world_size(composed), inputs)]
    _refuse_overridden(composed, overrides, found)
    configs = []
    for stage in found:
        with _of_stage(stage):
            configs.append(compose([*overrides, *_stage_overrides(stage, curriculum.total_steps(found))]))
    # Of all stages, done or not: a run that goes on must find the ranks that it was started with.
    ranks = max(map(world_size, configs))
    if done is None:
        done = 0 if from_start else _steps_done(composed)
        _refuse_passed(configs, found, done)
    resolved = []
    for stage in curriculum.to_run(found, done, composed.curriculum.stop_behind):
        with _of_stage(stage):
            resolved.append(_resolved(configs[stage.index], ranks, inputs))
    return resolved


def _resolved(composed: Config, ranks: int, inputs: bool) -> Config:
    config = resolve_layout(composed, ranks)
    validate(config, ranks, inputs=inputs)
    if config.offload.budget_gb is not None:
        from k3train.activation_plan import with_budget
        from k3train.layout import layout_of

        return with_budget(config, layout_of(config, ranks))
    if config.vision.enabled and policy_of(config).pattern(TOWER_LAYER) is None:
        from k3train.plan import recomputes_vision

        found = "recompute" if recomputes_vision(config, ranks) else "keep"
        config.offload.resolved = with_storage(config, {TOWER_LAYER: found})
    return config


def _steps_done(config: Config) -> int:
    """Steps that the run's folder has a checkpoint of."""
    if not config.run.resume:
        return 0
    return max(available(Path(config.run.dir).expanduser() / "checkpoints"), default=0)


def _stage_overrides(stage: curriculum.Stage, steps: int) -> list[str]:
    """What makes a configuration that of a stage, in Hydra's syntax; `steps` of the whole run."""
    changes = {**stage.changes, "run.steps": steps, "curriculum.stage": stage.name}
    return [f"{key}={_written(value)}" for key, value in changes.items()]


def _written(value: Any) -> str:
    """A value in Hydra's grammar, where keys of mappings are not quoted but escaped."""
    if isinstance(value, Mapping):
        entries = (f"{re.sub(SPECIAL, ESCAPED, str(key))}: {_written(entry)}" for key, entry in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return QuotedString(value, Quote.double).with_quotes()
    return "null" if value is None else str(value).lower()


def _refuse_passed(configs: Sequence[Config], found: Sequence[curriculum.Stage], done: int) -> None:
    """Refuse stages that the newest checkpoint does not belong to, and an end that lies before it."""
    if not done:
        return
    run, stop_behind = configs[0].run, configs[0].curriculum.stop_behind
    folder = complete(Path(run.dir).expanduser() / "checkpoints", done)
    try:
        saved = manifest.read(folder)["extra"]
    except (OSError, ValueError, KeyError, TypeError):
        saved = None  # damaged, as the ranks will find; the one before may do
    if saved is not None:
        curriculum.is_border(configs[curriculum.at_step(found, done).index], done, saved)
    last, now = curriculum.last_step(configs[0]), curriculum.at_step(found, done).name
    if stop_behind is not None and done > last:
        raise UserError(
            f"curriculum.stop_behind={stop_behind}: it ends behind step {last}, and the run in {run.dir} is "
            f"at step {done}; name stage {now} or a later one, or leave it out"
        )


def _refuse_overridden(composed: Config, overrides: Sequence[str], found: list[curriculum.Stage]) -> None:
    """Refuse a key of the command line that no stage would heed."""
    for override in parse(overrides):
        key = override.key_or_group
        if key == "run.steps":
            raise UserError(
                f"{override.input_line}: a run in stages takes their steps; set curriculum.stages.NAME.steps"
            )
        if all(key in stage.changes for stage in found):
            raise UserError(f"{override.input_line}: every stage sets it; set curriculum.stages.NAME.{key}")


@contextmanager
def _of_stage(stage: curriculum.Stage) -> Iterator[None]:
    """Say which stage was refused."""
    try:
        yield
    except UserError as error:
        raise UserError(f"stage {stage.name}: {error}") from error


def world_size(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Number of ranks: torchrun's own, else the cluster's, else the least that the layout needs."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["WORLD_SIZE"])
    cluster, parallel = config.cluster, config.parallel
    if cluster.ranks_per_node is not None or cluster.nodes > 1:
        return cluster.nodes * (cluster.ranks_per_node or cluster.gpus_per_node)
    context, expert = max(1, parallel.context), max(1, parallel.expert.size)
    data = expert // math.gcd(expert, context) if parallel.data is None else parallel.data
    return max(1, parallel.pipeline) * context * data


def resolve_layout(
    config: Config, world_size: int | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """A copy with every derived key filled in: data, zero, qk_clip, vocab_size, nodes and ranks_per_node.

    `eval.batches` is rounded up to what the layout can share.

    Never refuses a layout (`validate` does); raises UserError when the tokenizer cannot be read.
    """
    resolved = copy.deepcopy(config)
    ranks = _ranks(config, environ) if world_size is None else world_size
    parallel, cluster, model = resolved.parallel, resolved.cluster, resolved.model
    if parallel.data is None:
        parallel.data = max(1, ranks // max(1, parallel.pipeline * parallel.context))
    if parallel.zero is None:
        parallel.zero = 0 if resolved.optim.name == "muon" else 1
    if resolved.optim.qk_clip is None:
        resolved.optim.qk_clip = QK_CLIP if resolved.optim.name == "muon_per_head" else 0.0
    # Each data rank takes as many validation micro-batches.
    if parallel.data > 0 and resolved.eval.batches > 0:
        resolved.eval.batches = math.ceil(resolved.eval.batches / parallel.data) * parallel.data
    if model.vocab_size is None:
        model.vocab_size = _vocabulary(resolved.data.tokenizer, max(1, model.vocab_multiple))
    if "RANK" in environ and "LOCAL_WORLD_SIZE" in environ:
        cluster.ranks_per_node = int(environ["LOCAL_WORLD_SIZE"])
        cluster.nodes = max(1, ranks // cluster.ranks_per_node)
    elif cluster.ranks_per_node is None:
        cluster.ranks_per_node = max(1, ranks // max(1, cluster.nodes))
    return resolved


def _vocabulary(tokenizer: str, multiple: int) -> int:
    """Number of token ids, special ones included, rounded up to `multiple`."""
    from k3train.data.tokenizer import byte_vocab_size, load_tokenizer

    size = byte_vocab_size() if tokenizer == "byte" else load_tokenizer(tokenizer).vocab_size
    return math.ceil(size / multiple) * multiple


_ranks = world_size


def _follow_pipeline(config: Config, given: set[str]) -> Config:
    """One stage has one chunk: a recipe's own cut falls away with its pipeline, unless it was asked for."""
    if "parallel.pipeline" in given and config.parallel.pipeline == 1:
        if "parallel.virtual" not in given:
            config.parallel.virtual = 1
        if "parallel.layers_per_chunk" not in given:
            config.parallel.layers_per_chunk = None
    return config


def _follow_budget(config: Config, given: set[str]) -> None:
    """A budget finds its own policy: a recipe's falls away, unless it was asked for."""
    if config.offload.budget_gb is not None and "offload.policy" not in given:
        config.offload.policy = "keep"


def _follow_vision(config: Config, given: set[str]) -> Config:
    """Without a tower, or with chats, a recipe's own images fall away, unless they were asked for."""
    without = not config.vision.enabled and given & {"vision", "vision.enabled"}
    chats = config.data.source == "chat" and given & {"data", "data.source"}
    if (without or chats) and "data.images" not in given:
        config.data.images = []
    return config
