"""An open trainer for Kimi-K3-style models that extends megatron-core."""
