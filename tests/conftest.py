"""Every test runs on one thread, with megatron-core made ready for a machine without CUDA."""

from __future__ import annotations

import pytest
import torch

from parallel.cpu import enable_cpu

enable_cpu()  # before any test module imports megatron.core
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
