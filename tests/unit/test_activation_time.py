"""When tensors that lie on a tier must be asked for."""

from __future__ import annotations

import pytest

from k3train.activation_time import operations_ahead
from k3train.config import ClusterConfig, Config


def make(sites: dict[str, str], **cluster: float) -> Config:
    config = Config(cluster=ClusterConfig(**cluster))  # type: ignore[arg-type]
    config.offload.sites, config.offload.inflight_mib = sites, 500
    return config


@pytest.mark.parametrize(
    ("sites", "shortest", "ahead"),
    [
        # 500 MiB at 50 GB/s take 10.5 ms.
        ({"*": "host"}, 1.0, 1),
        ({"*": "host"}, 5e-3, 3),
        ({"*": "recompute"}, 1e-6, 1),
        # The slowest tier decides: 262 ms, and 0.2 ms until it begins.
        ({"kda.*": "host", "mla.*": "nvme"}, 0.1, 3),
        ({"kda.*": "host", "mla.*": "nvme"}, 0.2622, 2),
    ],
)
def test_a_backward_asks_as_long_before_as_its_tier_needs(
    sites: dict[str, str], shortest: float, ahead: int
) -> None:
    config = make(sites, host_gbps=50.0, nvme_read_gbps=2.0)
    assert operations_ahead(config, [1.0, shortest, 2.0]) == ahead
