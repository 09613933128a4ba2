"""What one gloo process does for the tests of the Hugging Face exchange."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from k3train.checkpoint.sources import open_weights
from k3train.checkpoint.weights import fill
from k3train.config import Config, QuantConfig
from k3train.initial import shapes_of
from tests import reference_k3
from tests.unit.checkpoint.huggingface import released

TOKENS = 29


def compare(folders: dict[str, str]) -> dict[str, Any]:
    """Differences between our model, loaded from folders, and the reference in FP32 and FP64.

    For each folder and precision: of logits of standard deviation 1, and of the worst intermediate value of
    each kind as a share of its standard deviation.
    """
    from k3train.layout import layout_of
    from parallel.groups import initialize

    os.environ.pop("MASTER_PORT", None)
    os.environ.pop("MASTER_ADDR", None)
    groups = initialize(layout_of(_single(folders["plain"])), timeout_minutes=1, seed=1)
    answers: dict[str, Any] = {}
    for name, folder in folders.items():
        tokens = torch.randint(0, 320, (TOKENS,), generator=torch.Generator().manual_seed(3))
        for dtype in (torch.float32, torch.float64):
            model = _model(folder, groups, dtype)
            answers[f"{name} {str(dtype)[6:]}"] = _differences(model, folder, tokens, dtype)
    answers["image"] = _image_difference(folders["plain"])
    return answers


@torch.no_grad()
def quantised(pairs: dict[str, list[str]]) -> dict[str, bool]:
    """Whether a rounded forward on a folder and an exact one on its packed export have the same bits.

    `pairs`: rounding of scales -> the two folders.
    """
    from k3train.layout import layout_of
    from k3train.ops.packing import Packing
    from parallel.groups import initialize

    os.environ.pop("MASTER_PORT", None)
    os.environ.pop("MASTER_ADDR", None)
    tokens = torch.randint(0, 320, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    groups: Any = None
    same = {}
    for rounding, (trained, packed) in pairs.items():
        logits = []
        for folder, recipe in ((trained, "mxfp4_qat"), (packed, "none"), (trained, "none")):
            config = _single(folder)
            config.model.dtype = "bfloat16"
            config.quant = QuantConfig(recipe=recipe, scale_rounding=rounding, activation_format="none")
            groups = groups or initialize(layout_of(config), timeout_minutes=1, seed=1)
            model = _built(config, folder, groups)
            logits.append(model(tokens, Packing.single(1, TOKENS, "cpu")))
        same[rounding] = torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    return same


def _single(folder: str) -> Config:
    model, _ = shapes_of(folder)
    config = Config(model=replace(model, dtype="float32"))
    config.parallel.data, config.optim.qk_clip = 1, 0.0
    return config


def _model(folder: str, groups: Any, dtype: torch.dtype) -> Any:
    return _built(_single(folder), folder, groups, dtype)


def _built(config: Config, folder: str, groups: Any, dtype: torch.dtype | None = None) -> Any:
    """A chunk with all layers; `dtype` of all its tensors, where it is not the configuration's."""
    from k3train.model.decoder import LanguageModelChunk
    from k3train.model.transformer_config import transformer_config

    layers = range(config.model.num_layers)
    model = LanguageModelChunk(transformer_config(config), layers, groups.pg_collection)
    model = model if dtype is None else model.to(dtype)
    assert fill([model], open_weights(Path(folder))) == set()
    return model.eval()


def _unpacked(folder: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((Path(folder) / "config.json").read_text())
    return config, {
        key: value.to(dtype) for key, value in released.unpacked(released.load(Path(folder))).items()
    }


@torch.no_grad()
def _differences(model: Any, folder: str, tokens: Tensor, dtype: torch.dtype) -> dict[str, float]:
    from k3train.ops.packing import Packing

    config, weights = _unpacked(folder, dtype)
    theirs: dict[str, Tensor] = {}
    expected = reference_k3.forward(config, weights, tokens, theirs)
    # What our model widens to FP32 is widened to FP64 here.
    wide = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    with wide if dtype is torch.float64 else nullcontext(), _watched(model) as ours:
        logits = model(tokens[None], Packing.single(1, len(tokens), "cpu"))[0]
    scale = expected.std()
    answer = {"logits": ((logits - expected).abs().max() / scale).item(), "spread": scale.item()}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        kind = name.partition(".")[2]
        error = ((ours[name].reshape(value.shape) - value).abs().max() / value.std()).item()
        answer[kind] = max(answer.get(kind, 0.0), error)
    return answer


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, Tensor]]:
    """Under the names of the reference, what our modules hand on."""
    seen: dict[str, Tensor] = {}
    hooks = []

    def keep(name: str, module: Any, *, before: bool = False) -> None:
        def hook(_: Any, inputs: Any, output: Any = None) -> None:
            value = inputs[0] if before else output
            seen[name] = _dense(value, model) if name.endswith("router") else _first(value)

        hooks.append((module.register_forward_pre_hook if before else module.register_forward_hook)(hook))

    for index, layer in model.layers.items():
        keep(f"{index}.attention", layer.self_attention)
        keep(f"{index}.mlp", layer.mlp)
        if hasattr(layer.self_attention, "A_log"):
            keep(f"{index}.kda", layer.self_attention.o_norm, before=True)
        if hasattr(layer.mlp, "router"):
            keep(f"{index}.router", layer.mlp.router)
            keep(f"{index}.latent", layer.mlp.latent_norm, before=True)
    yield seen
    for hook in hooks:
        hook.remove()


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def _dense(routing: Any, model: Any) -> Tensor:
    """Weights of all experts, zero where a token does not go."""
    shape = (len(routing.choice), model.config.k3.num_experts)
    return routing.weights.new_zeros(shape).scatter(1, routing.choice, routing.weights)


@torch.no_grad()
def _image_difference(folder: str) -> float:
    """Of the features of an image, of standard deviation about 1, in FP64."""
    from k3train.model.vision import VisionModel

    model, vision = shapes_of(folder)
    assert vision is not None
    tower = VisionModel(vision, model.hidden_size, torch.float64)
    source = open_weights(Path(folder))
    for name, parameter in tower.named_parameters():
        parameter.copy_(source.read(f"vision.{name}"))
    pixels = torch.randn(16, 3, 14, 14, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    config, weights = _unpacked(folder, torch.float64)
    expected = reference_k3.image_features(config, weights, pixels, 4, 4, vision.norm_eps)
    features, _ = tower(pixels.flatten(1), [(1, 4, 4)])
    return (features - expected).abs().max().item()


def train_from(source: str, run_dir: str, overrides: list[str]) -> list[str]:
    """A run from weights with the command line's own keys; what it said."""
    from k3train.train.session import Session
    from launch.compose import ready

    said: list[str] = []
    with mock.patch.object(Session, "_say", lambda _, text: said.append(text)):
        Session([ready([*overrides, f"init_from={source}", f"run.dir={run_dir}"])]).run()
    return said
