"""One rank of a layer of balanced experts in FP64, compared with a dense layer that knows all tokens.

Letters: R ranks, E experts, P = E/R at home on a rank, S tokens of a rank, K experts of a token, l latent
width, f expert FFN width.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel.moonep import MoonEP, Routed, Segments, activate_backward
from parallel.moonep.plan import FILL, NONE, Eplb, Policy

LATENT, FFN = 8, 6
PLACES, TOP_K = 3, 3


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class LoopMath:
    """`ExpertMath` one group after another; remembers how many rows the first products had."""

    def __init__(self, *, verify: bool = True) -> None:
        self.first_rows: list[int] = []
        self.verify = verify

    def multiply(self, rows: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        if self.verify:
            assert segments.ends.tolist() == torch.tensor(segments.counts).cumsum(0).tolist()
            assert segments.ends.dtype == torch.int32
        if weights[0].shape[1] == LATENT:
            self.first_rows.append(len(rows))
        pieces = zip(rows.split(segments.counts), weights, strict=True)
        return torch.cat([piece @ weight.t() for piece, weight in pieces])

    def input_gradient(self, grad: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        pieces = zip(grad.split(segments.counts), weights, strict=True)
        return torch.cat([piece @ weight for piece, weight in pieces])

    def weight_gradients(self, grad: Tensor, rows: Tensor, segments: Segments) -> list[Tensor | None]:
        pieces = zip(grad.split(segments.counts), rows.split(segments.counts), strict=True)
        return [g.t() @ x if len(g) else None for g, x in pieces]

    def activate(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def activate_backward(
        self, gate_up: Tensor, grad: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return activate_backward(swiglu, gate_up, grad, weights)


class Data:
    """The same on every rank: tokens, choices, weights and upstream gradients of all ranks; all experts."""

    def __init__(self, tokens: Sequence[int], routing: str, dtype: torch.dtype = torch.float64) -> None:
        ranks = len(tokens)
        self.experts, self.ranks = ranks * PLACES, ranks
        generator = torch.Generator().manual_seed(len(routing) + 7 * sum(tokens))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.latent = [normal(count, LATENT) for count in tokens]
        self.upstream = [normal(count, LATENT) for count in tokens]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.weights = [normal(count, TOP_K).abs().to(wide) for count in tokens]
        self.w1 = [normal(2 * FFN, LATENT) / LATENT**0.5 for _ in range(self.experts)]
        self.w2 = [normal(LATENT, FFN) / FFN**0.5 for _ in range(self.experts)]
        self.choice = [self._choose(routing, count, generator) for count in tokens]

    def wide(self) -> Data:
        """The same values in FP64."""
        found = copy.copy(self)
        for name in ("latent", "upstream", "weights", "w1", "w2"):
            setattr(found, name, [each.double() for each in getattr(self, name)])
        return found

    def _choose(self, routing: str, count: int, generator: torch.Generator) -> Tensor:
        """[count, K] physical experts."""
        if routing == "one_expert":
            return torch.full((count, TOP_K), self.experts - 2)
        if routing == "one_rank":
            return torch.arange(TOP_K).expand(count, TOP_K) + PLACES
        if routing == "idle_rank":
            # Everything evenly over the experts of all ranks but the first: most replicas (Theorem 2).
            dealt = torch.arange(count * TOP_K) % (self.experts - PLACES) + PLACES
            return dealt.view(count, TOP_K)
        popularity = torch.ones(self.experts)
        if routing == "skewed":
            popularity = torch.exp(-0.6 * torch.arange(self.experts))
        # With "duplicates" an expert may stand several times in a token.
        again = routing == "duplicates"
        if not count:
            return torch.zeros(0, TOP_K, dtype=torch.int64)
        return torch.multinomial(popularity.expand(count, -1), TOP_K, again, generator=generator)


def dense(data: Data) -> list[dict[str, Any]]:
    """For each rank: its output, and the gradients of its tokens, weights and home experts."""
    w1 = [each.clone().requires_grad_() for each in data.w1]
    w2 = [each.clone().requires_grad_() for each in data.w2]
    latent = [each.clone().requires_grad_() for each in data.latent]
    weights = [each.clone().requires_grad_() for each in data.weights]
    outputs = []
    for tokens, choice, given in zip(latent, data.choice, weights, strict=True):
        every = torch.stack([swiglu(tokens @ a.t()) @ b.t() for a, b in zip(w1, w2, strict=True)], 1)
        chosen = every.gather(1, choice[..., None].expand(-1, -1, LATENT))
        outputs.append((chosen * given[..., None]).sum(1))
    torch.autograd.backward(outputs, data.upstream)
    return [
        {
            "output": outputs[rank].detach(),
            "latent": latent[rank].grad,
            "weights": weights[rank].grad,
            "w1": [_grad(each) for each in w1[rank * PLACES : (rank + 1) * PLACES]],
            "w2": [_grad(each) for each in w2[rank * PLACES : (rank + 1) * PLACES]],
        }
        for rank in range(data.ranks)
    ]


def balanced(data: Data, rank: int, moonep: MoonEP, math: LoopMath, way: str) -> dict[str, Any]:
    """The same quantities of one rank, through MoonEP, where the data is. `way`: lean, dispatcher, checkpoint
    or frozen."""

    def leaf(tensor: Tensor, trained: bool = True) -> Tensor:
        return tensor.clone().requires_grad_(trained)

    own = slice(rank * PLACES, (rank + 1) * PLACES)
    w1, w2 = ([leaf(each, way != "frozen") for each in weight[own]] for weight in (data.w1, data.w2))
    latent, weights = leaf(data.latent[rank]), leaf(data.weights[rank])
    choice, upstream = data.choice[rank], data.upstream[rank]
    kept: list[Routed] = []

    def layer(latent: Tensor, weights: Tensor) -> Tensor:
        # A second pass follows the plan of the first.
        if not kept:
            kept.append(moonep.plan(choice))
        return moonep(latent, weights, kept[0], math, w1, w2)

    if way == "dispatcher":
        output = through_dispatcher(moonep, latent, weights, choice, math, w1, w2)
    elif way.startswith("checkpoint"):
        reentrant = way == "checkpoint"
        output = checkpoint(layer, latent, weights, use_reentrant=reentrant)
    else:
        output = layer(latent, weights)
    output.backward(upstream)
    return {
        "output": output.detach(),
        "latent": latent.grad,
        "weights": weights.grad,
        "w1": [each.grad for each in w1],
        "w2": [each.grad for each in w2],
    }


def through_dispatcher(
    moonep: MoonEP, latent: Tensor, weights: Tensor, choice: Tensor, math: LoopMath, w1: Any, w2: Any
) -> Tensor:
    """The six phases, with experts in plain autograd between them."""
    from parallel.moonep.dispatcher import MoonEPDispatcher

    group = getattr(moonep.transport, "group", None)
    collection: Any = SimpleNamespace(ep=group, expt_tp=None, tp_ep=group)
    dispatcher = MoonEPDispatcher(moonep, SimpleNamespace(moe_router_topk=TOP_K), collection)  # type: ignore[arg-type]
    payloads, given = dispatcher.dispatch_preprocess(latent[:, None], choice, weights)
    rows, counts, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(payloads, given))
    w1, w2 = dispatcher.borrow(w1, w2)
    math.first_rows.append(len(rows))
    pieces = zip(rows.split(counts.tolist()), w1, w2, strict=True)
    outputs = torch.cat([swiglu(piece @ a.t()) @ b.t() for piece, a, b in pieces])
    returned = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
    return dispatcher.combine_postprocess(returned)[:, 0]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest difference of each quantity, over its largest value where that is above one."""
    return {
        name: max(_distance(a, b) for a, b in zip(_list(found[name]), _list(expected[name]), strict=True))
        for name in expected
    }


def digest(found: dict[str, Any], names: Sequence[str]) -> str:
    """Of the bits."""
    tensors = [each.cpu().view(torch.uint8) for name in names for each in _list(found[name])]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()


def layers(ranks: int, cases: list[dict[str, Any]], device: str = "cpu") -> list[dict[str, Any]]:
    """Run all cases on this rank; a missing rank ends the wait after a minute."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else None
    if place is not None:
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if place else "gloo",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=1),
        device_id=place,
    )
    answers = [_case(rank, device, **case) for case in cases]
    dist.destroy_process_group()
    return answers


def _case(
    rank: int,
    device: str,
    tokens: list[int],
    routing: str,
    way: str = "lean",
    dtype: str = "float64",
    **options: Any,
) -> dict[str, Any]:
    data, math = Data(tokens, routing, getattr(torch, dtype)), LoopMath()
    options["policy"] = _policy(options.get("policy", "fill"), data)
    moonep = MoonEP(dist.group.WORLD, data.experts, device=torch.device(device), **options)
    found = balanced(data, rank, moonep, math, way)
    expected = dense(data.wide())[rank]
    if way == "frozen":
        assert all(each is None for each in found["w1"] + found["w2"])
        del expected["w1"], expected["w2"]
    stats = moonep.stats.read()
    stats.pop("plan_ms")
    exact = [name for name in ("output", "latent", "weights") if name in expected]
    return {
        "differences": differences(found, expected),
        "rows": math.first_rows,
        "bits": digest(found, list(expected)),
        "row_bits": digest(found, exact),
        "stats": stats,
    }


def _policy(name: str, data: Data) -> Policy:
    """`eplb` has seen this very load."""
    if name != "eplb":
        return {"fill": FILL, "none": NONE}[name]
    policy = Eplb(every=1, slots=2)
    policy.observe(torch.stack([each.flatten().bincount(minlength=data.experts) for each in data.choice]))
    return policy


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    if not found.numel():
        return 0.0
    return float((found.cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1))


def _list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]
