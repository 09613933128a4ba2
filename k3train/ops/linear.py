"""megatron-core's two sets of linear modules; a backend of the operator `linear` returns one of them."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider, get_backend


def local_modules() -> BackendSpecProvider:
    """megatron-core's own modules, on any device."""
    return get_backend("local")


def transformer_engine_modules() -> BackendSpecProvider:
    """Transformer Engine's modules behind megatron-core's interface, with grouped GEMM for the experts."""
    return get_backend("transformer_engine")
