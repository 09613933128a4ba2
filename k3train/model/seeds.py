"""One stream of random numbers for each parameter, named by the parameter and the run's seed."""

from __future__ import annotations

import hashlib

import torch


def named_generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Random numbers of the parameter with the global name `name`, the same in every layout and order."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
