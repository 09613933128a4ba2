"""Kimi K3 in one file of plain PyTorch, from its public description and under its released names.

Reads nothing of this repository: `config` is a parsed config.json, `weights` are the tensors of a checkpoint
by their released keys. One sequence without packing, token by token where the mathematics is. It serves to
say what a checkpoint means. Letters: s sequence, d hidden, H heads, D head width, t patches of an image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, silu

TEXT = "language_model.model."
Weights = dict[str, Tensor]
Shapes = dict[str, tuple[str, tuple[int, ...]]]


# ---- What a checkpoint consists of ----


def shapes(config: dict[str, Any]) -> Shapes:
    """(dtype, shape) of every tensor with experts unpacked, by key."""
    c = config["text_config"]
    d, vocabulary = c["hidden_size"], c["vocab_size"]
    found: Shapes = {}

    def add(key: str, *shape: int, dtype: str = "BF16") -> None:
        found[key] = (dtype, shape)

    add(f"{TEXT}embed_tokens.weight", vocabulary, d)
    for layer in range(c["num_hidden_layers"]):
        at = f"{TEXT}layers.{layer}."
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        ):
            add(f"{at}{norm}.weight", d)
        for query in ("self_attention_res_proj", "mlp_res_proj"):
            add(f"{at}{query}.weight", 1, d)
        if layer + 1 in c["linear_attn_config"]["kda_layers"]:
            _kda_shapes(c, at + "self_attn.", add)
        else:
            _mla_shapes(c, at + "self_attn.", add)
        if layer < c["first_k_dense_replace"]:
            _ffn_shapes(at + "mlp.", d, c["intermediate_size"], add)
        else:
            _moe_shapes(c, at + "block_sparse_moe.", add)
    add(f"{TEXT}output_attn_res_norm.weight", d)
    add(f"{TEXT}output_attn_res_proj.weight", 1, d)
    add(f"{TEXT}norm.weight", d)
    add("language_model.lm_head.weight", vocabulary, d)
    if config.get("vision_config"):
        _vision_shapes(config["vision_config"], add)
    return found


def _kda_shapes(c: dict[str, Any], at: str, add: Any) -> None:
    d, heads, width = c["hidden_size"], c["num_attention_heads"], c["linear_attn_config"]["head_dim"]
    channels = heads * width
    for name in "qkv":
        add(f"{at}{name}_proj.weight", channels, d)
        taps = c["linear_attn_config"]["short_conv_kernel_size"]
        add(f"{at}{name}_conv1d.weight", channels, 1, taps, dtype="F32")
    add(f"{at}A_log", 128 * math.ceil(heads / 128), dtype="F32")
    add(f"{at}dt_bias", channels, dtype="F32")
    add(f"{at}f_a_proj.weight", width, d)
    add(f"{at}f_b_proj.weight", channels, width)
    add(f"{at}b_proj.weight", heads, d)
    add(f"{at}g_proj.weight", channels, d)
    add(f"{at}o_norm.weight", width, dtype="F32")
    add(f"{at}o_proj.weight", d, channels)


def _mla_shapes(c: dict[str, Any], at: str, add: Any) -> None:
    d, heads, values = c["hidden_size"], c["num_attention_heads"], c["v_head_dim"]
    query, latent = c["q_lora_rank"], c["kv_lora_rank"]
    nope, extra = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    add(f"{at}q_a_proj.weight", query, d)
    add(f"{at}q_a_layernorm.weight", query)
    add(f"{at}q_b_proj.weight", heads * (nope + extra), query)
    add(f"{at}kv_a_proj_with_mqa.weight", latent + extra, d)
    add(f"{at}kv_a_layernorm.weight", latent)
    add(f"{at}kv_b_proj.weight", heads * (nope + values), latent)
    add(f"{at}g_proj.weight", heads * values, d)
    add(f"{at}o_proj.weight", d, heads * values)


def _ffn_shapes(at: str, width: int, inner: int, add: Any) -> None:
    add(f"{at}gate_proj.weight", inner, width)
    add(f"{at}up_proj.weight", inner, width)
    add(f"{at}down_proj.weight", width, inner)


def _moe_shapes(c: dict[str, Any], at: str, add: Any) -> None:
    d, latent, inner = c["hidden_size"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    add(f"{at}gate.weight", c["num_experts"], d)
    add(f"{at}gate.e_score_correction_bias", c["num_experts"], dtype="F32")
    add(f"{at}routed_expert_down_proj.weight", latent, d)
    add(f"{at}routed_expert_norm.weight", latent)
    add(f"{at}routed_expert_up_proj.weight", d, latent)
    _ffn_shapes(f"{at}shared_experts.", d, c["num_shared_experts"] * inner, add)
    for expert in range(c["num_experts"]):
        add(f"{at}experts.{expert}.w1.weight", inner, latent)
        add(f"{at}experts.{expert}.w3.weight", inner, latent)
        add(f"{at}experts.{expert}.w2.weight", latent, inner)


def _vision_shapes(c: dict[str, Any], add: Any) -> None:
    d, channels, inner = c["vt_hidden_size"], c["qkv_hidden_size"], c["vt_intermediate_size"]
    add("vision_tower.patch_embed.proj.weight", d, 3, c["patch_size"], c["patch_size"])
    add("vision_tower.patch_embed.pos_emb.weight", c["init_pos_emb_height"], c["init_pos_emb_width"], d)
    for block in range(c["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{block}."
        add(f"{at}norm0.weight", d)
        add(f"{at}norm1.weight", d)
        add(f"{at}wqkv.weight", 3 * channels, d)
        add(f"{at}wo.weight", d, channels)
        add(f"{at}mlp.fc0.weight", inner, d)
        add(f"{at}mlp.fc1.weight", d, inner)
    add("vision_tower.encoder.final_layernorm.weight", d)
    merged = d * c["merge_kernel_size"][0] * c["merge_kernel_size"][1]
    add("mm_projector.proj.0.weight", merged, merged)
    add("mm_projector.proj.2.weight", c["text_hidden_size"], merged)
    add("mm_projector.post_norm.weight", c["text_hidden_size"])


# ---- What it computes ----


def forward(
    config: dict[str, Any], weights: Weights, tokens: Tensor, seen: dict[str, Tensor] | None = None
) -> Tensor:
    """Logits [s, vocabulary] of tokens [s], in the dtype of the weights.

    `seen` is filled with what norms would hide from the logits: "LAYER.kda" [s, H, D] before its norm,
    "LAYER.router" [s, experts] weights, "LAYER.latent" [s, latent] before its norm, and "LAYER.attention" and
    "LAYER.mlp", what each sublayer adds [s, d].
    """
    c, seen = config["text_config"], {} if seen is None else seen
    eps = c["rms_norm_eps"]
    bank: list[Tensor] = []
    running: Tensor | None = weights[f"{TEXT}embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        at = f"{TEXT}layers.{layer}."
        sources = [*bank, running]
        h = attn_res(weights, f"{at}self_attention_res", sources, eps) if bank else running
        if layer % c["attn_res_block_size"] == 0:
            bank.append(running)
            running = None
        x = rms_norm(h, weights[f"{at}input_layernorm.weight"], eps)
        is_kda = layer + 1 in c["linear_attn_config"]["kda_layers"]
        attended = (kda if is_kda else mla)(c, weights, f"{at}self_attn.", x, seen, f"{layer}.")
        running = attended if running is None else running + attended
        h = attn_res(weights, f"{at}mlp_res", [*bank, running], eps)
        x = rms_norm(h, weights[f"{at}post_attention_layernorm.weight"], eps)
        if layer < c["first_k_dense_replace"]:
            added = ffn(c, weights, f"{at}mlp.", x)
        else:
            added = moe(c, weights, f"{at}block_sparse_moe.", x, seen, f"{layer}.")
        running = running + added
        seen[f"{layer}.attention"], seen[f"{layer}.mlp"] = attended, added
    y = attn_res(weights, f"{TEXT}output_attn_res", [*bank, running], eps)
    return rms_norm(y, weights[f"{TEXT}norm.weight"], eps) @ weights["language_model.lm_head.weight"].T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x), weighted."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attn_res(w: Weights, site: str, sources: list[Tensor], eps: float) -> Tensor:
    """Softmax over depth of a query against normed sources; the values are the sources themselves."""
    query = w[f"{site}_proj.weight"][0]
    normed = [rms_norm(source, w[f"{site}_norm.weight"], eps) for source in sources]
    shares = torch.softmax(torch.stack([x @ query for x in normed]), dim=0)  # [sources, s]
    return sum(share[:, None] * source for share, source in zip(shares, sources, strict=True))  # type: ignore[return-value]


def situ(c: dict[str, Any], gate: Tensor, up: Tensor) -> Tensor:
    """SiTU-GLU."""
    b1, b2 = c["activation_situ_beta"], c["activation_situ_linear_beta"]
    return (b1 * torch.tanh(gate / b1) * torch.sigmoid(gate)) * (b2 * torch.tanh(up / b2))


def ffn(c: dict[str, Any], w: Weights, at: str, x: Tensor) -> Tensor:
    """Gate, up and down."""
    hidden = situ(c, x @ w[f"{at}gate_proj.weight"].T, x @ w[f"{at}up_proj.weight"].T)
    return hidden @ w[f"{at}down_proj.weight"].T


def kda(c: dict[str, Any], w: Weights, at: str, x: Tensor, seen: dict[str, Tensor], name: str) -> Tensor:
    """Kimi Delta Attention by its recurrence."""
    heads, width = c["num_attention_heads"], c["linear_attn_config"]["head_dim"]

    def mixed(which: str) -> Tensor:
        y = (x @ w[f"{at}{which}_proj.weight"].T).T  # [channels, s]
        taps = w[f"{at}{which}_conv1d.weight"]
        y = torch.nn.functional.conv1d(pad(y, (taps.shape[-1] - 1, 0)), taps, groups=len(y))
        return silu(y).T.reshape(len(x), heads, width)

    def unit(y: Tensor) -> Tensor:
        return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)

    q, k, v = unit(mixed("q")), unit(mixed("k")), mixed("v")
    low = x @ w[f"{at}f_a_proj.weight"].T
    z = (low @ w[f"{at}f_b_proj.weight"].T + w[f"{at}dt_bias"]).reshape(len(x), heads, width)
    rate = w[f"{at}A_log"][:heads].exp()[:, None]
    alpha = torch.exp(c["linear_attn_config"]["gate_lower_bound"] * torch.sigmoid(rate * z))
    beta = torch.sigmoid(x @ w[f"{at}b_proj.weight"].T)
    state = x.new_zeros(heads, width, width)
    outputs = []
    for t in range(len(x)):
        decayed = alpha[t, :, :, None] * state
        error = v[t] - (decayed * k[t, :, :, None]).sum(1)
        state = decayed + beta[t, :, None, None] * k[t, :, :, None] * error[:, None, :]
        outputs.append((state * q[t, :, :, None]).sum(1) / math.sqrt(width))
    output = torch.stack(outputs)
    seen[f"{name}kda"] = output
    gate = torch.sigmoid(x @ w[f"{at}g_proj.weight"].T).reshape(output.shape)
    normed = rms_norm(output, w[f"{at}o_norm.weight"], c["rms_norm_eps"])
    return (gate * normed).flatten(1) @ w[f"{at}o_proj.weight"].T


def mla(c: dict[str, Any], w: Weights, at: str, x: Tensor, seen: dict[str, Tensor], name: str) -> Tensor:
    """Gated multi-head latent attention; nothing is rotated."""
    heads, length = c["num_attention_heads"], len(x)
    latent, extra = c["kv_lora_rank"], c["qk_rope_head_dim"]
    eps = 1e-6
    query = rms_norm(x @ w[f"{at}q_a_proj.weight"].T, w[f"{at}q_a_layernorm.weight"], eps)
    q = (query @ w[f"{at}q_b_proj.weight"].T).reshape(length, heads, -1)
    compressed, shared = (x @ w[f"{at}kv_a_proj_with_mqa.weight"].T).split((latent, extra), dim=1)
    normed = rms_norm(compressed, w[f"{at}kv_a_layernorm.weight"], eps)
    kv = (normed @ w[f"{at}kv_b_proj.weight"].T).reshape(length, heads, -1)
    k, v = kv.split((c["qk_nope_head_dim"], c["v_head_dim"]), dim=2)
    k = torch.cat((k, shared[:, None].expand(length, heads, extra)), dim=2)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(c["qk_nope_head_dim"] + extra)
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    return (torch.sigmoid(x @ w[f"{at}g_proj.weight"].T) * attended) @ w[f"{at}o_proj.weight"].T


def moe(c: dict[str, Any], w: Weights, at: str, x: Tensor, seen: dict[str, Tensor], name: str) -> Tensor:
    """Latent mixture of experts beside the shared ones."""
    scores = torch.sigmoid(x @ w[f"{at}gate.weight"].T)
    chosen = (scores + w[f"{at}gate.e_score_correction_bias"]).topk(c["num_experts_per_token"], -1).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
    z = x @ w[f"{at}routed_expert_down_proj.weight"].T
    mixed = torch.zeros_like(z)
    for expert in range(c["num_experts"]):
        e = f"{at}experts.{expert}."
        hidden = situ(c, z @ w[f"{e}w1.weight"].T, z @ w[f"{e}w3.weight"].T)
        mixed = mixed + weights[:, expert, None] * (hidden @ w[f"{e}w2.weight"].T)
    seen[f"{name}router"], seen[f"{name}latent"] = weights, mixed
    normed = rms_norm(mixed, w[f"{at}routed_expert_norm.weight"], c["rms_norm_eps"])
    return ffn(c, w, f"{at}shared_experts.", x) + normed @ w[f"{at}routed_expert_up_proj.weight"].T


def image_features(
    config: dict[str, Any], w: Weights, pixels: Tensor, rows: int, columns: int, eps: float
) -> Tensor:
    """Features [t / 4, text width] of one image, cut into patches [t, 3, 14, 14] of a grid rows x columns.

    `eps` is that of the tower's norms, which no config.json says. The grid must be as large as the learned
    positions, so that nothing is resized.
    """
    c = config["vision_config"]
    heads = c["vt_num_attention_heads"]
    assert (rows, columns) == (c["init_pos_emb_height"], c["init_pos_emb_width"])
    x = pixels.flatten(1) @ w["vision_tower.patch_embed.proj.weight"].flatten(1).T
    x = x + w["vision_tower.patch_embed.pos_emb.weight"].flatten(0, 1)
    turns = _turns(rows, columns, c["qkv_hidden_size"] // heads, x.dtype)
    for block in range(c["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{block}."
        normed = rms_norm(x, w[f"{at}norm0.weight"], eps)
        q, k, v = (normed @ w[f"{at}wqkv.weight"].T).reshape(len(x), 3, heads, -1).unbind(1)
        q, k = _turn(q, turns), _turn(k, turns)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        x = x + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1) @ w[f"{at}wo.weight"].T
        normed = rms_norm(x, w[f"{at}norm1.weight"], eps)
        x = x + gelu(normed @ w[f"{at}mlp.fc0.weight"].T, approximate="tanh") @ w[f"{at}mlp.fc1.weight"].T
    x = rms_norm(x, w["vision_tower.encoder.final_layernorm.weight"], eps)
    x = x.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).flatten(2).flatten(0, 1)
    x = gelu(x @ w["mm_projector.proj.0.weight"].T) @ w["mm_projector.proj.2.weight"].T
    return rms_norm(x, w["mm_projector.post_norm.weight"], c["projector_ln_eps"])


def _turns(rows: int, columns: int, width: int, dtype: torch.dtype) -> Tensor:
    """Complex factors [t, width / 2]: pairs turn by their column and row in turn."""
    frequencies = 1e4 ** (-torch.arange(0, width, 4, dtype=torch.float64) / width)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = torch.stack((x.flatten()[:, None] * frequencies, y.flatten()[:, None] * frequencies), dim=-1)
    return torch.polar(torch.ones_like(angles), angles).flatten(1).to(torch.complex128)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(2).to(x.dtype)
