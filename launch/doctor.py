"""`k3train doctor`: what is installed here, what is used, and why not.

The first part reads package metadata only, so that it appears at once and works in a broken environment;
torch is imported last, for the devices and the operators.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3train.errors import UserError

GIB = 1 << 30
PLACEHOLDER = "999.9.9"
NO_DEVICE = "no NVIDIA device"
APEX_INSTALL = (
    "git clone https://github.com/NVIDIA/apex && cd apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
    "pip install --no-build-isolation ."
)


@dataclass(frozen=True)
class Package:
    """A package that k3train works with. `least` is included in the versions that do, `below` is not."""

    name: str
    module: str
    use: str
    least: str = ""
    below: str = ""
    required: bool = True
    needs_gpu: bool = False
    install: str = ""

    def install_line(self) -> str:
        """The command that installs a version that works."""
        bounds = [f">={self.least}" if self.least else "", f"<{self.below}" if self.below else ""]
        return self.install or f"pip install '{self.name}{','.join(filter(None, bounds))}'"


@dataclass(frozen=True)
class Finding:
    """What was found of one package; `reason` says why it is not used."""

    name: str
    version: str | None
    used: bool
    reason: str
    use: str
    required: bool
    install: str


PACKAGES = (
    Package("torch", "torch", "tensors and process groups", least="2.11"),
    Package("megatron-core", "megatron.core", "parallel layers, schedules, optimizer", "0.19", "0.20"),
    Package("hydra-core", "hydra", "configuration", "1.3", "1.4"),
    Package("omegaconf", "omegaconf", "configuration", "2.3", "2.4"),
    Package("pyyaml", "yaml", "configuration"),
    Package("emerging-optimizers", "emerging_optimizers", "Muon's Newton-Schulz", "0.3", "1"),
    Package("numpy", "numpy", "data"),
    Package("pyarrow", "pyarrow", ".parquet input"),
    Package("zstandard", "zstandard", ".zst input"),
    Package("pillow", "PIL", "images, drawings of a plan"),
    Package("scikit-learn", "sklearn", "the bundled digits"),
    Package("tokenizers", "tokenizers", "tokenizer.json"),
    Package("tiktoken", "tiktoken", "tiktoken files"),
    Package("safetensors", "safetensors", "weights for others"),
    Package("psutil", "psutil", "checkpoint writing by megatron-core"),
    Package("rich", "rich", "progress"),
    Package("tensorboard", "tensorboard", "curves"),
    Package("wandb", "wandb", "curves, with log=wandb"),
    Package("megatron-energon", "megatron.energon", "tar shards of images", required=False),
    Package("triton", "triton", "GPU kernels", required=False, needs_gpu=True),
    Package(
        "transformer-engine", "transformer_engine", "GPU linears and attention", required=False,
        needs_gpu=True, install="pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    Package(
        "flash-linear-attention", "fla", "GPU kernels of KDA and AttnRes", required=False, needs_gpu=True,
    ),
    Package(
        "apex", "apex", "fused norms, scale and Adam", required=False, needs_gpu=True, install=APEX_INSTALL,
    ),
    Package(
        "deepspeed", "deepspeed", "DeepNVMe, where built", required=False,
    ),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print what was found; 0 when k3train can train here, else 1. `--json` prints one JSON object.

    With `--health` the machine is tried out instead, as before a run with `fault.health`; 0 or 4.
    """
    as_json, tries = "--json" in arguments, "--health" in arguments
    folders = [argument.removeprefix("folder=") for argument in arguments if argument.startswith("folder=")]
    for argument in arguments:
        if argument not in ("--json", "--health") and not (tries and argument.startswith("folder=")):
            raise UserError(
                f"doctor: {argument} is no option of it; valid are --json and --health [folder=PATH]"
            )
    if tries:
        from . import health

        return health.main(folders[-1] if folders else None, as_json)
    host, packages = machine(), [find(package) for package in PACKAGES]
    if not as_json:
        print(_machine_text(host), _packages_text(packages), sep="\n\n", end="\n\n", flush=True)
    devices, operators, failure = _through_torch()
    problems = find_problems(packages, failure)
    if as_json:
        found = {"can_train": not problems, "problems": problems, "machine": host}
        found |= {"packages": [asdict(finding) for finding in packages]}
        print(json.dumps({**found, "devices": devices, "operators": operators}))
    else:
        parts = (_devices_text(devices), _operators_text(operators), _verdict(host, devices, problems))
        print(*filter(None, parts), sep="\n\n")
    return 1 if problems else 0


def machine() -> dict[str, Any]:
    """Python, system, cores that this process may use, and memory and free disk in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": page * os.sysconf("SC_PHYS_PAGES"),
        "memory_free_bytes": page * os.sysconf("SC_AVPHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(".").free,
    }


def find(package: Package) -> Finding:
    """Look one package up without importing it."""
    version, reason = _version(package), ""
    if version is None:
        reason = "not installed"
    elif version == PLACEHOLDER:
        reason = "a placeholder without code, which pip takes on a Python older than 3.12"
    else:
        reason = _unfit(package, version)
    if not reason and package.needs_gpu and not _has_nvidia_device():
        reason = NO_DEVICE
    wanted = reason and reason != NO_DEVICE
    install = package.install_line() if wanted else ""
    return Finding(package.name, version, not reason, reason, package.use, package.required, install)


def find_problems(
    packages: Sequence[Finding], torch_failure: str = "", python: tuple[int, int] = sys.version_info[:2]
) -> list[str]:
    """What keeps k3train from training here, each with its remedy."""
    problems = []
    if python < (3, 12):
        problems.append(f"Python {python[0]}.{python[1]} is too old: install 3.12 or newer")
    for finding in packages:
        if finding.required and not finding.used:
            problems.append(f"{finding.name}: {finding.reason}: {finding.install}")
    if torch_failure and not any(problem.startswith("torch:") for problem in problems):
        problems.append(torch_failure)
    return problems


def _version(package: Package) -> str | None:
    """The installed version, "unknown" where a module has no metadata, None where there is neither."""
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        top = package.module.partition(".")[0]
        return "unknown" if importlib.util.find_spec(top) is not None else None


def _unfit(package: Package, version: str) -> str:
    """Why this version of the package cannot be used, or nothing."""
    if importlib.util.find_spec(package.module.partition(".")[0]) is None:
        return f"installed, but there is no module {package.module}"
    if package.name == "apex":
        return _unfit_apex()
    if version == "unknown":
        return ""
    if package.least and _numbers(version) < _numbers(package.least):
        return f"older than {package.least}"
    if package.below and _numbers(version) >= _numbers(package.below):
        return f"not older than {package.below}"
    return ""


def _unfit_apex() -> str:
    """Tell NVIDIA's apex from the other project of that name, which the package index has."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders):
        return "another project of that name, not NVIDIA's"
    return "" if importlib.util.find_spec("amp_C") else "built without its CUDA extensions"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _has_nvidia_device() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _through_torch() -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Devices, operators' backends, and why torch cannot be used."""
    try:
        import torch
        import torch.distributed as distributed
    except Exception as error:  # a broken native library raises nearly anything
        return [], [], f"torch: importing it failed: {error}".splitlines()[0]
    from k3train.ops.backends import report
    from offload.files.engine import report as engines
    from offload.tiers import report as tiers
    from parallel.moonep.plan.backends import report as planners

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(
            {"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability}
        )
    operators = [
        {"operator": op, "backend": backend, "available": available, "reason": reason}
        for op, backend, available, reason in [
            *report(),
            *(("moonep plan", *row) for row in planners()),
            *(("file engine", *row) for row in engines()),
            *(("offload tier", *row) for row in tiers()),
        ]
    ]
    gloo = distributed.is_available() and distributed.is_gloo_available()
    return (
        devices,
        operators,
        "" if gloo else "torch: built without gloo: install torch from the package index",
    )


def _machine_text(host: dict[str, Any]) -> str:
    memory, free, disk = (host[f"{kind}_bytes"] / GIB for kind in ("memory", "memory_free", "disk_free"))
    return (
        f"Python {host['python']} on {host['system']}\n"
        f"{host['cores']} cores, {memory:.1f} GiB of memory ({free:.1f} free), {disk:.1f} GiB of disk free"
    )


def _packages_text(packages: Sequence[Finding]) -> str:
    lines = []
    for finding in packages:
        state = "used" if finding.used else f"not used: {finding.reason}"
        lines.append(f"{finding.name:<24}{finding.version or '-':<16}{finding.use:<40}{state}")
        if finding.install:
            lines.append(f"{'':<24}{finding.install}")
    return "\n".join(lines)


def _devices_text(devices: Sequence[dict[str, Any]]) -> str:
    if not devices:
        return "no CUDA device: ranks run on the CPU and meet through gloo"
    return "\n".join(
        f"cuda:{index}  {device['name']}, {device['memory_bytes'] / GIB:.1f} GiB, sm {device['capability']}"
        for index, device in enumerate(devices)
    )


def _operators_text(operators: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"{entry['operator']:<16}{entry['backend']:<12}{'usable' if entry['available'] else entry['reason']}"
        for entry in operators
    )


def _verdict(host: dict[str, Any], devices: Sequence[object], problems: Sequence[str]) -> str:
    if problems:
        return "\n".join(["k3train cannot train here:", *(f"  {problem}" for problem in problems)])
    on = f"{len(devices)} GPUs" if devices else f"{host['cores']} CPU cores"
    return f"k3train can train here, on {on}"
