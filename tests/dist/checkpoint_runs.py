"""What the ranks of the checkpoint tests do: short training runs of a very small model."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import torch

from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.weights import load_weights
from k3train.config import Config
from k3train.errors import UserError
from k3train.layout import layout_of
from k3train.model.naming import named_parameters
from k3train.resume import fixed_keys
from k3train.train.assemble import build_trainer, set_numerics
from k3train.train.step import Batch, Trainer, train_step
from parallel import groups
from tests.parity.worker import place_columns

VOCAB, SEQUENCE, MICROBATCHES = 64, 32, 2


def small_config(
    layout: dict[str, Any], optimizer: str = "adamw", dtype: str = "float32", policy: str | None = None
) -> Config:
    """Hidden 64, five layers (KDA, KDA, MLA, KDA, MLA), four experts, sequences of 32."""
    config = Config()
    config.run.steps = 12
    model, data, parallel = config.model, config.data, config.parallel
    model.num_layers, model.hidden_size, model.vocab_size = 5, 64, VOCAB
    model.num_heads, model.kda_head_dim, model.full_attention_every = 2, 16, 3
    model.q_lora_rank, model.kv_lora_rank = 24, 16
    model.qk_nope_head_dim, model.qk_extra_head_dim, model.v_head_dim = 16, 8, 16
    model.num_experts, model.top_k, model.latent_size, model.expert_ffn_size = 4, 2, 32, 24
    model.dense_ffn_size, model.attn_res_block_size, model.dtype = 96, 2, dtype
    data.sequence_length, data.micro_batch_size = SEQUENCE, 1
    config.optim.name = optimizer
    # Low enough for QK-Clip to act on this model.
    config.optim.qk_clip = 1e-4 if optimizer == "muon_per_head" else None
    parallel.data, parallel.zero = 1, 0 if optimizer == "muon" else 1
    if policy is not None:
        parallel.expert.dispatcher, parallel.expert.policy = "moonep", policy
        parallel.expert.eplb_every, parallel.expert.eplb_copies = 2, 1
    for name, value in layout.items():
        setattr(*((parallel.expert, "size") if name == "expert" else (parallel, name)), value)
    return config


def start(config: Config) -> Trainer:
    """Join the groups and build everything."""
    set_numerics(config)
    joined = groups.initialize(layout_of(config), timeout_minutes=1, seed=config.run.seed)
    return build_trainer(config, joined)


def batches(trainer: Trainer, step: int) -> list[Batch]:
    """Micro-batches of a step, different on each data-parallel rank."""
    rank = trainer.groups.pg_collection.dp.rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made = []
    for _ in range(MICROBATCHES):
        tokens = torch.randint(VOCAB, (1, SEQUENCE + 1), generator=generator)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, SEQUENCE),
            "sample_ids": torch.zeros(1, dtype=torch.int64),
        }
        made.append(place_columns(batch, trainer.groups.pg_collection.cp))
    return made


def train(trainer: Trainer, steps: range) -> list[list[float]]:
    """Losses and gradient norm of each step, exact."""
    reports = []
    for step in steps:
        result = train_step(trainer, batches(trainer, step), step)
        reports.append([result.losses.loss_sum, result.losses.mtp_sum, result.grad_norm])
    return reports


def fingerprint(trainer: Trainer) -> dict[str, str]:
    """A digest of each parameter, buffer and optimizer state tensor of this rank."""
    digests = {}
    for model in trainer.models:
        for name, tensor in itertools.chain(named_parameters(model), model.named_buffers()):
            digests[name] = _digest(tensor)
    for index, part in enumerate(getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])):
        for place, parameter in enumerate(p for g in part.optimizer.param_groups for p in g["params"]):
            for key, value in part.optimizer.state[parameter].items():
                digests[f"optimizer {index} parameter {place} {key}"] = _digest(torch.as_tensor(value))
    return digests


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def manager(
    trainer: Trainer, root: str, told: list[str], asynchronous: bool = False, keep: int = 0
) -> CheckpointManager:
    """A manager that collects its messages."""
    return CheckpointManager(
        Path(root),
        groups=trainer.groups,
        keep=keep,
        asynchronous=asynchronous,
        fixed=fixed_keys(trainer.config),
        message=told.append,
    )


def straight_and_resumed(root: str, asynchronous: bool, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Six steps with a save after the third, which training overtakes when asynchronous; then the last three
    again with everything built anew and loaded."""
    told: list[str] = []
    trainer = start(small_config(**config))
    checkpoints = manager(trainer, root, told, asynchronous)
    train(trainer, range(1, 4))
    checkpoints.save(3, trainer.modules, trainer.optimizer, {"step": 3, "share": 0.1})
    whole = _three_steps(trainer)
    published = checkpoints.wait()
    torch.manual_seed(99)
    other = build_trainer(trainer.config, trainer.groups)
    train(other, range(8, 9))
    fresh = build_trainer(trainer.config, trainer.groups)
    extra = manager(fresh, root, told).load(fresh.modules, fresh.optimizer)
    counters = [
        state["step"]
        for part in getattr(fresh.optimizer, "chained_optimizers", [fresh.optimizer])
        for state in part.optimizer.state.values()
        if "step" in state
    ]
    return [
        {**whole, "published": published, "told": told},
        {
            **_three_steps(fresh),
            "extra": extra,
            "counters": len(counters),
            "own_counters": len({id(counter) for counter in counters}),
        },
    ]


def _three_steps(trainer: Trainer) -> dict[str, Any]:
    drawn = torch.rand(3).tolist()
    return {"drawn": drawn, "losses": train(trainer, range(4, 7)), "tensors": fingerprint(trainer)}


def trained_weights(root: str, config: dict[str, Any]) -> dict[str, str]:
    """Digests of this rank's weights after two steps, which are saved."""
    trainer = start(small_config(**config))
    train(trainer, range(1, 3))
    manager(trainer, root, []).save(2, trainer.modules, trainer.optimizer, {"step": 2})
    return _named_weights(trainer)


def loaded_weights(root: str, config: dict[str, Any]) -> dict[str, str]:
    """Digests of this rank's weights as another layout takes them from a checkpoint."""
    trainer = start(small_config(**config))
    (model,) = trainer.models
    assert load_weights(Path(root), model) == 2
    return _named_weights(trainer)


def _named_weights(trainer: Trainer) -> dict[str, str]:
    return {name: _digest(p) for model in trainer.models for name, p in named_parameters(model)}


def damaged(root: str) -> dict[str, list[str]]:
    """Load after each kind of damage to the newer of two checkpoints; what was told and loaded."""
    trainer = start(small_config({}))
    checkpoints = manager(trainer, root, [])
    for step in (1, 2):
        checkpoints.save(step, trainer.modules, trainer.optimizer, {"step": step})
    answers = {}
    for name, damage in DAMAGES.items():
        copy = Path(root).with_name(name.replace(" ", "-"))
        shutil.copytree(root, copy)
        damage(copy / "step-00000002")
        told: list[str] = []
        extra = manager(trainer, str(copy), told).load(trainer.modules, trainer.optimizer)
        answers[name] = [str((extra or {}).get("step")), *told]
    return answers


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _tear(folder: Path) -> None:
    os.truncate(_largest(folder), 1000)


def _flip(folder: Path) -> None:
    with _largest(folder).open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


DAMAGES = {
    "nothing": lambda folder: None,
    "torn file": _tear,
    "flipped bit": _flip,
    "missing file": lambda folder: _largest(folder).unlink(),
    "torn manifest": lambda folder: os.truncate(folder / "manifest.json", 50),
    "partial": lambda folder: folder.rename(folder.with_name(folder.name + ".partial")),
}


def refused(root: str) -> list[str]:
    """Errors of loading with another configuration, of a full disk during a save, and what is left."""
    told: list[str] = []
    trainer = start(small_config({}))
    checkpoints = manager(trainer, root, told)
    checkpoints.save(1, trainer.modules, trainer.optimizer, {"step": 1})
    checkpoints.fixed = {**checkpoints.fixed, "optim.lr": 0.5, "model.top_k": 3}
    answers = []
    try:
        checkpoints.load(trainer.modules, trainer.optimizer)
    except UserError as error:
        answers.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoints.save(2, trainer.modules, trainer.optimizer, {"step": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.save(3, trainer.modules, trainer.optimizer, {"step": 3})
    return [*answers, *told, *sorted(path.name for path in Path(root).iterdir())]


def save_for_ever(root: str) -> None:
    """Load what is there, say so in a file, then save after every step until killed."""
    told: list[str] = []
    trainer = start(small_config({"expert": 2, "data": 2}))
    checkpoints = manager(trainer, root, told, asynchronous=True, keep=2)
    extra = checkpoints.load(trainer.modules, trainer.optimizer) or {"step": 0, "digest": ""}
    same = extra["digest"] in ("", _weights(trainer))
    if trainer.groups.is_first:
        report = {"step": extra["step"], "same": same, "told": told}
        unfinished = Path(root).with_name("report.tmp")
        unfinished.write_text(json.dumps(report))
        unfinished.rename(unfinished.with_name("report.json"))
    for step in itertools.count(extra["step"] + 1):
        train(trainer, range(step, step + 1))
        checkpoints.save(
            step, trainer.modules, trainer.optimizer, {"step": step, "digest": _weights(trainer)}
        )
        checkpoints.poll()


def _weights(trainer: Trainer) -> str:
    """Digest of rank 0's parameters, known to all."""
    digest = [
        _digest(torch.cat([p.detach().view(-1) for model in trainer.models for p in model.parameters()]))
    ]
    torch.distributed.broadcast_object_list(digest, src=0)
    return digest[0]


def saved_in(root: str, config: dict[str, Any]) -> None:
    """Two steps, which are saved."""
    trainer = start(small_config(**config))
    train(trainer, range(1, 3))
    manager(trainer, root, []).save(2, trainer.modules, trainer.optimizer, {"step": 2})


def moved_to(root: str, config: dict[str, Any]) -> dict[str, Any]:
    """Take over what another layout saved, save it again as step 3 in this one, and train on."""
    trainer = start(small_config(**config))
    told: list[str] = []
    checkpoints = manager(trainer, root, told)
    layout_keys = ("parallel.", "data.micro_batch_size")
    extra = checkpoints.load(trainer.modules, trainer.optimizer, free=lambda key: key.startswith(layout_keys))
    assert extra == {"step": 2}
    checkpoints.save(3, trainer.modules, trainer.optimizer, {"step": 3})
    return {"losses": train(trainer, range(3, 5)), "told": told}
