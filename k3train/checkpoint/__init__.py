"""Checkpoints in megatron-core's sharded format: published whole or not at all, verified before use."""
