"""The typed configuration of a run: every key, its type and its default, and the rules between keys.

Pure data: imports neither torch nor Hydra, so that `plan`, `--help` and a refused configuration answer
at once. `launch.compose` fills these classes from `conf/` and the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from .alert_config import AlertConfig
from .fault_config import FaultConfig
from .hardware_config import EfficiencyConfig
from .vision_config import VisionConfig


@dataclass
class RunConfig:
    """What is run, where it is kept, and for how long."""

    name: str = "run"
    """Name shown in logs and dashboards; `recipe` when left out."""
    dir: str = "runs/${run.name}"
    """Folder of the configuration, metrics and checkpoints."""
    steps: int = 100
    """Optimizer steps of the whole run, those before a resume included."""
    seed: int = 1234
    """Seed of the weights and of the order of the data."""
    resume: bool = True
    """Continue from the newest complete checkpoint in `run.dir`, if there is one."""
    microbatches: int = 4
    """Micro-batches per optimizer step on each data-parallel rank."""
    device: str = "auto"
    """auto, cpu or cuda."""
    threads: int = 1
    """CPU threads of each rank's kernels; results are bitwise repeatable for one value."""
    deterministic: bool = True
    """Ask torch for deterministic kernels where it has them."""


@dataclass
class BackendConfig:
    """Which implementation each operator uses; `auto` takes the fastest that the verifier allows."""

    kda: str = "auto"
    short_conv: str = "auto"
    attn_res: str = "auto"
    situ: str = "auto"
    attention: str = "auto"
    grouped: str = "auto"
    """Grouped GEMMs of routed experts: te, grouped_mm or loop; auto asks a cost model before each."""
    linear: str = "auto"
    """local (megatron-core's own modules) or te (Transformer Engine)."""
    cross_entropy: str = "auto"
    """megatron (megatron-core's, all logits at once), chunked (logits of some words of the vocabulary at a
    time, made again in backward), triton (the same by kernels of ours) or reference; auto is megatron."""
    logits_mib: int = 512
    """Device memory, MiB, for the FP32 logits of a chunk."""


@dataclass
class ModelConfig:
    """Shape of a Kimi-K3-style language model. Defaults are the constants every size of K3 shares."""

    num_layers: int = 9
    hidden_size: int = 256
    vocab_size: int | None = None
    """Rows of the embedding and the head; derived from the tokenizer, rounded up to `vocab_multiple`."""
    vocab_multiple: int = 64
    num_heads: int = 4
    kda_head_dim: int = 64
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    """Least log-decay of a KDA channel in one token."""
    full_attention_every: int = 4
    """Every n-th layer is Gated MLA, and so is the last one; the others are KDA."""
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 64
    qk_extra_head_dim: int = 32
    """Query and key channels that K2 rotated; K3 keeps them as plain content channels."""
    v_head_dim: int = 64
    num_experts: int = 32
    """Routed experts of a layer; 0 makes every layer dense."""
    top_k: int = 4
    """Routed experts that a token visits."""
    num_shared_experts: int = 2
    """Experts that every token visits, held as one FFN."""
    latent_size: int = 128
    """Width at which tokens travel to the routed experts."""
    expert_ffn_size: int = 96
    dense_ffn_size: int = 1056
    num_dense_layers: int = 1
    """Leading layers that have a dense FFN."""
    routed_scaling_factor: float = 1.0
    attn_res_block_size: int = 4
    """Decoder layers in one AttnRes block."""
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    norm_eps: float = 1e-5
    mla_norm_eps: float = 1e-6
    """Epsilon of the two RMSNorms inside MLA, which differs from every other norm of the model."""
    mtp_layers: int = 1
    """Multi-token-prediction layers behind the decoder: 0 or 1."""
    mtp_loss_weight: float = 0.1
    init_std: float = 0.02
    balance_bins: int = 1000
    balance_ema: float = 0.0
    """Weight of the old bias in the quantile-balancing update; 0 replaces it."""
    dtype: str = "float32"
    """float32 or bfloat16: parameters and activations; statistics and gradients stay FP32."""
    backends: BackendConfig = field(default_factory=BackendConfig)


@dataclass
class LongDocumentsConfig:
    """Text documents that come up more often than others."""

    at_least: int | None = None
    """Tokens from which on a document is long; none is when left out."""
    times: int = 1
    """Times that a long document stands in every epoch of its corpus."""


@dataclass
class NeedlesConfig:
    """Samples that state codes and ask for them at their end, with the bundled corpus around."""

    pairs: int = 16
    """Codes stated in a sample."""
    questions: int = 8
    """Codes asked for in a sample to train on; in one to test with at most 4."""
    answers_only: bool = False
    """Learn the answers alone, not the text around them too."""


@dataclass
class DataConfig:
    """Where the tokens come from."""

    source: str = "bundled"
    """bundled (the running Python's standard library), indexed (Megatron .bin/.idx files), chat (JSON lines
    of chats, of which only assistants' answers are learnt) or needles (codes to be found again)."""
    train: list[str] = field(default_factory=list)
    """Prefixes of .bin/.idx pairs, made by `k3train data prepare`."""
    train_weights: list[float] | None = None
    """Shares of the prefixes in the blend; their tokens in an epoch when left out."""
    long_documents: LongDocumentsConfig = field(default_factory=LongDocumentsConfig)
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    valid: list[str] = field(default_factory=list)
    """Prefixes of the validation split; `indexed` needs at least one, as nothing of `train` is held out."""
    path: list[str] = field(default_factory=list)
    """With chat: .jsonl files, folders or globs of them, or exercises (bundled sums, strings and calls)."""
    valid_path: list[str] = field(default_factory=list)
    """With chat: files of the validation split; a share of `path` when left out."""
    held_out: float = 0.05
    """With chat: share of `path` for validation, chosen by what a line holds."""
    malformed: str = "stop"
    """With chat, a line that is no chat: stop, or skip it and count."""
    overlong: str = "cut"
    """With chat, a chat longer than `sequence_length`: cut its end off, or drop it; counted either way."""
    tokenizer: str = "byte"
    """byte, or the path of a Hugging Face tokenizer.json or of a tiktoken file."""
    sequence_length: int = 256
    """Tokens in one packed sequence."""
    micro_batch_size: int = 1
    """Sequences in one micro-batch."""
    images: list[str] = field(default_factory=list)
    """Documents with images beside the text: digits (bundled), folders with an index.jsonl, or folders of tar
    shards that `energon prepare` has seen."""
    image_weights: list[float] | None = None
    """Shares of `images` among themselves; their tokens when left out."""
    image_share: float = 0.5
    """Share of the samples that come from `images`."""
    image_token: str | None = None
    """Special token of the tokenizer in whose place an image's features go; a usual name when left out."""
    max_patches: int = 16384
    """Most image patches in one sample."""
    max_image_side: int = 3584
    """Pixels of the longer side to which larger images are reduced."""
    max_bytes: int | None = None
    """Use at most this many bytes of the bundled corpus."""
    cache_dir: str | None = None
    """Folder of derived files; $K3TRAIN_CACHE or ~/.cache/k3train when left out."""


@dataclass
class ExpertConfig:
    """How routed experts are spread over ranks, and how tokens reach them."""

    size: int = 1
    """Ranks that share the experts of a layer; divides data x context."""
    dispatcher: str = "alltoall"
    """alltoall (megatron-core's: an expert is computed where it lives) or moonep (every rank computes equally
    many rows: ranks with room fetch the weights of crowded experts)."""
    policy: str = "fill"
    """With moonep: fill (exact balance), eplb (replicas placed now and then by past loads) or none."""
    slots: int | None = None
    """With moonep: fetched experts that a rank holds at a time; more come in waves. As many as live on a rank
    when left out, which always suffices."""
    transport: str = "auto"
    """With moonep: collective (any fabric), peer (GPUs that reach each other's memory) or auto."""
    eplb_every: int = 100
    """Steps between placements of policy eplb."""
    eplb_copies: int = 2
    """Copies on each rank with policy eplb, at most the experts of a rank."""


@dataclass
class ParallelConfig:
    """How the work is spread over ranks."""

    pipeline: int = 1
    """Pipeline stages."""
    virtual: int = 1
    """Model chunks on each pipeline rank."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    context: int = 1
    """Ranks that share a sequence."""
    data: int | None = None
    """Data-parallel size; derived from the number of ranks when left out."""
    microbatch_group: int | None = None
    """With virtual stages: micro-batches that pass a chunk in one go, `pipeline` when left out, the least.
    More hide latency for more held activations; ZeRO-2 sums a chunk's gradients once for each group."""
    zero: int | None = None
    """0: every rank keeps all optimizer state. 1: sharded over data ranks. 2: gradients too, in two rotating
    chunk buffers. Derived: 1, or 0 for muon."""
    layers_per_chunk: list[int] | None = None
    """Decoder layers of each model chunk in the order of the forward pass; spread evenly when left out."""
    timeout_minutes: float = 10.0
    """How long a collective may wait before the run is given up."""


@dataclass
class OptimConfig:
    """The update rule and its schedule."""

    name: str = "adamw"
    """adamw, muon (matrices by Muon with Moonlight's scale, the rest by AdamW), or muon_per_head (queries,
    keys and values head by head)."""
    lr: float = 2e-3
    """Learning rate at its peak, after warm-up; cosine decay from there."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step as a share of `lr`."""
    warmup_fraction: float = 0.01
    """Share of the steps over which the rate rises linearly from 0."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    muon_momentum: float = 0.95
    muon_steps: int = 5
    """Newton-Schulz iterations."""
    qk_clip: float | None = None
    """Attention logit of Gated MLA from which a head's query and key weights are scaled down after a step; 0
    turns it off. Derived: 100 for muon_per_head, the only one that has it, else 0."""
    skip_nonfinite: bool = False
    """Skip and count a step whose loss or gradient is not finite, where the run would stop otherwise."""


@dataclass
class OffloadConfig:
    """Where activations, gradients and optimizer states lie between their uses."""

    policy: str = "keep"
    """How activations are held from forward to backward: a file of `conf/offload/`, or the path of one like
    those; `budget` is what `offload.budget_gb` found."""
    sites: dict[str, str] = field(default_factory=dict)
    """Storages of sites, or of patterns like kda.*, that come before the policy's: keep, or
    [recompute+][fp8+][host|peer|nvme]."""
    resolved: dict[str, str] = field(default_factory=dict)
    """What `policy` says, as found before the run. Derived: set `sites`."""
    budget_gb: float | None = None
    """Device memory of a rank, GB, into which the plan fits everything, as cheaply as its search finds."""
    allow: list[str] = field(default_factory=lambda: ["recompute", "host", "peer", "nvme"])
    """What a budget may choose beside keep; fp8 too, where gradients need not be those of `keep` to the bit.
    nvme needs `nvme_dir`, peer a pipeline."""
    host_gb: float | None = None
    """Pinned host memory of a rank for activations, GB; as planned when left out."""
    peer_gb: float | None = None
    """Device memory, GB, that a rank lends to another one for activations; as planned when left out."""
    nvme_gb: float | None = None
    """Disk of a rank for activations, GB; as planned when left out."""
    nvme_dir: str | None = None
    """Folder on a fast local disk for all that is on nvme; each rank has files of its own in it."""
    inflight_mib: int = 256
    """Device memory for activations on their way out, and as much for those on their way back."""
    min_kib: int = 64
    """Smaller tensors stay on the device as they are."""
    recompute_layers: int = 1
    """Decoder layers that site `layer` runs again at a time: only what enters the first of them is held."""
    gradients: str = "device"
    """Shards of ZeRO-2: device, host (pinned memory) or nvme."""
    optimizer: str = "device"
    """Moments and FP32 master weights of AdamW with ZeRO-1 or 2: device, host or nvme."""
    on_failure: str = "fallback"
    """When a tier fails or is full: fallback (the next allowed one, with one warning) or stop."""
    window_mib: int = 256
    """Device memory of each of the two windows through which optimizer states pass in a step."""


@dataclass
class QuantConfig:
    """Number formats that the routed experts learn to live with."""

    recipe: str = "none"
    """none, or mxfp4_qat: routed experts compute with weights and inputs rounded to the formats below, both
    ways; gradients pass the rounding unchanged, and the weights that the optimizer updates keep their
    precision."""
    weight_format: str = "mxfp4"
    """mxfp4, mxfp8_e4m3 or mxfp8_e5m2; blocks of 32 along the inputs."""
    activation_format: str = "mxfp8_e4m3"
    """none, mxfp8_e4m3, mxfp8_e5m2 or mxfp4; blocks of 32 along a row."""
    scale_rounding: str = "floor"
    """How the largest value of a block becomes its scale: floor (OCP's rule), ceil (nothing is clipped) or
    even (to nearest, as elements are)."""
    hold_weights: bool = True
    """Round the weights once for all micro-batches of a step and hold that copy meanwhile; else again for
    each use. The same bits."""
    backend: str = "auto"
    """Implementation of the formats: auto, triton or reference; the same bits."""
    products: str = "auto"
    """Forward products of rounded numbers: emulated (in `model.dtype`), te (MXFP8 on tensor cores for MX
    blocks, through Transformer Engine) or auto (te where it can). Other sums, so other last bits."""


@dataclass
class EvalConfig:
    """Loss on the validation split."""

    every: int = 50
    """Steps between evaluations; 0 evaluates at the end only."""
    batches: int = 8
    """Micro-batches of each evaluation over all data ranks; rounded up to a multiple of `parallel.data`."""


@dataclass
class CheckpointConfig:
    """What is saved and how often."""

    every: int = 100
    """Steps between checkpoints; 0 saves at the end and on a signal only."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this stay too, for good; 0: none for that."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    when_busy: str = "wait"
    """What a save that comes due does while the one before is still written: wait, or skip (that of the last
    step or of a stop signal waits)."""
    local_dir: str | None = None
    """Folder on a disk of each node, in which ~ and variables like $TMPDIR are the node's own: checkpoints go
    there first, each rank's part to its node, and from there to `run.dir` in the background."""
    local_keep: int = 1
    """Newest checkpoints to keep in `local_dir`, at least 1."""


@dataclass
class LogConfig:
    """What is reported, and to whom. `metrics.jsonl` is always written."""

    every: int = 1
    """Steps between lines of metrics."""
    progress: bool = True
    tensorboard: bool = True
    wandb: str = "disabled"
    """disabled, offline or online."""
    wandb_project: str = "k3train"
    wandb_entity: str | None = None
    trace_steps: int = 2
    """Steps whose phases go into trace.json; 0 writes no trace."""
    routing_steps: int = 0
    """Steps of each start whose routing goes into routing-STAGE.jsonl, entries of every rank and expert."""
    prometheus_port: int = 0
    """Port at which the first rank of each node serves its metrics to Prometheus; 0 serves none."""
    prometheus_host: str = "127.0.0.1"
    """Address that it listens at; 0.0.0.0 is every one of the node, without a password."""
    alerts: AlertConfig = field(default_factory=AlertConfig)


@dataclass
class ClusterConfig:
    """The machines a job is planned for and started on."""

    name: str = "local"
    nodes: int = 1
    """Machines."""
    gpus: int | None = None
    """GPUs that `k3train plan search` finds layouts for; a layout that takes another number is refused."""
    gpus_per_node: int = 1
    """Ranks that one node can hold; the ranks of each node when there are several nodes."""
    ranks_per_node: int | None = None
    """Processes on each node, one per GPU; derived from the layout on one node when left out."""
    gpu: str = "cpu"
    """Name of the accelerator, for reports and job files."""
    peak_tflops: float = 0.1
    """Dense BF16 peak of one rank, the denominator of MFU."""
    peak_fp8_tflops: float | None = None
    """Dense FP8 peak of one rank, which products in MX formats meet where it has them in hardware."""
    memory_gib: float = 12.0
    """Memory of one rank."""
    link_gbps: float = 10.0
    """Bandwidth between ranks of a link domain, GB/s each way."""
    link_domain: int | None = None
    """Ranks that such links join, where they join several nodes; those of a node when left out."""
    network_gbps: float = 10.0
    """Bandwidth between link domains for one rank, GB/s each way."""
    link_latency_us: float = 0.0
    """From the start of a small collective to its end, within a link domain."""
    network_latency_us: float = 0.0
    """The same between link domains."""
    launch_us: float = 0.0
    """Host time of one operator called from Python: added to a CPU's work, hidden beneath a longer GPU's."""
    memory_gbps: float = 10.0
    """Bandwidth of a rank's own memory, GB/s."""
    host_gib: float | None = None
    """Host memory of one rank, its share of the node's; `plan` and `plan search` count on no more. Not looked
    at when left out."""
    host_gbps: float = 5.0
    """Bandwidth of a rank to pinned host memory and back, each way, all ranks of a node at once; GB/s."""
    peer_gbps: float | None = None
    """Bandwidth to the memory of another GPU, GB/s; `link_gbps` when left out."""
    nvme_write_gbps: float = 0.5
    """A rank's share of what the disks of `offload.nvme_dir` write, GB/s."""
    nvme_read_gbps: float = 1.0
    """The same of what they read."""
    storage_gbps: float = 0.5
    """A rank's share of what the file system of `run.dir` writes, GB/s."""
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    calibration: str | None = None
    """File that `k3train bench calibrate` wrote: its figures come before those of the entry, and behind keys
    that are set on the command line."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What that file says of layers and collectives. Derived: set `calibration`."""
    partition: str | None = None
    account: str | None = None
    time_limit: str = "24:00:00"
    """HH:MM:SS or DAYS-HH:MM:SS."""
    signal_seconds: int = 300
    """Slurm sends SIGUSR1 this long before the time limit."""
    image: str | None = None
    """Container image, with Slurm's pyxis or on Kubernetes."""
    namespace: str = "default"
    volume: str | None = None
    """Kubernetes claim of a ReadWriteMany volume, the working directory of every pod: keeps the runs."""
    restarts: int = 20
    """Times that Kubernetes or Slurm starts a failed job again; Kubernetes a stopped one too."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run on every node before the job."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class CurriculumConfig:
    """Stages of a run, one behind the other, each with lengths and a layout of its own."""

    stages: dict[str, Any] = field(default_factory=dict)
    """Name of each stage -> its `steps` and the keys that differ in it, as in
    {steps: 100, data: {sequence_length: 65536}, parallel: {context: 8}}; `run.steps` is their sum."""
    stop_behind: str | None = None
    """Stage behind which the run stops, saved, as when the next ones need other ranks; the last one when left
    out."""
    stage: str | None = None
    """Stage that this configuration is of. Derived."""


@dataclass
class Config:
    """One run, whole."""

    recipe: str = "tiny"
    init_from: str | None = None
    """Weights that a new run starts with, its optimizer afresh: a Hugging Face folder, or a run's folder. The
    model takes their shape, but for keys that are set on the command line."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of every leaf of a configuration dataclass."""
    leaves: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        key = f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            leaves.update(flatten(value, f"{key}."))
        else:
            leaves[key] = value
    return leaves


def digest(config: Config) -> str:
    """SHA-256 of the whole configuration: every rank must hold the same one."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()
