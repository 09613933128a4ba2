"""Refuses a configuration that cannot work, in one line, before any process group exists; needs no torch."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import compatibility, initial
from .activation_checks import check_disk, check_policy
from .checkpoint.folders import available
from .config import Config, flatten
from .config_file import load_yaml
from .curriculum import may_change
from .errors import UserError
from .quant.formats import BLOCK, FORMATS, PRODUCTS, ROUNDINGS, native_refusal
from .redaction import check_secrets
from .resume import changes, fixed_keys, refuse_batch, shown

Check = Callable[[Config, int], None]

CHOICES: dict[str, tuple[Any, ...]] = {
    "run.device": ("auto", "cpu", "cuda"),
    "model.dtype": ("float32", "bfloat16"),
    "model.mtp_layers": (0, 1),
    "model.backends.kda": ("auto", "fla", "chunk", "recurrent", "triton"),
    "model.backends.short_conv": ("auto", "fla", "shift", "reference"),
    "model.backends.attn_res": ("auto", "fla", "lean", "reference"),
    "model.backends.situ": ("auto", "triton", "lean", "reference"),
    "model.backends.attention": ("auto", "te", "flash", "sdpa", "reference"),
    "model.backends.grouped": ("auto", "te", "grouped_mm", "loop"),
    "vision.mode": ("bubbles", "inline", "phase"),
    "vision.attention": ("auto", "varlen", "sdpa", "reference"),
    "model.backends.linear": ("auto", "local", "te"),
    "model.backends.cross_entropy": ("auto", "megatron", "chunked", "triton", "reference"),
    "data.source": ("bundled", "indexed", "chat", "needles"),
    "data.malformed": ("stop", "skip"),
    "data.overlong": ("cut", "drop"),
    "optim.name": ("adamw", "muon", "muon_per_head"),
    "log.wandb": ("disabled", "offline", "online"),
    "parallel.zero": (0, 1, 2),
    "offload.gradients": ("device", "host", "nvme"),
    "offload.optimizer": ("device", "host", "nvme"),
    "offload.on_failure": ("fallback", "stop"),
    "checkpoint.when_busy": ("wait", "skip"),
    "parallel.expert.dispatcher": ("alltoall", "moonep"),
    "parallel.expert.policy": ("fill", "eplb", "none"),
    "parallel.expert.transport": ("auto", "collective", "peer"),
    "quant.recipe": ("none", "mxfp4_qat"),
    "quant.weight_format": tuple(FORMATS),
    "quant.activation_format": ("none", *FORMATS),
    "quant.scale_rounding": ROUNDINGS,
    "quant.backend": ("auto", "triton", "reference"),
    "quant.products": PRODUCTS,
}

AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("run.steps", "run.microbatches", "run.threads"), 1),
    **dict.fromkeys(
        (
            "model.num_layers", "model.hidden_size", "model.vocab_size", "model.vocab_multiple",
            "model.num_heads", "model.kda_head_dim", "model.short_conv_kernel_size",
            "model.full_attention_every",
            "model.q_lora_rank", "model.kv_lora_rank", "model.qk_nope_head_dim", "model.v_head_dim",
            "model.latent_size", "model.expert_ffn_size", "model.dense_ffn_size", "model.top_k",
            "model.attn_res_block_size", "model.backends.logits_mib",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "run.seed", "model.qk_extra_head_dim", "model.num_experts", "model.num_shared_experts",
            "model.num_dense_layers", "model.mtp_loss_weight", "optim.lr", "optim.weight_decay",
            "optim.clip_norm", "optim.qk_clip", "eval.every", "checkpoint.every", "checkpoint.keep",
            "checkpoint.keep_every",
            "log.trace_steps", "log.routing_steps",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "vision.depth", "vision.hidden_size", "vision.num_heads", "vision.ffn_size", "vision.patch_size",
            "vision.channels", "vision.grid_size", "vision.max_frames", "vision.rope_max", "vision.merge",
        ),
        1,
    ),
    "vision.max_patches": 4,
    "vision.head_dim": 4,
    **dict.fromkeys(("data.sequence_length", "model.balance_bins"), 2),
    **dict.fromkeys(("data.micro_batch_size", "data.max_bytes"), 1),
    **dict.fromkeys(("data.needles.pairs", "data.needles.questions"), 1),
    **dict.fromkeys(("data.long_documents.at_least", "data.long_documents.times"), 1),
    "data.max_patches": 16,
    "data.max_image_side": 28,
    **dict.fromkeys(("parallel.pipeline", "parallel.virtual", "parallel.expert.size", "parallel.context"), 1),
    **dict.fromkeys(("parallel.expert.slots", "parallel.expert.eplb_every"), 1),
    "parallel.expert.eplb_copies": 0,
    "parallel.microbatch_group": 1,
    "checkpoint.local_keep": 1,
    **dict.fromkeys(("offload.window_mib", "offload.inflight_mib", "offload.recompute_layers"), 1),
    **dict.fromkeys(("offload.min_kib", "offload.host_gb", "offload.peer_gb", "offload.nvme_gb"), 0),
    **dict.fromkeys(("parallel.data", "optim.muon_steps", "eval.batches", "log.every"), 1),
    **dict.fromkeys(("cluster.nodes", "cluster.ranks_per_node", "cluster.gpus_per_node", "cluster.gpus"), 1),
    "cluster.link_domain": 1,
    **dict.fromkeys(("cluster.signal_seconds", "cluster.restarts"), 0),
    **dict.fromkeys(("fault.hang_seconds", "fault.hang_steps", "fault.start_seconds"), 0),
    **dict.fromkeys(("fault.max_restarts", "fault.straggler_ratio", "fault.health_skew_seconds"), 0),
    **dict.fromkeys(("fault.spike.floor", "fault.spike.rollbacks"), 0),
    **dict.fromkeys(("fault.straggler_reports", "fault.spike.steps", "fault.meet_seconds"), 1),
    **dict.fromkeys(
        (
            "log.prometheus_port", "log.alerts.loss_spike", "log.alerts.imbalance", "log.alerts.stall",
            "log.alerts.nonfinite", "log.alerts.disk_gib", "log.alerts.checkpoint_minutes",
        ),
        0,
    ),
    "log.alerts.lines": 1,
    **dict.fromkeys(("fault.spike.threshold", "fault.spike.window"), 4),
    **dict.fromkeys(("cluster.launch_us", "cluster.link_latency_us", "cluster.network_latency_us"), 0),
}  # fmt: skip

ABOVE_ZERO = (
    "model.routed_scaling_factor", "model.situ_beta", "model.situ_linear_beta", "model.norm_eps",
    "model.mla_norm_eps", "model.init_std", "optim.eps", "parallel.timeout_minutes", "cluster.peak_tflops",
    "cluster.memory_gib", "cluster.link_gbps", "cluster.network_gbps", "cluster.memory_gbps",
    "cluster.host_gib", "cluster.host_gbps", "cluster.nvme_write_gbps", "cluster.nvme_read_gbps",
    "cluster.storage_gbps",
    "vision.rope_theta", "vision.norm_eps", "vision.projector_norm_eps",
)  # fmt: skip

# Key -> (low, high, whether high itself is allowed). Low always is.
BETWEEN: dict[str, tuple[float, float, bool]] = {
    "model.balance_ema": (0.0, 1.0, False),
    "optim.min_lr_ratio": (0.0, 1.0, True),
    "data.image_share": (0.0, 1.0, False),
    "data.held_out": (0.0, 1.0, False),
    "optim.warmup_fraction": (0.0, 1.0, True),
    "optim.beta1": (0.0, 1.0, False),
    "optim.beta2": (0.0, 1.0, False),
    "optim.muon_momentum": (0.0, 1.0, False),
    "fault.health_slow": (0.0, 1.0, False),
    "log.alerts.clear": (0.0, 1.0, True),
}

# Keys that some sources alone read.
SOURCE_KEYS = {
    **dict.fromkeys(("train", "valid", "train_weights"), ("indexed",)),
    **dict.fromkeys(("path", "valid_path"), ("chat",)),
    "max_bytes": ("bundled", "needles"),
}

MIN_FREE_BYTES = 64 << 20


def validate(config: Config, world_size: int, *, inputs: bool = True) -> None:
    """Check a resolved configuration against `world_size` ranks.

    `inputs=False` leaves files and folders unchecked, for a job that will run elsewhere.
    Raises UserError for the first problem: key, value and what would be valid.
    """
    checks: list[Check] = [
        check_secrets, _numbers_are_finite, _choices, _ranges, _features, _pipeline, _context, _offload,
        _ranks, _experts, _model, _quant, _vision, _optim, _data, _cluster, _faults, _log, check_policy,
    ]  # fmt: skip
    if inputs:
        checks += [_initial, _tokenizer, _corpora, _run_folder, _same_run, check_disk]
    for check in checks:
        check(config, world_size)


def _refuse(config: Config, key: str, reason: str) -> NoReturn:
    raise UserError(f"{key}={shown(flatten(config)[key])}: {reason}")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _numbers_are_finite(config: Config, world_size: int) -> None:
    for key, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(config, key, "must be a finite number")


def _choices(config: Config, world_size: int) -> None:
    values = flatten(config)
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            _refuse(config, key, f"valid are {_listed(allowed)}")


def _ranges(config: Config, world_size: int) -> None:
    values = flatten(config)
    for key, least in AT_LEAST.items():
        if values[key] is not None and values[key] < least:
            _refuse(config, key, f"must be at least {least}")
    for key in ABOVE_ZERO:
        if values[key] is not None and values[key] <= 0:
            _refuse(config, key, "must be above 0")
    for key, (low, high, closed) in BETWEEN.items():
        if not low <= values[key] < high and not (closed and values[key] == high):
            _refuse(
                config, key, f"must be from {low:g} to {high:g}" + ("" if closed else f", {high:g} excluded")
            )
    if config.model.gate_lower_bound >= 0:
        _refuse(
            config, "model.gate_lower_bound", "must be below 0: it bounds the log of a decay; K3 has -5.0"
        )


def _features(config: Config, world_size: int) -> None:
    entry = compatibility.clash(config)
    if entry is not None:
        first, second = compatibility.find(entry.first), compatibility.find(entry.second)
        other = "" if first is second else f" with {second.key}={shown(flatten(config)[second.key])}"
        _refuse(config, first.key, f"refused{other}: {entry.why}" if other else entry.why)


def _pipeline(config: Config, world_size: int) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    chunks = parallel.pipeline * parallel.virtual
    if parallel.microbatch_group is not None:
        _microbatch_group(config, parallel.microbatch_group)
    if chunks > layers:
        reason = (
            f"{parallel.pipeline} x {parallel.virtual} chunks need as many layers; model.num_layers={layers}"
        )
        _refuse(config, "parallel.pipeline", reason)
    cut = parallel.layers_per_chunk
    if cut is None:
        return
    if len(cut) != chunks:
        shape = f"parallel.pipeline x parallel.virtual = {parallel.pipeline} x {parallel.virtual}"
        _refuse(config, "parallel.layers_per_chunk", f"has {len(cut)} chunks; {shape} needs {chunks}")
    if min(cut) < 1:
        _refuse(config, "parallel.layers_per_chunk", "every chunk needs at least one layer")
    if sum(cut) != layers:
        reason = f"adds up to {sum(cut)} layers; model.num_layers={layers}"
        _refuse(config, "parallel.layers_per_chunk", reason)


def _microbatch_group(config: Config, group: int) -> None:
    parallel, key = config.parallel, "parallel.microbatch_group"
    if parallel.virtual == 1:
        _refuse(config, key, "only virtual stages have groups; leave it out, or raise parallel.virtual")
    if group < parallel.pipeline:
        _refuse(config, key, f"at least parallel.pipeline={parallel.pipeline}, which is also the default")


def _context(config: Config, world_size: int) -> None:
    length, ranks = config.data.sequence_length, config.parallel.context
    if length % ranks:
        valid = [n for n in range(1, 65) if length % n == 0]
        reason = f"must divide data.sequence_length={length}; valid up to 64 are {_listed(valid)}"
        _refuse(config, "parallel.context", reason)


def _offload(config: Config, world_size: int) -> None:
    offload, zero = config.offload, config.parallel.zero
    if offload.gradients != "device" and zero != 2:
        _refuse(config, "offload.gradients", f"needs parallel.zero=2; it is {zero}")
    if offload.optimizer != "device" and zero == 0:
        _refuse(config, "offload.optimizer", "needs parallel.zero=1 or 2; it is 0")
    if "nvme" not in (offload.gradients, offload.optimizer):
        return
    key = "gradients" if offload.gradients == "nvme" else "optimizer"
    if not (offload.nvme_dir or "").strip():
        _refuse(
            config, f"offload.{key}", "needs a disk: set offload.nvme_dir to a folder on a fast local one"
        )


def _ranks(config: Config, world_size: int) -> None:
    parallel = config.parallel
    assert parallel.data is not None, "the layout has not been resolved"
    needed = parallel.pipeline * parallel.context * parallel.data
    if needed != world_size:
        stages = parallel.pipeline * parallel.context
        layout = f"pipeline x context x data = {parallel.pipeline} x {parallel.context} x {parallel.data}"
        if world_size % stages == 0:
            key, remedy = "parallel.data", f"use {world_size // stages}"
        elif world_size % parallel.pipeline == 0:
            key, remedy = "parallel.context", f"use a divisor of {world_size // parallel.pipeline}"
        else:
            key, remedy = "parallel.pipeline", f"use a divisor of {world_size}"
        _refuse(config, key, f"{layout} = {needed} ranks, but there are {world_size}; {remedy}")


def _experts(config: Config, world_size: int) -> None:
    parallel, experts = config.parallel, config.model.num_experts
    size = parallel.expert.size
    spread = (parallel.data or 1) * parallel.context
    valid = [n for n in range(1, min(spread, max(experts, 1)) + 1) if spread % n == 0 and experts % n == 0]
    if spread % size:
        reason = f"must divide data x context = {spread}; valid are {_listed(valid)}"
        _refuse(config, "parallel.expert.size", reason)
    if experts % size:
        reason = f"must divide model.num_experts={experts}; valid are {_listed(valid)}"
        _refuse(config, "parallel.expert.size", reason)
    places = experts // size
    if parallel.expert.slots is not None and parallel.expert.slots > max(places, 1):
        _refuse(config, "parallel.expert.slots", f"at most {places}, the experts that live on a rank")
    if parallel.expert.dispatcher == "moonep" and parallel.expert.transport == "peer":
        _peer(config)


def _peer(config: Config) -> None:
    """What is known of peer memory without a device; the rest is found out when the ranks have met."""
    key, remedy = "parallel.expert.transport", "use auto or collective"
    if config.run.device == "cpu":
        _refuse(config, key, f"reaches into the memory of GPUs, and run.device=cpu; {remedy}")
    if config.parallel.expert.size == 1:
        _refuse(config, key, f"one rank has no peer, and parallel.expert.size=1; {remedy}")


def _model(config: Config, world_size: int) -> None:
    model = config.model
    if model.num_experts and model.top_k >= model.num_experts:
        reason = (
            f"must be below model.num_experts={model.num_experts}: the router also reads the next best score"
        )
        _refuse(config, "model.top_k", reason)
    if model.num_experts and not model.num_shared_experts:
        _refuse(config, "model.num_shared_experts", "at least 1 in a model with routed experts")
    if model.num_experts and model.num_dense_layers > model.num_layers:
        _refuse(config, "model.num_dense_layers", f"at most model.num_layers={model.num_layers}")
    if model.num_experts and model.latent_size > model.hidden_size:
        _refuse(
            config, "model.latent_size", f"at most model.hidden_size={model.hidden_size}; K3 has half of it"
        )


def _quant(config: Config, world_size: int) -> None:
    model = config.model
    if config.quant.recipe == "none":
        return
    for key, size in (("latent_size", model.latent_size), ("expert_ffn_size", model.expert_ffn_size)):
        if size % BLOCK:
            reason = f"must be a multiple of {BLOCK}, the block of quant.recipe={config.quant.recipe}"
            _refuse(config, f"model.{key}", reason)
    refusal = native_refusal(config.quant.weight_format, config.quant.activation_format)
    if config.quant.products == "te" and refusal:
        _refuse(config, "quant.products", f"{refusal}; use auto or emulated")


def _vision(config: Config, world_size: int) -> None:
    vision = config.vision
    if vision.head_dim % 4:
        _refuse(
            config, "vision.head_dim", "must be a multiple of 4: the rotary embedding has two axes of pairs"
        )
    if vision.hidden_size % 2:
        _refuse(config, "vision.hidden_size", "must be even: the position in time has sines and cosines")
    if config.data.images and not vision.enabled:
        _refuse(
            config,
            "data.images",
            "needs a vision tower: add vision=tiny or vision=moonvit_v2, or data.images=[]",
        )
    if not vision.enabled:
        return
    if not config.data.images and config.data.source != "chat":
        _refuse(
            config, "vision.enabled", "nothing would reach the tower; name data.images, or use vision=none"
        )
    for key, needed in (("patch_size", 14), ("merge", 2), ("channels", 3)):
        if getattr(vision, key) != needed:
            _refuse(config, f"vision.{key}", f"images are cut for {needed}")


def _optim(config: Config, world_size: int) -> None:
    if config.optim.qk_clip and config.optim.name != "muon_per_head":
        _refuse(config, "optim.qk_clip", "is a part of optim.name=muon_per_head; use 0")


def _data(config: Config, world_size: int) -> None:
    data = config.data
    for key, sources in SOURCE_KEYS.items():
        if data.source not in sources and getattr(data, key):
            reason = f"is read with data={' or '.join(sources)} only; add data={sources[0]} or leave it out"
            _refuse(config, f"data.{key}", reason)
    if data.source == "chat" and data.images:
        _refuse(config, "data.images", "with data=chat the chats name their images; leave it out")
    if data.source == "needles" and data.images:
        _refuse(config, "data.images", "with data=needles samples are text alone; add vision=none")
    if data.images and not data.image_share:
        _refuse(config, "data.image_share", "no sample would have an image; leave data.images out instead")
    _long_documents(config)
    _weights(config, "train_weights", "train")
    _weights(config, "image_weights", "images")


def _long_documents(config: Config) -> None:
    data, long = config.data, config.data.long_documents
    if long.times > 1 and long.at_least is None:
        reason = "needs data.long_documents.at_least: the tokens from which on a document is long"
        _refuse(config, "data.long_documents.times", reason)
    if long.at_least is not None and data.source not in ("bundled", "indexed"):
        reason = f"only text is up-sampled, with data=bundled or data=indexed, not {data.source}"
        _refuse(config, "data.long_documents.at_least", reason)


def _weights(config: Config, key: str, names: str) -> None:
    weights, named = getattr(config.data, key), getattr(config.data, names)
    if weights is not None and len(weights) != len(named):
        _refuse(config, f"data.{key}", f"has {len(weights)} weights for {len(named)} entries of data.{names}")
    if weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in weights):
        _refuse(config, f"data.{key}", "every weight must be a finite number above 0")


def _cluster(config: Config, world_size: int) -> None:
    cluster = config.cluster
    assert cluster.ranks_per_node is not None, "the layout has not been resolved"
    if cluster.nodes * cluster.ranks_per_node != world_size:
        per_node = cluster.ranks_per_node
        reason = f"x cluster.ranks_per_node={per_node} ranks, but the layout has {world_size}"
        _refuse(config, "cluster.nodes", reason)
    if cluster.gpus not in (None, world_size):
        reason = f"the layout has {world_size} ranks; `k3train plan search` finds one for so many GPUs"
        _refuse(config, "cluster.gpus", reason)
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d{2}:\d{2}", cluster.time_limit):
        _refuse(config, "cluster.time_limit", "write HH:MM:SS or DAYS-HH:MM:SS")


def _log(config: Config, world_size: int) -> None:
    log = config.log
    if 0 < log.prometheus_port < 1024 or log.prometheus_port > 65535:
        _refuse(config, "log.prometheus_port", "must be from 1024 to 65535, or 0 for none")
    if log.prometheus_port and not log.prometheus_host.strip():
        _refuse(config, "log.prometheus_host", "name an address; 127.0.0.1 is this machine alone")
    name = log.alerts.webhook_env
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # Not shown: what was meant may be the URL, which is a secret.
        reason = (
            "is the name of an environment variable, letters, digits and _; put the URL into that variable"
        )
        raise UserError(f"log.alerts.webhook_env: {reason}")


def _faults(config: Config, world_size: int) -> None:
    fault, timeout = config.fault, config.parallel.timeout_minutes
    if 0 < fault.hang_seconds < 1:
        reason = "shorter than a rank can be seen to stand still; use 1 or more, or 0 for no watchdog"
        _refuse(config, "fault.hang_seconds", reason)
    for key, seconds in (("hang_seconds", fault.hang_seconds), ("meet_seconds", fault.meet_seconds)):
        if fault.hang_seconds and seconds >= 60 * timeout:
            reason = f"collectives give up after parallel.timeout_minutes={timeout:g}, before a rank is named"
            _refuse(config, f"fault.{key}", f"{reason}; use less, or raise that")
    if 0 < fault.straggler_ratio <= 1:
        _refuse(
            config, "fault.straggler_ratio", "a rank is slow above 1; use more than 1, or 0 for no report"
        )
    if fault.spike.threshold is not None and not config.checkpoint.every:
        reason = "goes back to a checkpoint, and checkpoint.every=0 makes none on the way"
        _refuse(config, "fault.spike.threshold", reason)


def _corpora(config: Config, world_size: int) -> None:
    data = config.data
    if data.source == "chat":
        _chats(config)
    if data.source != "indexed":
        return
    remedies = {
        "train": "`k3train data prepare FILE... --output PREFIX` makes it, data.train=[PREFIX] reads it",
        "valid": "nothing of data.train is held out for it",
    }
    for key, remedy in remedies.items():
        if not getattr(data, key):
            _refuse(config, f"data.{key}", f"name at least one prefix: {remedy}")
        for prefix in getattr(data, key):
            _corpus(config, f"data.{key}", prefix)


def _chats(config: Config) -> None:
    from .data.chat.source import named_files
    from .data.tokenizer import chat_structure, load_tokenizer

    data = config.data
    chat_structure(load_tokenizer(data.tokenizer))
    named_files(data.path, "data.path")
    if data.valid_path:
        named_files(data.valid_path, "data.valid_path")


def _corpus(config: Config, key: str, prefix: str) -> None:
    missing = [end for end in (".bin", ".idx") if not Path(f"{prefix}{end}").expanduser().is_file()]
    if missing:
        _refuse(config, key, f"{prefix}{missing[0]} does not exist; a prefix names a .bin/.idx pair")
    from .data.indexed import open_corpus
    from .data.prepare import read_info
    from .data.tokenizer import load_tokenizer

    try:
        info = read_info(prefix)
        open_corpus(prefix)
    except UserError as error:
        _refuse(config, key, str(error))
    if info is not None and info.fingerprint != load_tokenizer(config.data.tokenizer).fingerprint:
        remedy = f"set data.tokenizer={info.tokenizer}, or prepare it again"
        other = f"{prefix} was prepared with the tokenizer {info.tokenizer}"
        _refuse(config, key, f"{other}, and data.tokenizer is {config.data.tokenizer}; {remedy}")


def _tokenizer(config: Config, world_size: int) -> None:
    data, model = config.data, config.model
    if data.tokenizer != "byte" and not Path(data.tokenizer).expanduser().exists():
        _refuse(config, "data.tokenizer", "no such file; use byte, a tokenizer.json or a tiktoken file")
    from .data.tokenizer import byte_vocab_size, load_tokenizer

    needed = byte_vocab_size() if data.tokenizer == "byte" else load_tokenizer(data.tokenizer).vocab_size
    if (model.vocab_size or 0) < needed:
        _refuse(
            config,
            "model.vocab_size",
            f"the tokenizer {data.tokenizer} needs at least {needed}; or leave it out",
        )
    if data.source == "needles":
        from .data.long.windows import check_needles

        check_needles(data, load_tokenizer(data.tokenizer), data.sequence_length)


def _initial(config: Config, world_size: int) -> None:
    """Weights to start from; a run that goes on needs them no more."""
    if config.init_from is None:
        return
    if Path(config.init_from).expanduser().resolve() == Path(config.run.dir).expanduser().resolve():
        _refuse(config, "init_from", "is run.dir itself; a run that starts anew needs another run.dir")
    if not (config.run.resume and available(Path(config.run.dir).expanduser() / "checkpoints")):
        initial.check(config)


def _run_folder(config: Config, world_size: int) -> None:
    if config.checkpoint.local_dir is not None and not config.checkpoint.local_dir.strip():
        _refuse(config, "checkpoint.local_dir", "it is empty; name a folder on a disk of each node, or null")
    if not config.run.dir.strip():
        _refuse(config, "run.dir", "it is empty; name a folder")
    folder = Path(config.run.dir).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        _refuse(config, "run.dir", f"{existing} is not a folder; name another")
    if not os.access(existing, os.W_OK | os.X_OK):
        _refuse(config, "run.dir", f"{existing} cannot be written; name another folder")
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_BYTES:
        _refuse(
            config,
            "run.dir",
            f"{free >> 20} MiB are free on its disk; {MIN_FREE_BYTES >> 20} MiB is the least",
        )


def _same_run(config: Config, world_size: int) -> None:
    folder = Path(config.run.dir).expanduser()
    if not config.run.resume:
        held = [name for name in ("metrics.jsonl", "checkpoints") if (folder / name).exists()]
        if held:
            remedy = "set another run.dir, remove that folder, or leave run.resume out to continue"
            _refuse(config, "run.resume", f"{config.run.dir} already holds a run ({held[0]}); {remedy}")
        return
    saved = folder / "config.yaml"
    if not saved.is_file():
        return
    found = load_yaml(saved)
    border = found.curriculum.stage != config.curriculum.stage
    before, now = fixed_keys(found), fixed_keys(config)
    layout, refused = changes(before, now, lambda key: border and may_change(key))
    for change in refused:
        reason = f"the run in {config.run.dir} has {shown(change.before)}; keep that, or set another run.dir"
        _refuse(config, change.key, reason)
    if layout:
        refuse_batch(f"the run in {config.run.dir}", before, now)
