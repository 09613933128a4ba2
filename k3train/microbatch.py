"""Sizes of one micro-batch on one rank. Imports no torch."""

from __future__ import annotations

from .config import Config, ModelConfig
from .shapes import BYTES, model_dtype


def tokens_per_microbatch(config: Config) -> int:
    """Tokens of one micro-batch on one rank."""
    return config.data.micro_batch_size * config.data.sequence_length // config.parallel.context


def element_bytes(model: ModelConfig) -> int:
    """Bytes of one activation element."""
    return BYTES[model_dtype(model)]


def row_bytes(config: Config) -> int:
    """Bytes of one AttnRes row of a micro-batch, and of any other tensor [s, b, hidden_size]."""
    return tokens_per_microbatch(config) * config.model.hidden_size * element_bytes(config.model)
