"""Reads the tree: no import in the wrong direction, no torch where planning starts, nothing overlong."""

from __future__ import annotations

import ast
import fnmatch
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("k3train", "parallel", "offload", "launch", "conf")
MAY_IMPORT = {
    "launch": {"launch", "k3train", "parallel", "offload", "conf"},
    "k3train": {"k3train", "parallel", "offload"},
    "parallel": {"parallel"},
    "offload": {"offload"},
    "conf": {"conf"},
}
HEAVY = {"torch", "megatron", "triton", "transformer_engine", "fla"}
# What answers in about a second: it may not reach a heavy import, not through another file either.
TORCH_FREE = (
    "conf", "k3train/config.py", "k3train/config_file.py", "k3train/compatibility.py", "k3train/errors.py",
    "k3train/flops.py", "k3train/layout.py", "k3train/plan.py", "k3train/search.py", "k3train/shapes.py",
    "k3train/step_time.py", "k3train/validate.py", "parallel/topology.py", "launch/checkpoint.py",
    "launch/cli.py", "launch/compose.py", "launch/doctor.py", "launch/groups.py", "launch/help.py",
    "launch/kubernetes.py", "launch/overrides.py", "launch/plan.py", "launch/plan_search.py",
    "launch/reference.py", "launch/rehearse.py",
    "launch/schema.py", "launch/slurm.py", "launch/train.py",
)  # fmt: skip
LONGEST_FILE = 600
LONGEST_FUNCTION = 80


def python_files(root: Path, packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    return sorted(path for package in packages for path in (root / package).rglob("*.py"))


def imports(path: Path, root: Path, *, at_load: bool = False) -> Iterator[tuple[int, str, str]]:
    """(line, module as it is written, module as it is called from outside) for each import.

    `at_load` leaves out what is imported inside a function, or for type checkers alone.
    """
    package = path.relative_to(root).parent.parts
    for node in _nodes(ast.parse(path.read_text()), at_load):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            written = "." * node.level + (node.module or "")
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, written, f"{module}.{alias.name}".lstrip(".")


def _nodes(tree: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_load and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _nodes(node, at_load)


def wrong_arrows(root: Path) -> list[str]:
    """Imports against the direction of the packages, and absolute ones inside a package."""
    found = []
    for path in python_files(root):
        name = path.relative_to(root)
        for line, written, module in imports(path, root):
            target = module.partition(".")[0]
            if target == "tests" or (target in PACKAGES and target not in MAY_IMPORT[name.parts[0]]):
                found.append(f"{name}:{line}: {name.parts[0]} may not import {target}")
            elif target == name.parts[0] and not written.startswith("."):
                found.append(f"{name}:{line}: {written} is imported by its full name inside {target}")
    return found


def heavy_chains(root: Path, entry: str) -> list[str]:
    """How loading `entry`, a file or a folder, comes to load torch: one chain of files for each way found."""
    start = root / entry
    files = sorted(start.rglob("*.py")) if start.is_dir() else [start]
    queue = [(path, str(path.relative_to(root))) for path in files]
    seen, found = set(files), []
    while queue:
        path, chain = queue.pop(0)
        for line, _, module in imports(path, root, at_load=True):
            if module.partition(".")[0] in HEAVY:
                found.append(f"{chain}:{line} -> {module.partition('.')[0]}")
            for target in _loaded_files(module, root):
                if target not in seen:
                    seen.add(target)
                    queue.append((target, f"{chain}:{line} -> {target.relative_to(root)}"))
    return found


def _loaded_files(module: str, root: Path) -> list[Path]:
    """The files of this tree that importing `module` runs, the packages around it included."""
    parts, loaded = module.split("."), []
    if parts[0] not in PACKAGES:
        return []
    for length in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:length])
        loaded += [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
    return loaded


def oversized(root: Path, packages: tuple[str, ...]) -> list[str]:
    """Files and functions that are too long, with their lengths."""
    found = []
    for path in python_files(root, packages):
        text, name = path.read_text(), path.relative_to(root)
        if (lines := len(text.splitlines())) > LONGEST_FILE:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                    found.append(f"{name}:{node.lineno}: {node.name} has {lines} lines")
    return found


def test_packages_import_in_one_direction() -> None:
    assert wrong_arrows(ROOT) == []


@pytest.mark.parametrize("entry", TORCH_FREE)
def test_planning_loads_no_torch(entry: str) -> None:
    assert (ROOT / entry).exists()
    assert heavy_chains(ROOT, entry) == []


def test_files_and_functions_are_short() -> None:
    assert oversized(ROOT, (*PACKAGES, "tests", "benchmarks")) == []


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A small tree that breaks every rule once."""
    sources = {
        "parallel/topology.py": "def size() -> int:\n    from k3train.config import Config\n",
        "parallel/groups.py": "import offload.manager\nfrom . import topology\n",
        "offload/manager.py": "from tests.conftest import fixture\n",
        "k3train/config.py": "import launch\nimport k3train.shapes\n",
        "k3train/shapes.py": "from .flops import cost\n",
        "k3train/flops.py": "import os, torch.nn as nn\ncost = 1\n",
        "k3train/lazy.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def run() -> None:\n    import torch\n",
        "k3train/long.py": "def long() -> None:\n"
        + "    pass\n" * LONGEST_FUNCTION
        + "x = 1\n" * LONGEST_FILE,
        "k3train/ops/__init__.py": "import triton\n",
        "k3train/ops/light.py": "from ..lazy import run\n",
        "launch/cli.py": "from k3train.ops import light\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_planted_arrows_are_found(planted: Path) -> None:
    assert wrong_arrows(planted) == [
        "k3train/config.py:1: k3train may not import launch",
        "k3train/config.py:2: k3train.shapes is imported by its full name inside k3train",
        "offload/manager.py:1: offload may not import tests",
        "parallel/groups.py:1: parallel may not import offload",
        "parallel/topology.py:2: parallel may not import k3train",
    ]


def test_planted_torch_is_found_behind_other_files(planted: Path) -> None:
    assert heavy_chains(planted, "k3train/shapes.py") == [
        "k3train/shapes.py:1 -> k3train/flops.py:1 -> torch"
    ]
    assert heavy_chains(planted, "launch/cli.py") == [
        "launch/cli.py:1 -> k3train/ops/__init__.py:1 -> triton"
    ]
    assert heavy_chains(planted, "k3train/lazy.py") == []


def test_planted_lengths_are_found(planted: Path) -> None:
    assert oversized(planted, PACKAGES) == [
        f"k3train/long.py: {1 + LONGEST_FUNCTION + LONGEST_FILE} lines",
        f"k3train/long.py:1: long has {1 + LONGEST_FUNCTION} lines",
    ]


def test_no_tool_passes_over_a_folder_of_tests() -> None:
    """pytest and ruff leave out every folder named dist by default, and so the tests of real processes."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    patterns = [*tools["pytest"]["ini_options"]["norecursedirs"], *tools["ruff"]["exclude"]]
    folders = [path.name for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()]
    assert "dist" in folders
    assert [name for name in folders for pattern in patterns if fnmatch.fnmatch(name, pattern)] == []
