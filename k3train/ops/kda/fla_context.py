"""flash-linear-attention's chunk kernels of Kimi Delta Attention over a context group.

The library's own context parallelism (`fla.ops.cp`) takes one row, exchanges maps of ranks whose maps nobody
reads, and walks the columns once more on every rank. Here its kernels are composed anew: a rank whose
documents begin on it learns E from the walk that it makes anyhow, a rank whose documents end on it needs no
map at all, so with two ranks nothing is walked twice; what is left are the maps of ranks between.

Letters: b rows, s columns of this rank, H heads, D key head dim, Dv value head dim, n fragments of documents.
Tensors of tokens are [1, b*s, H, D], one row behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.cp.chunk_bwd import chunk_cp_bwd_dh
from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
from fla.ops.kda.gate import kda_gate_bwd, kda_gate_chunk_cumsum
from fla.ops.kda.wy_fast import recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum, prepare_chunk_indices
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from ..packing import Packing
from .context import Handover, reach

CHUNK = 64


@dataclass(frozen=True, eq=False)
class Layout:
    """Where fragments of documents lie in this rank's columns, and which of them go on elsewhere."""

    handover: Handover
    fragments: dict[str, Tensor]
    """`cu_seqlens` [n + 1] and `chunk_indices`, as the kernels take them."""
    first: Tensor  # [b], each row's first fragment
    last: Tensor  # [b], and its last one
    pairs: list[tuple[Tensor, Tensor]]
    """For each row, begin and end of the first fragment, and of the last one."""
    whole: list[bool]
    """For each row, whether it has one fragment only."""
    before: list[int]
    """For each row, ranks before that hold some of the first fragment's document."""
    behind: list[int]
    """For each row, ranks behind that hold some of the last fragment's document."""

    def spread(self, states: Tensor, fragments: Tensor) -> Tensor:
        """States of rows [b, H, D, Dv] at these fragments, zero at the others: [n, H, D, Dv]."""
        count = self.fragments["cu_seqlens"].numel() - 1
        return states.new_zeros(count, *states.shape[1:]).index_copy_(0, fragments, states)


class _Keys(NamedTuple):
    """What the walk over chunks takes."""

    kg: Tensor  # exp(G_C - G) k
    w: Tensor
    u: Tensor
    g: Tensor  # running sum of the log-decay inside a chunk, to base 2


_layouts: WeakKeyDictionary[Packing, Layout] = WeakKeyDictionary()


def layout(packing: Packing) -> Layout:
    """Of a packing with a span. Reads the device when it first sees it."""
    if packing not in _layouts:
        _layouts[packing] = _layout(packing)
    return _layouts[packing]


def _layout(packing: Packing) -> Layout:
    span, handover = packing.span, Handover.of(packing)
    assert span is not None and handover is not None
    rows, length = packing.document_ids.shape
    borders, cu_seqlens = packing.cu_seqlens.tolist(), packing.cu_seqlens_int64
    edges = [borders.index(row * length) for row in range(rows + 1)]
    first, last = edges[:-1], [edge - 1 for edge in edges[1:]]
    reached = reach(span.whole.document_ids, span.starts, span.rank)
    return Layout(
        handover,
        {"cu_seqlens": cu_seqlens, "chunk_indices": prepare_chunk_indices(cu_seqlens, CHUNK)},
        torch.tensor(first, device=cu_seqlens.device),
        torch.tensor(last, device=cu_seqlens.device),
        [(cu_seqlens[i : i + 2], cu_seqlens[j : j + 2]) for i, j in zip(first, last, strict=True)],
        [i == j for i, j in zip(first, last, strict=True)],
        [before for before, _ in reached],
        [behind for _, behind in reached],
    )


def attend_over_ranks(arguments: list[Tensor], lower_bound: float, packing: Packing) -> Tensor:
    """q, k, v, decay logits, beta [b, s, H, *], A_log and dt_bias to [b, s, H, Dv]. Collective."""
    *tokens, A_log, dt_bias = arguments
    flat = [x.flatten(0, 1)[None].contiguous() for x in tokens]
    output: Tensor = _OverRanks.apply(*flat, A_log, dt_bias, lower_bound, layout(packing))
    return output.view(tokens[2].shape)


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        where: Layout,
    ) -> Tensor:
        scale, safe = q.shape[-1] ** -0.5, -5 <= lower_bound < 0
        q, q_rstd = l2norm_fwd(q)
        k, k_rstd = l2norm_fwd(k)
        g = _decay(z, A_log, dt_bias, lower_bound, where)
        w, u, _, kg, Aqk, Akk = chunk_kda_fwd_intra(
            q=q, k=k, v=v, gk=g, beta=beta, scale=scale, safe_gate=safe, chunk_size=CHUNK, **where.fragments
        )
        incoming, h, v_new = _states(_Keys(kg, w, u, g), where)
        output = chunk_gla_fwd_o_gk(
            q=q, v=v_new, g=g, A=Aqk, h=h, scale=scale, chunk_size=CHUNK, **where.fragments
        )
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, z, beta, A_log, dt_bias, Aqk, Akk, incoming)
        ctx.scale, ctx.safe, ctx.lower_bound, ctx.where = scale, safe, lower_bound, where
        return output.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, q_rstd, k, k_rstd, v, z, beta, A_log, dt_bias, Aqk, Akk, incoming = ctx.saved_tensors
        where, scale, do = ctx.where, ctx.scale, grads[0].contiguous()
        common = {"chunk_size": CHUNK, **where.fragments}
        g = _decay(z, A_log, dt_bias, ctx.lower_bound, where)
        w, u, qg, kg = recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=Akk, gk=g, **where.fragments)
        initial = None if incoming is None else where.spread(incoming, where.first)
        h, v_new, _ = chunk_gated_delta_rule_fwd_h(k=kg, w=w, u=u, gk=g, initial_state=initial, **common)
        dAqk, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=Aqk, scale=scale, **common)
        dh, dv = _state_gradients(_Keys(kg, w, u, g), qg, do, dv, scale, initial, where)
        dq, dk, dv, db, dg, dAkk = chunk_kda_bwd_wy_dqkg_fused(
            q=q, k=k, v=v, v_new=v_new, g=g, beta=beta, A=Akk, h=h, do=do, dh=dh, dv=dv, scale=scale, **common
        )
        dq, dk, db, dg = chunk_kda_bwd_intra(
            q=q, k=k, g=g, beta=beta, dAqk=dAqk, dAkk=dAkk, dq=dq, dk=dk, db=db, dg=dg,
            safe_gate=ctx.safe, **common,
        )  # fmt: skip
        dg = chunk_local_cumsum(dg, reverse=True, **common)
        dz, dA, dbias = kda_gate_bwd(g=z, A_log=A_log, dt_bias=dt_bias, dyg=dg, lower_bound=ctx.lower_bound)
        dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk)
        return dq.to(q), dk.to(k), dv.to(v), dz.to(z), db.to(beta), dA, dbias, None, None


def _decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float, where: Layout) -> Tensor:
    """Running sums of the log-decay inside chunks, to base 2; FP32 as z."""
    g: Tensor = kda_gate_chunk_cumsum(
        g=z, A_log=A_log, dt_bias=dt_bias, scale=RCP_LN2, chunk_size=CHUNK, lower_bound=lower_bound,
        **where.fragments,
    )  # fmt: skip
    return g


def _states(keys: _Keys, where: Layout) -> tuple[Tensor | None, Tensor, Tensor]:
    """Incoming state of each row (None: nothing comes), states of all chunks, and what chunks write."""
    kg, w, u, g = keys
    handover, walk = where.handover, {"chunk_size": CHUNK, **where.fragments}
    maps = _no_maps(kg, u, where)
    if not any(where.before):
        h, v_new, final = chunk_gated_delta_rule_fwd_h(k=kg, w=w, u=u, gk=g, output_final_state=True, **walk)
        maps[..., : u.shape[-1]] = final[where.last]
        handover.gather(maps)
        return None, h, v_new
    for row, (_, last) in enumerate(where.pairs):
        if where.behind[row]:
            chunk_cp_fwd_h(k=kg, w=w, u=u, hm=maps[row], gk=g, cu_seqlens=last, chunk_size=CHUNK)
    incoming = handover.incoming(handover.gather(_closed(maps, where)))
    initial = where.spread(incoming, where.first)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(k=kg, w=w, u=u, gk=g, initial_state=initial, **walk)
    return incoming, h, v_new


def _state_gradients(
    keys: _Keys, qg: Tensor, do: Tensor, dv: Tensor, scale: float, initial: Tensor | None, where: Layout
) -> tuple[Tensor, Tensor]:
    """Gradients of all chunks' states and of what chunks write: the mirror of `_states`."""
    kg, w, _, g = keys
    handover, maps = where.handover, _no_maps(kg, do, where)
    walk = {"q": qg, "k": kg, "w": w, "gk": g, "do": do, "scale": scale, "chunk_size": CHUNK}
    if not any(where.behind):
        dh, at_start, dv = chunk_gated_delta_rule_bwd_dhu(dv=dv, h0=initial, **walk, **where.fragments)
        if at_start is not None:
            maps[..., : do.shape[-1]] = at_start[where.first]
        handover.gather(maps, backward=True)
        return dh, dv
    for row, (first, _) in enumerate(where.pairs):
        if where.before[row]:
            chunk_cp_bwd_dh(dv=dv, dhm=maps[row], cu_seqlens=first, **walk)
    gathered = handover.gather(_closed(maps, where), backward=True)
    final = where.spread(handover.outgoing_gradient(gathered), where.last)
    dh, _, dv = chunk_gated_delta_rule_bwd_dhu(dv=dv, dht=final, **walk, **where.fragments)
    return dh, dv


def _no_maps(keys: Tensor, values: Tensor, where: Layout) -> Tensor:
    """Room for [E | M] of every row [b, H, D, Dv + D], FP32 and zero."""
    (H, Dv), D = values.shape[2:], keys.shape[-1]
    return values.new_zeros(len(where.whole), H, D, Dv + D, dtype=torch.float32)


def _closed(maps: Tensor, where: Layout) -> Tensor:
    """M is zero where a document starts inside a row."""
    D = maps.shape[-2]
    for row, whole in enumerate(where.whole):
        if not whole:
            maps[row, ..., -D:] = 0
    return maps
