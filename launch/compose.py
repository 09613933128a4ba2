"""From `conf/` and command-line overrides to one typed `Config`. Imports no torch."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

from k3train.activation_policy import TOWER_LAYER, policy_of, with_storage
from k3train.config import Config
from k3train.config_file import load_yaml, to_yaml
from k3train.initial import follow
from k3train.validate import validate

from .activations import rules
from .overrides import check_overrides, explain, parse

__all__ = ["compose", "load_yaml", "ready", "resolve_layout", "to_yaml", "world_size"]

QK_CLIP = 100.0
"""Kimi K2's bound on an attention logit."""

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
    config.offload.resolved = rules(config, given)
    return _follow_vision(_follow_pipeline(follow(config, given), given), given)


def ready(overrides: Sequence[str], *, inputs: bool = True) -> Config:
    """Compose, resolve and validate; `inputs=False` leaves files and folders unchecked (plan, job files)."""
    composed = compose(overrides)
    ranks = world_size(composed)
    config = resolve_layout(composed, ranks)
    validate(config, ranks, inputs=inputs)
    if config.offload.budget_gb is not None:
        from k3train.activation_plan import with_budget
        from k3train.plan import layout_of

        return with_budget(config, layout_of(config, ranks))
    if config.vision.enabled and policy_of(config).pattern(TOWER_LAYER) is None:
        from k3train.plan import recomputes_vision

        found = "recompute" if recomputes_vision(config, ranks) else "keep"
        config.offload.resolved = with_storage(config, {TOWER_LAYER: found})
    return config


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
