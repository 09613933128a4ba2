"""The model once more, from the specification alone: plain PyTorch, FP64, token by token where it can be.

Takes weights by their global names. Letters: b batch, s sequence, d hidden, H heads, D head width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from k3train.config import ModelConfig

Weights = dict[str, Tensor]


def forward(model: ModelConfig, weights: Weights, biases: Weights, tokens: Tensor, eod: int) -> Tensor:
    """Logits [b, s, v] of tokens [b, s]; documents end with `eod`."""
    return torch.stack([_row(model, weights, biases, row, eod) for row in tokens])


def _row(model: ModelConfig, w: Weights, biases: Weights, tokens: Tensor, eod: int) -> Tensor:
    borders = [0, *(int(i) + 1 for i in (tokens[:-1] == eod).nonzero()), len(tokens)]
    documents = [range(a, b) for a, b in pairwise(borders)]
    bank: list[Tensor] = []
    running = w["embedding.weight"][tokens]  # [s, d]
    for layer in range(model.num_layers):
        path = f"layers.{layer}."
        mixed = _mix(w, path + "attention_res", [*bank, running], model.norm_eps) if bank else running
        fresh = layer % model.attn_res_block_size == 0
        if fresh:
            bank.append(running)
        x = _rms(mixed, w[path + "input_norm.weight"], model.norm_eps)
        is_mla = (layer + 1) % model.full_attention_every == 0 or layer == model.num_layers - 1
        attention = _mla if is_mla else _kda
        attended = torch.cat(
            [attention(model, w, path + "self_attention.", x[document]) for document in documents]
        )
        running = attended if fresh else running + attended
        mixed = _mix(w, path + "mlp_res", [*bank, running], model.norm_eps)
        x = _rms(mixed, w[path + "post_norm.weight"], model.norm_eps)
        if layer < model.num_dense_layers:
            running = running + _ffn(model, w, path + "mlp.", x)
        else:
            running = running + _moe(model, w, path + "mlp.", x, biases[path + "mlp.router.expert_bias"])
    mixed = _mix(w, "output_res", [*bank, running], model.norm_eps)
    return _rms(mixed, w["final_norm.weight"], model.norm_eps) @ w["head.weight"].T


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _mix(w: Weights, path: str, sources: list[Tensor], eps: float) -> Tensor:
    key = w[path + ".query"] * w[path + ".norm_weight"]
    logits = torch.stack([_rms(source, key, eps).sum(-1) for source in sources])
    return (torch.softmax(logits, 0)[..., None] * torch.stack(sources)).sum(0)


def _situ(model: ModelConfig, gate: Tensor, up: Tensor) -> Tensor:
    b1, b2 = model.situ_beta, model.situ_linear_beta
    return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * b2 * torch.tanh(up / b2)


def _ffn(model: ModelConfig, w: Weights, path: str, x: Tensor) -> Tensor:
    gate, up = (x @ w[path + "linear_fc1.weight"].T).chunk(2, -1)
    return _situ(model, gate, up) @ w[path + "linear_fc2.weight"].T


def _kda(model: ModelConfig, w: Weights, path: str, x: Tensor) -> Tensor:
    heads, width = model.num_heads, model.kda_head_dim

    def convolved(name: str) -> Tensor:
        projected = x @ w[f"{path}{name}_proj.weight"].T  # [s, C]
        filters = w[f"{path}{name}_conv"][:, 0]  # [C, 4]
        taps = filters.shape[1]
        padded = torch.cat([projected.new_zeros(taps - 1, projected.shape[1]), projected])
        y = sum(padded[i : i + len(x)] * filters[:, i] for i in range(taps))
        return (y * torch.sigmoid(y)).view(len(x), heads, width)

    q, k, v = convolved("q"), convolved("k"), convolved("v")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = x @ w[path + "f_a_proj.weight"].T @ w[path + "f_b_proj.weight"].T + w[path + "dt_bias"]
    decay = model.gate_lower_bound * torch.sigmoid(
        w[path + "A_log"].exp()[:, None] * z.view(-1, heads, width)
    )
    beta = torch.sigmoid(x @ w[path + "b_proj.weight"].T)
    state = x.new_zeros(heads, width, width)
    outputs = []
    for t in range(len(x)):
        state = decay[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + beta[t][:, None, None] * torch.einsum("hk,hv->hkv", k[t], error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * width**-0.5)
    normed = _rms(torch.stack(outputs), w[path + "o_norm.weight"], model.norm_eps).flatten(1)
    return torch.sigmoid(x @ w[path + "g_proj.weight"].T) * normed @ w[path + "o_proj.weight"].T


def _mla(model: ModelConfig, w: Weights, path: str, x: Tensor) -> Tensor:
    heads, nope = model.num_heads, model.qk_nope_head_dim
    eps = model.mla_norm_eps
    q = (
        _rms(x @ w[path + "q_a_proj.weight"].T, w[path + "q_a_norm.weight"], eps)
        @ w[path + "q_b_proj.weight"].T
    )
    q = q.view(len(x), heads, -1)
    latent, extra = (x @ w[path + "kv_a_proj.weight"].T).split(
        [model.kv_lora_rank, model.qk_extra_head_dim], -1
    )
    kv = _rms(latent, w[path + "kv_a_norm.weight"], eps) @ w[path + "kv_b_proj.weight"].T
    kv = kv.view(len(x), heads, -1)
    k = torch.cat([kv[..., :nope], extra[:, None].expand(-1, heads, -1)], -1)
    scores = torch.einsum("qhc,khc->hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(len(x), len(x)).triu(1).bool()
    attended = torch.einsum(
        "hqk,khv->qhv", scores.masked_fill(future, -torch.inf).softmax(-1), kv[..., nope:]
    )
    return torch.sigmoid(x @ w[path + "g_proj.weight"].T) * attended.flatten(1) @ w[path + "o_proj.weight"].T


def _moe(model: ModelConfig, w: Weights, path: str, x: Tensor, bias: Tensor) -> Tensor:
    scores = torch.sigmoid(x @ w[path + "router.weight"].T)
    latent = x @ w[path + "latent_down.weight"].T
    routed = torch.zeros_like(latent)
    for token, (score, z) in enumerate(zip(scores, latent, strict=True)):
        chosen = (score + bias).topk(model.top_k).indices
        for expert in chosen:
            share = score[expert] / (score[chosen].sum() + 1e-20) * model.routed_scaling_factor
            routed[token] += share * _ffn(model, w, f"{path}experts.{expert}.", z)
    normed = _rms(routed, w[path + "latent_norm.weight"], model.norm_eps)
    return normed @ w[path + "latent_up.weight"].T + _ffn(model, w, path + "shared_experts.", x)
