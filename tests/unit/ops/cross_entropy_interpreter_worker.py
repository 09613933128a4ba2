"""Prints how far the loss through Triton kernels, interpreted on the CPU, is from autograd's in FP64.

One line of JSON for each case: relative errors of losses and gradients, those of PyTorch's steps beside them.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from k3train.ops.cross_entropy import chunked, reference, triton


def results(losses: object, inputs: tuple[Tensor, ...], words: int) -> list[Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs[:2])
    found = losses(hidden, weight, inputs[2], words)  # type: ignore[operator]
    return [found.detach(), *torch.autograd.grad(found, (hidden, weight), inputs[3].to(found.dtype))]


def case(dtype: torch.dtype, t: int, v: int, words: int, scale: float) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(1)
    hidden = scale * torch.randn(t, 8, generator=generator)
    weight = torch.randn(v, 8, generator=generator)
    labels = torch.randint(v, (t,), generator=generator)
    labels[0], labels[-1] = 0, v - 1
    grad = (torch.rand(t, generator=generator) < 0.7).float()
    low = hidden.to(dtype), weight.to(dtype), labels, grad
    exact = results(reference.token_losses, (low[0].double(), low[1].double(), labels, grad), 0)
    ours, plain = results(triton.token_losses, low, words), results(chunked.token_losses, low, words)
    again = results(triton.token_losses, low, words)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))

    def errors(found: list[Tensor]) -> list[float]:
        pairs = zip(found, exact, strict=True)
        return [((a.double() - e).norm() / e.norm().clamp(min=1e-30)).item() for a, e in pairs]

    return {"ours": errors(ours), "plain": errors(plain)}


triton.BLOCK = 16  # several blocks of a chunk
for dtype in (torch.float32, torch.bfloat16):
    for t, v, words, scale in ((5, 50, 20, 1.0), (4, 37, 37, 3e3), (3, 9, 1, 1.0)):
        print(json.dumps(case(dtype, t, v, words, scale)))
