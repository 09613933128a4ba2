"""Small tensors on their way to the host do not wait for large ones."""

from __future__ import annotations

import pytest
import torch

from k3train.ops.host_copy import to_host

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_values_arrive(dtype: torch.dtype) -> None:
    for size in (1, 32, 896):
        values = torch.randint(-(2**20), 2**20, (size,), device="cuda").to(dtype)
        host = to_host(values)
        torch.cuda.current_stream().synchronize()
        assert host.is_pinned() and torch.equal(host, values.cpu())


def test_they_overtake_what_a_copy_engine_has_to_do() -> None:
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    values, side = torch.arange(32, device="cuda"), torch.cuda.Stream()
    to_host(values)  # the memory of the next one is there
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(8):
            target.copy_(large, non_blocking=True)
        behind = side.record_event()
    host = to_host(values)
    torch.cuda.current_stream().synchronize()
    assert not behind.query(), "8 GB take longer than a kernel"
    assert torch.equal(host, torch.arange(32))
    torch.cuda.synchronize()
