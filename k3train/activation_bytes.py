"""Bytes that each tensor takes which the model saves for backward, and what its regions cost to run again.

What is saved follows from the backends: of this repository, of flash-linear-attention 0.6, Transformer Engine
2.12 and torch. Needs no torch.

Letters as in `shapes`, and L sources of an AttnRes site, k experts of a token, s tokens of a sequence. Widths
are of one token, or of one patch in the tower; experts are loaded evenly, rows are whole documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import loss_plan
from .activation_sites import Saved, is_region
from .config import Config
from .context_plan import attention_share
from .expert_plan import balanced, payload_rows
from .flops import KDA_CHUNK
from .microbatch import tokens_per_microbatch
from .shapes import BYTES, block_starts, layer_kinds, model_dtype, vocab_rows
from .vision_config import VisionConfig
from .vision_shapes import Grid, attention_channels, patch_values

FLOAT, INDEX = 4, 8
ROUTE = "route"
"""Indices that MoonEP keeps beside what autograd saves."""
CPU_CHUNK = 16
"""Tokens of a chunk of KDA's backend `chunk`."""


def device_type(config: Config) -> str:
    """cuda or cpu: where the configured cluster computes."""
    return "cpu" if "cpu" in (config.run.device, config.cluster.gpu) else "cuda"


def decoder_layer(config: Config, layer: int, device: str) -> list[Saved]:
    """What decoder layer `layer` (0-based) saves; `device`: cuda or cpu.

    Bank rows count in the layer that first reads them, where their block ends.
    """
    model = config.model
    attention, mlp = layer_kinds(model)[layer]
    before, after = block_starts(model, layer), block_starts(model, layer + 1)
    tensors = _ModelTensors(config, device)
    tensors.mixture(before + 1, "attn_res.bank" if after > before else "attn_res.mix")
    tensors.attention(attention, "attn_res.mix")
    tensors.mixture(after + 1, "attn_res.mix")
    tensors.feed_forward(mlp, "attn_res.mix")
    return tensors.found


def output(config: Config, device: str) -> list[Saved]:
    """What stands behind the last decoder layer: mixture, norm, head; MTP is by itself."""
    tensors = _ModelTensors(config, device)
    sources = block_starts(config.model, config.model.num_layers) + 1
    tensors.mixture(sources, "attn_res.mix", ("mtp.input",) if config.model.mtp_layers else ())
    tensors.head("attn_res.mix")
    return tensors.found


def mtp(config: Config, device: str) -> list[Saved]:
    """What the MTP layer and its pass through the head save; nothing without one."""
    model = config.model
    if not model.mtp_layers:
        return []
    attention, mlp = layer_kinds(model)[-1]
    tensors = _ModelTensors(config, device, part="mtp.")
    d = model.hidden_size
    tensors.norm("input", "embedding of the next token", d, made_in="input")
    # The last mixture, which is in `output`.
    tensors.norm("input", None, d)
    tensors.add("fused", 2 * d, ("fusion",), made_in="input")
    tensors.norm("norm", "input of the layer", d)
    tensors.attention(attention, "norm")
    tensors.norm("norm", "residual stream", d)
    tensors.feed_forward(mlp, "norm")
    tensors.norm("norm", "output of the layer", d)
    tensors.head("norm")
    return tensors.found


def tower_block(vision: VisionConfig, dtype: str, device: str) -> list[Saved]:
    """What a block of the vision tower saves of one patch; `dtype`: fp32 or bf16."""
    tensors = _Tensors(dtype, device, "vit.")
    d, channels = vision.hidden_size, attention_channels(vision)
    backend = vision.attention if vision.attention != "auto" else {"cuda": "varlen"}.get(device, "sdpa")
    tensors.norm("norm", "input", d)
    tensors.add("normed", d, ("qkv",), made_in="norm", taken_by=("qkv",))
    tensors.add("q, k and v", 3 * channels, ("core",), made_in="qkv", taken_by=("core",))
    tensors.add("log-sums", vision.num_heads, ("core",), made_in="core", kind="fp32")
    if backend == "varlen":
        tensors.add("output", channels, ("core", "output"), made_in="core")
    else:
        tensors.add("output", channels, ("core",), made_in="core")
        tensors.add("output, token by token", channels, ("output",), made_in="core")
    tensors.norm("norm", "residual stream", d)
    tensors.add("normed", d, ("ffn",), made_in="norm", taken_by=("ffn",))
    tensors.add("inner", vision.ffn_size, ("activation",), made_in="ffn", taken_by=("activation",))
    tensors.add("activated", vision.ffn_size, ("ffn_output",), made_in="activation")
    return tensors.found


def tower_ends(vision: VisionConfig, dtype: str, device: str) -> list[Saved]:
    """What the tower saves of one patch around its blocks, without the projector."""
    tensors = _Tensors(dtype, device, "vit.")
    tensors.add("pixels", patch_values(vision), ("input",))
    tensors.add("rotary tables", vision.head_dim, ("qkv",), kind="fp32")
    tensors.norm("projector", "output of the last block", vision.hidden_size)
    return tensors.found


def tower_positions(vision: VisionConfig, grids: Iterable[Grid]) -> list[Saved]:
    """The matrices that resize the learned positions to the grids of items, as a whole: two for each grid."""
    side, tensors = vision.grid_size, _Tensors("fp32", "cpu", "vit.")
    for _, h, w in grids:
        if (h, w) != (side, side):
            for length in (h, w):
                tensors.add("resize of positions", side * length, ("input",), kind="fp32")
    return tensors.found


def projector(vision: VisionConfig, out_size: int, dtype: str, device: str) -> list[Saved]:
    """What the projector saves of one embedding that it makes."""
    tensors = _Tensors(dtype, device, "vit.")
    merged = vision.merge**2 * vision.hidden_size
    for what in ("merged", "inner", "activated"):
        tensors.add(what, merged, ("projector",))
    tensors.norm("projector", "embedding", out_size)
    return tensors.found


class _Tensors:
    """Collects tensors; names are completed by the part of the model."""

    def __init__(self, dtype: str, device: str, part: str) -> None:
        self.element, self.device, self.part = BYTES[dtype], device, part
        self.found: list[Saved] = []

    def add(
        self,
        what: str,
        width: float,
        saved_by: Sequence[str],
        *,
        made_in: str | None = None,
        taken_by: Sequence[str] = (),
        kind: str = "model",
        site: str | None = None,
    ) -> None:
        """A tensor of `width` elements; its site is the first that saves or takes it."""
        size = {"model": self.element, "fp32": FLOAT, "index": INDEX}[kind]
        first = site or next(iter((*saved_by, *taken_by)))
        saved, taken = (tuple(f"{self.part}{name}" for name in names) for names in (saved_by, taken_by))
        made = None if made_in is None else self._made(made_in)
        self.found.append(Saved(f"{self.part}{first}", what, width * size, kind, made, saved, taken))

    def _made(self, region: str) -> str:
        return f"{self.part}{region}"

    def norm(
        self,
        region: str,
        what: str | None,
        width: float,
        *,
        made_in: str | None = None,
        held_as: float | None = None,
        groups: int = 1,
        in_fp32: bool = False,
        also: tuple[str, ...] = (),
    ) -> None:
        """An RMSNorm inside `region` of a tensor made elsewhere, or in `made_in`, which may be the same.

        Args:
            what: the tensor; None: it is counted elsewhere.
            held_as: width of the tensor that it is a part of.
            groups: norms of one token.
            in_fp32: its weight is FP32.
            also: other regions with a norm of the same tensor.
        """
        fused = self.device == "cuda"
        keeps_input = self.element == FLOAT or (fused and not in_fp32)
        own = (region, *also) if keeps_input else ()
        outside = made_in != region and is_region(f"{self.part}{region}")
        taken = (*((region,) if outside else ()), *also)
        if what is not None and (own or taken):
            self.add(what, held_as or width, own, made_in=made_in, taken_by=taken)
        if not keeps_input:
            self.add("norm's input in FP32", width, (region,), made_in=region, kind="fp32")
        self.add("norm's scales", groups, (region,), made_in=region, kind="fp32")
        if not fused:
            self.add("scaled by the norm", width, (region,), made_in=region, kind="fp32")


class _ModelTensors(_Tensors):
    """Of the language model."""

    def __init__(self, config: Config, device: str, part: str = "") -> None:
        super().__init__(model_dtype(config.model), device, part)
        self.config, self.model = config, config.model
        self.tokens = config.data.sequence_length
        self.share = attention_share(config)
        fast = {"kda": "fla", "short_conv": "fla", "attn_res": "fla", "attention": "te"}
        plain = {"kda": "chunk", "short_conv": "shift", "attn_res": "lean", "attention": "sdpa"}
        asked = {name: getattr(config.model.backends, name) for name in fast}
        auto = fast if device == "cuda" and self.element < FLOAT else plain
        self.backend = {name: auto[name] if each == "auto" else each for name, each in asked.items()}

    def mixture(self, sources: int, site: str, also: tuple[str, ...] = ()) -> None:
        """An AttnRes site and the norm behind it.

        Args:
            site: of the running sum, which it reads last.
            also: other regions with a norm of the mixture.
        """
        d, region = self.model.hidden_size, "attn_res.mix"
        self.add("running sum", d, (region,), taken_by=(region,), site=site)
        if sources == 1:
            self.norm(region, None, d)
            return
        numbers = 2 * sources + (self.backend["attn_res"] == "fla")
        self.add("logits and scales", numbers, (region,), made_in=region, kind="fp32")
        self.norm(region, "mixture", d, made_in=region, also=also)

    def attention(self, kind: str, norm: str) -> None:
        """One of the two, behind the norm in region `norm`."""
        readers = ("input", "decay", "gate_input") if kind == "kda" else ("input", "gate_input")
        names = tuple(f"{kind}.{reader}" for reader in readers)
        self.add("normed", self.model.hidden_size, names, made_in=norm, taken_by=names)
        (self._kda if kind == "kda" else self._mla)()

    def _kda(self) -> None:
        model = self.model
        heads, head = model.num_heads, model.kda_head_dim
        channels = heads * head
        self.add("q, k and v", 3 * channels, ("kda.qkv",), made_in="kda.input", taken_by=("kda.qkv",))
        self.add("narrow decay logits", head, ("kda.decay",), made_in="kda.decay")
        beta = ("kda.decay", "kda.core")
        self.add("beta", heads, beta, made_in="kda.decay", taken_by=("kda.core",), kind="fp32")
        core = ("kda.core",)
        self.add("decay logits", channels, core, made_in="kda.decay", taken_by=core)
        (self._kda_fla if self.backend["kda"] == "fla" else self._kda_chunk)(channels)
        self.norm("kda.gate", "output", channels, made_in="kda.core", groups=heads, in_fp32=True)
        self._gate("kda", channels)
        self.add("normed output", channels, ("kda.gate",), made_in="kda.gate")

    def _gate(self, kind: str, channels: int) -> None:
        region = f"{kind}.gate"
        self.add("gate logits", channels, (), made_in=f"{kind}.gate_input", taken_by=(region,))
        self.add("gate", channels, (region,), made_in=region)
        self.add("gated output", channels, (f"{kind}.output",), made_in=region)

    def _kda_fla(self, channels: int) -> None:
        core, heads = ("kda.core",), self.model.num_heads
        self.add("q and k convolved", 2 * channels, (), made_in="kda.qkv", taken_by=core)
        self.add("v convolved", channels, core, made_in="kda.qkv", taken_by=core)
        self.add("q and k normalised", 2 * channels, core, made_in="kda.core")
        self.add("their scales", 2 * heads, core, made_in="kda.core", kind="fp32")
        self.add("products inside chunks", 2 * KDA_CHUNK * heads, core, made_in="kda.core")

    def _kda_chunk(self, channels: int) -> None:
        core, model = ("kda.core",), self.model
        saved = core if self.element == FLOAT else ()
        self.add("q and k convolved", 2 * channels, saved, made_in="kda.qkv", taken_by=core)
        self.add("v convolved", channels, (), made_in="kda.qkv", taken_by=core)
        if self.element < FLOAT:
            self.add("q and k in FP32", 2 * channels, core, made_in="kda.core", kind="fp32")
        # Decay; then in chunks q, k, v, decay, what is written and what reads the state, and beta.
        rows = 7 * channels + model.num_heads
        states = channels * model.kda_head_dim / CPU_CHUNK
        self.add("decay and chunks", rows, core, made_in="kda.core", kind="fp32")
        self.add("scales of q and k", 2 * model.num_heads, core, made_in="kda.core", kind="fp32")
        self.add("states", states, core, made_in="kda.core", kind="fp32")

    def _mla(self) -> None:
        model, ranks = self.model, self.config.parallel.context
        heads, values = model.num_heads, model.num_heads * model.v_head_dim
        self.norm("mla.query", "latent of queries", model.q_lora_rank, made_in="mla.input")
        wide = model.kv_lora_rank + model.qk_extra_head_dim
        self.norm("mla.key", "latent of keys", model.kv_lora_rank, made_in="mla.input", held_as=wide)
        if ranks == 1:
            self.add("normed latent of queries", model.q_lora_rank, ("mla.query",), made_in="mla.query")
            self.add("normed latent of keys", model.kv_lora_rank, ("mla.key",), made_in="mla.key")
        else:
            sent = model.q_lora_rank * self.share.queries
            self.add("normed latents of queries, sent", sent, ("mla.query",), taken_by=("mla.query",))
            self.add("latents of whole rows", wide * ranks, ("mla.key",), made_in="mla.key")
        query = heads * (model.qk_nope_head_dim + model.qk_extra_head_dim)
        getattr(self, f"_attend_{self._attention_kernel()}")(query, values)
        self._gate("mla", values)

    def _attention_kernel(self) -> str:
        """Of what kind the attention's backend is, by what it keeps."""
        backend, model = self.backend["attention"], self.model
        if backend == "flash":
            return "padded"
        same = model.qk_nope_head_dim + model.qk_extra_head_dim == model.v_head_dim
        fused = backend == "te" or (backend == "sdpa" and (same or self.device == "cuda"))
        return "fused" if fused else "written_out"

    def _attend_fused(self, query: int, values: int) -> None:
        self._qkv(query, values, ("mla.core",))
        if self.share.moves:
            self.add("attended", values * self.share.queries, ("mla.core",), made_in="mla.core")
            self._sent_home(values)
        else:
            self.add("attended", values, ("mla.core", "mla.gate"), made_in="mla.core", taken_by=("mla.gate",))
        self._log_sums()

    def _attend_padded(self, query: int, values: int) -> None:
        """Everything as wide as the widest head."""
        self._qkv(query, values, ())
        model, share = self.model, self.share
        widest = max(model.qk_nope_head_dim + model.qk_extra_head_dim, model.v_head_dim)
        width = model.num_heads * (-(-widest // 8) * 8)
        rows = 2 * share.queries + 2 * share.keys
        self.add("padded", rows * width, ("mla.core",), made_in="mla.core")
        if share.moves:
            self._sent_home(values)
        else:
            self.add("attended", values, ("mla.gate",), made_in="mla.core", taken_by=("mla.gate",))
        self._log_sums()

    def _attend_written_out(self, query: int, values: int) -> None:
        """Everything in FP32, with the whole softmax."""
        self._qkv(query, values, ())
        share = self.share
        keys: float = self.tokens
        if self.config.parallel.context > 1:  # of all rows at once
            keys = share.keys * tokens_per_microbatch(self.config)
        softmax = self.model.num_heads * share.queries * keys
        wide = query * share.queries + (query + values) * share.keys
        self.add("in FP32", wide, ("mla.core",), made_in="mla.core", kind="fp32")
        self.add("softmax", softmax, ("mla.core",), made_in="mla.core", kind="fp32")
        if share.moves:
            self._sent_home(values)
            return
        self.add("attended", values, (), made_in="mla.core", taken_by=("mla.gate",))
        self.add("attended, token by token", values, ("mla.gate",), made_in="mla.gate")

    def _sent_home(self, values: int) -> None:
        """Outputs of this rank's tokens, most of them computed by others."""
        self.add("attended, sent home", values, ("mla.gate",), taken_by=("mla.gate",))

    def _qkv(self, query: int, values: int, saved_by: tuple[str, ...]) -> None:
        queries, keys = query * self.share.queries, (query + values) * self.share.keys
        self.add("queries", queries, saved_by, made_in="mla.query", taken_by=("mla.core",))
        self.add("keys and values", keys, saved_by, made_in="mla.key", taken_by=("mla.core",))

    def _log_sums(self) -> None:
        sums = self.model.num_heads * self.share.queries
        self.add("log-sums", sums, ("mla.core",), made_in="mla.core", kind="fp32")

    def feed_forward(self, kind: str, norm: str) -> None:
        """One of the two, behind the norm in region `norm`."""
        model = self.model
        readers = ("ffn.input",) if kind == "dense" else ("moe.router", "moe.input", "moe.shared.input")
        self.add("normed", model.hidden_size, readers, made_in=norm, taken_by=readers)
        if kind == "dense":
            self._gated("ffn", model.dense_ffn_size)
            return
        self._router()
        (self._balanced_experts if balanced(self.config) else self._experts)()
        self.add("normed rows", model.latent_size, ("moe.output",), made_in="moe.norm")
        self._gated("moe.shared", model.num_shared_experts * model.expert_ffn_size)

    def _gated(self, name: str, width: int) -> None:
        region = f"{name}.activation"
        self.add("gate and up", 2 * width, (region,), made_in=f"{name}.input", taken_by=(region,))
        self.add("activated", width, (f"{name}.output",), made_in=region)

    def _router(self) -> None:
        region, chosen = "moe.router", self.model.top_k
        self.add("scores", self.model.num_experts, (region,), made_in=region, kind="fp32")
        self.add("scores of the chosen, their sum", chosen + 1, (region,), made_in=region, kind="fp32")
        self.add("choice", chosen + 1, (region,), kind="index")

    def _experts(self) -> None:
        """megatron-core's all-to-all, weighted and summed in FP32 at home."""
        model = self.model
        entries, latent, width = model.top_k, model.latent_size, model.expert_ffn_size
        self.add("entries, their order", 2 * entries, ("moe.dispatch",), kind="index")
        rows, act, combine = "moe.dispatch_input", "moe.activation", "moe.combine"
        self.add("rows", entries * latent, (rows,), taken_by=(rows,))
        self.add("gate and up", entries * 2 * width, (act,), made_in=rows, taken_by=(act,))
        self.add("activated", entries * width, ("moe.experts",), made_in=act)
        self.add("outputs", entries * latent, (combine,), taken_by=(combine,))
        if self.config.run.deterministic:  # which sums by index_add, and that keeps what it adds
            kind = "model" if self.element == FLOAT else "fp32"
            self.add("weighted outputs", entries * latent, (combine,), made_in=combine, kind=kind)
        self.add("weights of all experts", model.num_experts, (), taken_by=(combine,), kind="fp32")
        self.add("weights", entries, (combine,), made_in=combine, kind="fp32")
        self.add("their places", entries, (combine,), kind="index")
        self.norm("moe.norm", "combined rows", latent)

    def _balanced_experts(self) -> None:
        """MoonEP: one step of autograd, and the indices of its route beside it."""
        model = self.model
        entries, latent = model.top_k, model.latent_size
        site = "moe.dispatch_input"
        self.add("latent tokens", latent, ("moe.experts",), made_in="moe.input", site=site)
        self.add("weights", entries, ("moe.experts",), kind="fp32")
        self.add("gate and up", entries * 2 * model.expert_ffn_size, ("moe.experts",))
        ranks = self.config.parallel.expert.size
        payloads = payload_rows(model, ranks) * ranks / (ranks - 1) if ranks > 1 else 1
        route = 5 * entries + entries / INDEX + 4 * payloads
        self.add(ROUTE, route, ("moe.dispatch",), kind="index")
        self.norm("moe.norm", "combined rows", latent)

    def head(self, norm: str) -> None:
        """The pass through the head and the cross-entropy, behind the norm in region `norm`."""
        self.add("normed", self.model.hidden_size, ("head",), made_in=norm, taken_by=("head",))
        backend = loss_plan.chosen(self.config)
        if backend in loss_plan.IN_CHUNKS:
            self.add("largest logits and sums", 2, ("head",), made_in="head", kind="fp32")
        else:
            self.add("softmax", vocab_rows(self.model), ("head",), made_in="head", kind="fp32")
        mask = 1 / INDEX if backend == loss_plan.WHOLE else 0
        self.add("targets", 1 + mask, ("head",), kind="index")
