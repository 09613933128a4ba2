"""An open trainer for Kimi-K3-style models that extends megatron-core."""

__version__ = "0.1.0"
