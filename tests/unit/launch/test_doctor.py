"""What `k3train doctor` says about packages that are there, missing, wrong or only share a name."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from k3train.errors import UserError
from launch import doctor

ROOT = Path(__file__).parents[3]
BY_NAME = {package.name: package for package in doctor.PACKAGES}


def installed(folder: Path, name: str, version: str, *files: str) -> None:
    """Lay down a distribution's metadata and empty modules."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_table_agrees_with_the_package_s_own_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {requirement.name: requirement for requirement in map(Requirement, project["dependencies"])}
    assert {package.name for package in doctor.PACKAGES if package.required} == set(required)
    for name, requirement in required.items():
        package = BY_NAME[name]
        assert bool(requirement.specifier) == bool(package.least), name
        if package.least:
            assert requirement.specifier.contains(package.least), name
        if package.below:
            assert not requirement.specifier.contains(f"{package.below}.0"), name
    extras = project["optional-dependencies"]
    optional = {Requirement(line).name for line in [*extras["gpu"], *extras["nvme"], *extras["energon"]]}
    assert {package.name for package in doctor.PACKAGES if not package.required} == optional | {
        "triton",
        "apex",
    }


def test_installed_package_is_used_in_its_version() -> None:
    finding = doctor.find(BY_NAME["megatron-core"])
    assert finding.used and not finding.reason and not finding.install
    assert finding.version == importlib.metadata.version("megatron-core")


def test_missing_package_names_its_install_line() -> None:
    package = dataclasses.replace(BY_NAME["hydra-core"], name="no-such-package", module="no_such_package")
    finding = doctor.find(package)
    assert (finding.version, finding.used, finding.reason) == (None, False, "not installed")
    assert finding.install == "pip install 'no-such-package>=1.3,<1.4'"
    assert doctor.find_problems([finding]) == [f"no-such-package: not installed: {finding.install}"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.9.1", "older than 2.11"),
        ("2.11", ""),
        ("2.11.0+cu130", ""),
        ("3.0", "not older than 3"),
        ("999.9.9", "a placeholder without code, which pip takes on a Python older than 3.12"),
    ],
)
def test_version_decides(site: Path, version: str, reason: str) -> None:
    installed(site, "fake-torch", version, "fake_torch/__init__.py")
    finding = doctor.find(doctor.Package("fake-torch", "fake_torch", "", least="2.11", below="3"))
    assert (finding.version, finding.reason, finding.used) == (version, reason, not reason)


def test_metadata_without_a_module_is_not_used(site: Path) -> None:
    installed(site, "hollow", "1.0")
    assert (
        doctor.find(doctor.Package("hollow", "hollow", "")).reason
        == "installed, but there is no module hollow"
    )


def test_the_other_apex_is_told_from_nvidia_s(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_nvidia_device", lambda: True)
    installed(site, "apex", "0.9.10.dev0", "apex/__init__.py")
    finding = doctor.find(BY_NAME["apex"])
    assert finding.reason == "another project of that name, not NVIDIA's"
    assert "github.com/NVIDIA/apex" in finding.install
    (site / "apex/multi_tensor_apply").mkdir()
    assert doctor.find(BY_NAME["apex"]).reason == "built without its CUDA extensions"
    (site / "amp_C.py").touch()
    assert doctor.find(BY_NAME["apex"]).used


def test_gpu_package_without_a_gpu_is_no_problem(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(site, "flash-linear-attention", "0.4.0", "fla/__init__.py")
    monkeypatch.setattr(doctor, "_has_nvidia_device", lambda: False)
    finding = doctor.find(BY_NAME["flash-linear-attention"])
    assert (finding.reason, finding.install) == ("no NVIDIA device", "")
    assert doctor.find_problems([finding]) == []
    monkeypatch.setattr(doctor, "_has_nvidia_device", lambda: True)
    assert doctor.find(BY_NAME["flash-linear-attention"]).used


def test_deepspeed_is_used_where_it_is_installed(site: Path) -> None:
    missing = doctor.find(BY_NAME["deepspeed"])
    assert (missing.reason, missing.install) == ("not installed", "pip install 'deepspeed'")
    installed(site, "deepspeed", "0.19.8", "deepspeed/__init__.py")
    assert doctor.find(BY_NAME["deepspeed"]).used
    assert doctor.find_problems([missing]) == []


def test_old_python_and_broken_torch_are_problems() -> None:
    assert doctor.find_problems([], python=(3, 11)) == ["Python 3.11 is too old: install 3.12 or newer"]
    assert doctor.find_problems([], "torch: importing it failed: x") == ["torch: importing it failed: x"]


def test_json_holds_everything_and_the_exit_status_follows_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from launch.doctor import main; sys.exit(main(['--json']))"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["can_train"] is (done.returncode == 0) is (not found["problems"])
    assert [entry["name"] for entry in found["packages"]] == list(BY_NAME)
    assert found["machine"]["memory_bytes"] > found["machine"]["memory_free_bytes"] > 0
    usable = {entry["operator"] for entry in found["operators"] if entry["available"]}
    assert usable == {
        "kda", "short_conv", "attn_res", "situ", "attention", "linear", "item_attention", "grouped",
        "mx", "mx_products", "cross_entropy", "moonep plan", "file engine", "offload tier",
    }  # fmt: skip


def test_text_appears_before_torch_and_says_why_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed_before_torch = []

    def no_torch() -> tuple[list[object], list[object], str]:
        printed_before_torch.append(capsys.readouterr().out)
        return [], [], "torch: importing it failed: libcudart.so is missing"

    monkeypatch.setattr(doctor, "_through_torch", no_torch)
    assert doctor.main([]) == 1
    assert "megatron-core" in printed_before_torch[0]
    assert (
        "k3train cannot train here:\n  torch: importing it failed: libcudart.so is missing"
        in capsys.readouterr().out
    )


def test_unknown_option_is_refused() -> None:
    with pytest.raises(UserError, match="--jsn"):
        doctor.main(["--jsn"])
