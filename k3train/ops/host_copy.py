"""Small tensors that the host waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(values: Tensor) -> Tensor:
    """Start to copy a tensor on a GPU to pinned memory; it is there when the current stream has got here.

    A kernel writes it. A copy engine would take it behind all that is on its way to the host already, and
    the host would wait for activations that it does not need.
    """
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    torch.add(values, 0, out=torch.as_tensor(_OnDevice(host), device=values.device))
    return host


class _OnDevice:
    """Pinned memory as the device addresses it."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": host.numpy().dtype.str,
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
