"""What the folder of `init_from` says about its weights, before anything is built: needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

from .checkpoint.huggingface.config import FILE, TRAINING_ONLY, differences, read
from .config import Config, ModelConfig
from .config_file import load_yaml
from .errors import UserError
from .vision_config import VisionConfig

PLACEMENT = ("enabled", "mode", "attention", "max_patches")
"""Keys of the vision section that are no part of the tower's shape."""


def shapes_of(folder: str) -> tuple[ModelConfig, VisionConfig | None]:
    """Model and tower of a Hugging Face folder or of a run.

    Raises:
        UserError: the folder is neither, or describes a model that is not ours.
    """
    path = Path(folder).expanduser()
    if (path / FILE).is_file():
        description = read(path)
        return description.model, description.vision
    if (path / "config.yaml").is_file():
        config = load_yaml(path / "config.yaml")
        return config.model, config.vision if config.vision.enabled else None
    raise UserError(
        f"init_from={folder}: has neither the {FILE} of a Hugging Face folder nor the config.yaml of a run"
    )


def follow(config: Config, given: Collection[str]) -> Config:
    """Give a model, and its tower, the shape of the weights it starts from, but for keys that were asked for.

    A run that goes on has its own, and needs the folder no more.

    Raises:
        UserError: see `shapes_of`.
    """
    if config.init_from is None:
        return config
    run = Path(config.run.dir).expanduser()
    goes_on = config.run.resume and (run / "config.yaml").is_file()
    model, vision = shapes_of(str(run) if goes_on else config.init_from)
    config.model = _shaped(config.model, model, "model", TRAINING_ONLY, given)
    if vision is not None and config.vision.enabled:
        config.vision = _shaped(config.vision, vision, "vision", PLACEMENT, given)
    return config


def check(config: Config) -> None:
    """Refuse weights of another model; raises UserError with the first key that differs."""
    if config.init_from is None:
        return
    model, vision = shapes_of(config.init_from)
    for key, ours, theirs in differences(config.model, model):
        raise UserError(f"model.{key}={ours}: the weights of init_from={config.init_from} have {theirs}")
    if vision is None or not config.vision.enabled:
        return
    for entry in fields(VisionConfig):
        ours, theirs = getattr(config.vision, entry.name), getattr(vision, entry.name)
        if entry.name not in PLACEMENT and ours != theirs:
            raise UserError(
                f"vision.{entry.name}={ours}: the weights of init_from={config.init_from} have {theirs}"
            )


def _shaped[Section: (ModelConfig, VisionConfig)](
    ours: Section, theirs: Section, prefix: str, free: Collection[str], given: Collection[str]
) -> Section:
    """Our section with what makes the shape taken from theirs."""
    if prefix in given:
        return ours
    taken = {
        entry.name: getattr(theirs, entry.name)
        for entry in fields(theirs)
        if entry.name not in free and f"{prefix}.{entry.name}" not in given
    }
    return replace(ours, **taken)
