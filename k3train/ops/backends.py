"""Which implementation runs an operator, and why another one does not.

Nothing here imports a kernel library before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import UserError

LOW_PRECISION = (torch.bfloat16, torch.float16)
UP_TO_FP32 = (*LOW_PRECISION, torch.float32)


@dataclass(frozen=True)
class Backend:
    """One way to run the operator `op`: `function` of a module whose name is relative to `k3train.ops`."""

    op: str
    name: str
    module: str
    function: str
    device_types: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] | None = None
    """Input types it takes; None for any."""
    requires: str | None = None
    """Module that has to import, beyond torch."""
    capabilities: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Compute capabilities of its devices: from the first on, below the second."""
    trial: str | None = None
    """Function of its module that says why it does not compute rightly on this device, or None."""

    def unavailable(self) -> str | None:
        """Why it cannot run in this process, or None. Does not depend on the inputs."""
        if "cpu" not in self.device_types and not torch.cuda.is_available():
            return "needs a CUDA device, and torch sees none"
        if self.capabilities and (reason := _other_capability(*self.capabilities)):
            return reason
        if self.requires and (reason := _import_failure(self.requires)):
            return reason
        return _tried(self.module, self.trial) if self.trial else None

    def refuses(self, device_type: str, dtype: torch.dtype | None) -> str | None:
        """Why it cannot take inputs of this kind, or None."""
        if device_type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)} tensors, not {device_type}"
        if dtype is not None and self.dtypes is not None and dtype not in self.dtypes:
            return f"takes {' or '.join(map(str, self.dtypes))}, not {dtype}"
        return self.unavailable()

    def load(self) -> Callable[..., Any]:
        """The function itself; imports its module."""
        return _load(self.module, self.function)


# Fastest first: `auto` takes the first one that does not refuse (the grouped products ask their cost model).
_BACKENDS = (
    Backend("kda", "fla", "kda.fla", "delta_attention", ("cuda",), LOW_PRECISION, "fla.ops.kda"),
    Backend("kda", "chunk", "kda.core", "delta_attention_chunk"),
    Backend("kda", "recurrent", "kda.core", "delta_attention_recurrent"),
    # By name only: faster than fla where it was timed, but tests/gpu has not run it and it refuses more.
    Backend("kda", "triton", "kda.triton.attention", "delta_attention", ("cuda",), (torch.bfloat16,),
            "triton", ((9, 0), (10, 0))),
    Backend("short_conv", "fla", "short_conv.fla", "short_conv", ("cuda",), UP_TO_FP32,
            "fla.modules.causal_conv1d"),
    Backend("short_conv", "shift", "short_conv.shift", "short_conv"),
    Backend("short_conv", "reference", "short_conv.reference", "short_conv"),
    Backend("attn_res", "fla", "attn_res.fla", "attn_res", ("cuda",), UP_TO_FP32, "fla.ops.attnres"),
    Backend("attn_res", "lean", "attn_res.lean", "attn_res"),
    Backend("attn_res", "reference", "attn_res.reference", "attn_res"),
    Backend("situ", "triton", "situ.triton", "situ_glu", ("cuda",), UP_TO_FP32, "triton"),
    Backend("situ", "lean", "situ.lean", "situ_glu"),
    Backend("situ", "reference", "situ.reference", "situ_glu"),
    Backend("attention", "te", "attention.te", "causal_attention", ("cuda",), LOW_PRECISION,
            "transformer_engine.pytorch"),
    Backend("attention", "flash", "attention.flash", "causal_attention", ("cuda",), LOW_PRECISION),
    Backend("attention", "sdpa", "attention.sdpa", "causal_attention"),
    Backend("attention", "reference", "attention.reference", "causal_attention"),
    Backend("item_attention", "varlen", "item_attention.varlen", "item_attention", ("cuda",), LOW_PRECISION,
            "torch.nn.attention.varlen"),
    Backend("item_attention", "sdpa", "item_attention.sdpa", "item_attention"),
    Backend("item_attention", "reference", "item_attention.reference", "item_attention"),
    Backend("grouped", "te", "grouped.te", "products", ("cuda",), LOW_PRECISION,
            "transformer_engine.pytorch"),
    Backend("grouped", "grouped_mm", "grouped.grouped_mm", "products", ("cpu", "cuda"), (torch.bfloat16,)),
    Backend("grouped", "loop", "grouped.loop", "products"),
    Backend("mx", "triton", ".quant.mx.triton", "codec", ("cuda",), UP_TO_FP32, "triton"),
    Backend("mx", "reference", ".quant.mx.reference", "codec"),
    Backend("mx_products", "te", ".quant.mx.te", "multiply", ("cuda",), (torch.bfloat16,),
            "transformer_engine.pytorch", ((10, 0), (12, 0)), "trial"),
    Backend("mx_products", "emulated", "grouped.products", "multiply"),
    Backend("cross_entropy", "megatron", "cross_entropy.megatron", "token_losses"),
    # Those behind it by name only: the two that walk in chunks have never run on a GPU.
    Backend("cross_entropy", "chunked", "cross_entropy.chunked", "token_losses"),
    Backend("cross_entropy", "reference", "cross_entropy.reference", "token_losses"),
    Backend("cross_entropy", "triton", "cross_entropy.triton", "token_losses", ("cuda",), UP_TO_FP32,
            "triton"),
    Backend("linear", "te", "linear", "transformer_engine_modules", ("cuda",), None,
            "transformer_engine.pytorch"),
    Backend("linear", "local", "linear", "local_modules"),
)  # fmt: skip

# Operators whose choice is not a key of `model.backends`.
_KEYS = {"item_attention": "vision.attention", "mx": "quant.backend", "mx_products": "quant.products"}


@cache
def resolve(op: str, requested: str, device_type: str, dtype: torch.dtype | None = None) -> Backend:
    """The backend that runs `op` on tensors of `device_type` (and `dtype`, when given).

    Raises UserError when `requested` is unknown or cannot run here; "auto" takes the fastest that can.
    """
    key = _KEYS.get(op, f"model.backends.{op}")
    if requested == "auto":
        return usable(op, device_type, dtype)[0]
    for backend in candidates(op):
        if backend.name == requested:
            if reason := backend.refuses(device_type, dtype):
                names = ", ".join(b.name for b in usable(op, device_type, dtype))
                raise UserError(f"{key}={requested}: {reason}; use auto or {names}")
            return backend
    names = ", ".join(b.name for b in candidates(op))
    raise UserError(f"{key}={requested}: no such backend; use auto, {names}")


def candidates(op: str) -> list[Backend]:
    """Every backend of the operator, fastest first."""
    found = [backend for backend in _BACKENDS if backend.op == op]
    assert found, f"unknown operator {op}"
    return found


def usable(op: str, device_type: str, dtype: torch.dtype | None = None) -> list[Backend]:
    """The backends that run `op` on such tensors here, fastest first."""
    return [backend for backend in candidates(op) if backend.refuses(device_type, dtype) is None]


def call(op: str, requested: str, like: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `op` through the backend that suits the tensor `like`."""
    return _function(op, requested, like.device.type, like.dtype)(*args, **kwargs)


def current_device() -> torch.device:
    """Where this process computes: its GPU; without one the default device, the CPU but in a rehearsal."""
    if not torch.cuda.is_available():
        return torch.get_default_device()
    return torch.device("cuda", torch.cuda.current_device())


def report() -> list[tuple[str, str, bool, str | None]]:
    """(operator, backend, can run in this process, why not) for every backend, fastest first."""
    reasons = [(backend, backend.unavailable()) for backend in _BACKENDS]
    return [(backend.op, backend.name, reason is None, reason) for backend, reason in reasons]


@cache
def _function(op: str, requested: str, device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    return resolve(op, requested, device_type, dtype).load()


def _load(module: str, function: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f".{module}", __package__), function)  # type: ignore[no-any-return]


@cache
def _tried(module: str, trial: str) -> str | None:
    return _load(module, trial)()  # type: ignore[no-any-return]


def _other_capability(least: tuple[int, int], below: tuple[int, int]) -> str | None:
    """Why this device is not one of those, or None."""
    has = torch.cuda.get_device_capability()
    if least <= has < below:
        return None
    first, end, own = (".".join(map(str, each)) for each in (least, below, has))
    return f"needs compute capability {first} or higher, below {end}; this device has {own}"


@cache
def _import_failure(module: str) -> str | None:
    """Why `module` cannot be imported, or None; an installed package may still fail to load its libraries."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{module.partition('.')[0]} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken native library raises nearly anything
        return f"importing {module} failed: {error}".splitlines()[0]
    return None
