"""Which tier takes over when one is full, fails or cannot be opened, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.tiers import OffloadError, TierFull, open_tiers
from offload.tiers.chain import Tiers
from offload.tiers.host import open_host
from offload.tiers.nvme import NvmeTier
from offload.tiers.peer import Peers
from tests.unit.offload.faults import Faulty

CPU = torch.device("cpu")
KIB = 1024


def content(seed: int, nbytes: int = 4 * KIB) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def put(tiers: Tiers, name: str, seed: int) -> str:
    """Put, read back, and say where it was."""
    parcel = tiers.put(name, content(seed))
    if parcel is None:
        return "device"
    parcel.wait_stored()
    assert torch.equal(parcel.take(), content(seed))
    return parcel.tier


def opened(told: list[str], capacities: dict[str, int], **options: Any) -> Tiers:
    return open_tiers(capacities, CPU, warn=told.append, **options)


def test_everything_goes_where_it_should(tmp_path: Path) -> None:
    told: list[str] = []
    tiers = opened(told, {"host": 64 * KIB, "nvme": 64 * KIB}, nvme_dir=tmp_path)
    assert [put(tiers, name, 1) for name in ("host", "nvme")] == ["host", "nvme"] and told == []
    assert [line.partition(":")[0] for line in tiers.describe()] == ["host", "nvme"]
    tiers.close()


def test_a_full_tier_spills_and_is_asked_again(tmp_path: Path) -> None:
    told: list[str] = []
    tiers = opened(told, {"host": 8 * KIB, "nvme": 16 * KIB}, nvme_dir=tmp_path)
    held = [tiers.put("nvme", content(seed)) for seed in range(6)]
    assert [parcel and parcel.tier for parcel in held] == ["nvme", "nvme", "host", "host", None, None]
    assert len(told) == 2
    assert told[0].startswith("the nvme tier is full") and told[0].endswith("host takes what would go there")
    assert told[1].startswith("the host tier is full") and told[1].endswith(
        "the device takes what would go there"
    )
    assert held[0] is not None
    held[0].free()
    assert put(tiers, "nvme", 7) == "nvme"
    for seed, parcel in enumerate(held[1:4], 1):
        assert parcel is not None and torch.equal(parcel.take(), content(seed))
    tiers.close()


def test_a_disk_that_fails_is_not_asked_again(tmp_path: Path) -> None:
    told: list[str] = []
    engine = Faulty()
    nvme = NvmeTier(tmp_path, 64 * KIB, CPU, engine=lambda: engine)
    tiers = Tiers({"host": open_host(64 * KIB, CPU), "nvme": nvme}, fallback=True, warn=told.append)
    engine.fail_writes_after = 1
    first, second = tiers.put("nvme", content(1)), tiers.put("nvme", content(2))
    assert first is not None and second is not None
    assert torch.equal(second.take(), content(2)), "it was on its way"
    assert (put(tiers, "nvme", 3), put(tiers, "nvme", 4)) == ("host", "host")
    assert torch.equal(first.take(), content(1))
    assert len(told) == 1
    assert told[0].startswith(f"the disk under {tmp_path} failed: No space left on device")
    tiers.close()


@pytest.mark.parametrize("capacities", [{"nvme": KIB}, {"nvme": KIB, "host": 64 * KIB}])
def test_a_tier_that_cannot_be_opened(capacities: dict[str, int], tmp_path: Path) -> None:
    told: list[str] = []
    tiers = opened(told, capacities, nvme_dir=tmp_path / "no" / "disk")
    instead = "host" if "host" in capacities else "device"
    assert put(tiers, "nvme", 1) == put(tiers, "nvme", 2) == instead
    assert len(told) == 1 and "No such file" in told[0] and f"{instead} takes what would go" in told[0]
    with pytest.raises(OffloadError, match=r"No such file.*; or set offload\.on_failure=fallback"):
        opened(told, capacities, nvme_dir=tmp_path / "no" / "disk", fallback=False)
    tiers.close()


def test_without_a_lender_or_a_disk() -> None:
    told: list[str] = []
    tiers = opened(told, {"peer": KIB, "nvme": KIB})
    assert (put(tiers, "peer", 1), put(tiers, "nvme", 1)) == ("device", "device")
    assert [line.partition(";")[0] for line in told] == [
        "no rank of this host lends memory",
        "no disk is known",
    ]
    tiers.close()


def test_a_rank_that_only_lends_uses_the_next_tier() -> None:
    told: list[str] = []
    store = dist.HashStore()
    tiers = opened(told, {"peer": 8 * KIB, "host": 8 * KIB}, peers=Peers(store, 1, lends=KIB), fallback=False)
    assert put(tiers, "peer", 1) == "host" and told == []
    assert json.loads(store.get("offer/1"))["nbytes"] == KIB
    tiers.close()


def test_full_may_mean_stop() -> None:
    tiers = opened([], {"host": 4 * KIB}, fallback=False)
    tiers.put("host", content(1))
    with pytest.raises(
        TierFull, match=r"the host tier is full.*offload\.host_gb.*; or set offload\.on_failure=fallback"
    ):
        tiers.put("host", content(2))
    tiers.close()
