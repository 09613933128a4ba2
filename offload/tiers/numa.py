"""Which memory lies beside a GPU: the NUMA node that sysfs names for it, and threads that run there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")


def node_of(device: torch.device, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a GPU, or None where the machine names none."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def nodes(sysfs: Path = SYSFS) -> list[int]:
    """NUMA nodes of this machine."""
    found = (sysfs / "devices/system/node").glob("node[0-9]*")
    return sorted(int(path.name.removeprefix("node")) for path in found)


def cores_of(node: int | None, sysfs: Path = SYSFS) -> set[int]:
    """Cores of a node that this process may use; all its cores if there is no node, or none of it."""
    mine = os.sched_getaffinity(0)
    try:
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return mine
    return mine & parse_cores(listed) or mine


def parse_cores(listed: str) -> set[int]:
    """The kernel's notation, such as 0-3,8."""
    ranges = (part.partition("-") for part in listed.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def thread_beside(device: torch.device, name: str) -> ThreadPoolExecutor:
    """A thread on the cores beside a GPU: what it touches first lies in the memory there."""
    cores = cores_of(node_of(device))
    return ThreadPoolExecutor(1, name, initializer=lambda: os.sched_setaffinity(0, cores))


def placement(device: torch.device) -> tuple[bool, str]:
    """Whether memory is placed by node for a device, and the node, or why not."""
    known = nodes()
    if len(known) < 2:
        return False, "the machine has one NUMA node"
    if device.type != "cuda":
        return False, "no GPU"
    node = node_of(device)
    if node is None:
        return False, f"{device}: the machine does not say which NUMA node it is on"
    if not os.sched_getaffinity(0) & cores_of(node):
        return False, f"this process may use no core of node {node}"
    return True, f"{device} is on NUMA node {node} of {len(known)}"
