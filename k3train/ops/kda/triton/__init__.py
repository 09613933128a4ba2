"""Kimi Delta Attention in Triton kernels of our own, forward and backward, for a bounded log-decay."""
