"""Optimizers of megatron-core, their schedule, and gradient clipping that no layout changes."""
