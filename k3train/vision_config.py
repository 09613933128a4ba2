"""The `vision` section of the configuration: MoonViT-V2, its projector, and where its work is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VisionConfig:
    """Shape of the vision tower and its place in the step. Defaults are MoonViT-V2's."""

    enabled: bool = False
    """Whether the model has a vision tower and reads images."""
    mode: str = "bubbles"
    """bubbles (the tower's work fills the pipeline's idle time), inline (on the first stage, beside the
    micro-batch that reads it) or phase (all of it before and after the pipeline, balanced over ranks)."""
    depth: int = 27
    """Transformer blocks of the tower."""
    hidden_size: int = 1024
    num_heads: int = 12
    head_dim: int = 128
    """Width of an attention head, a multiple of 4; `num_heads` x `head_dim` may differ from `hidden_size`."""
    ffn_size: int = 4096
    patch_size: int = 14
    """Pixels along the side of one patch."""
    channels: int = 3
    """Colour channels of an image."""
    grid_size: int = 64
    """Side of the learned square grid of positions, resized bilinearly to the grid of each item."""
    max_frames: int = 4
    """Frames that one clip may have; they are averaged into one frame of tokens."""
    rope_theta: float = 1e4
    """Base of the wavelengths of the 2-D rotary embedding."""
    rope_max: int = 512
    """Most patches along either side of an item."""
    norm_eps: float = 1e-5
    """Epsilon of the tower's RMSNorms, here the language model's. The released tower leaves it to torch,
    which takes 1.1920929e-07 in some releases and, with BF16, 2^-7 in others."""
    merge: int = 2
    """Neighbouring patches along each side that become one token."""
    projector_norm_eps: float = 1e-5
    """Epsilon of the RMSNorm behind the projector."""
    max_patches: int = 65536
    """Most patches of one item, all frames counted."""
    attention: str = "auto"
    """Backend of the tower's attention: auto, varlen, sdpa or reference."""
