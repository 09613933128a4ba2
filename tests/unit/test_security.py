"""Reads the tree: nothing evaluates text, asks a shell, or unpickles what it has not looked through."""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from launch import audit
from launch.audit import REVIEWED, main, normal, pins, reviewed_problems

ROOT = Path(__file__).parents[2]
PACKAGES = ("k3train", "parallel", "offload", "launch", "conf", "benchmarks")
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "yaml.full_load", "yaml.full_load_all", "pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load",
    "marshal.load", "marshal.loads", "shelve.open", "dill.load", "dill.loads", "cloudpickle.load",
    "cloudpickle.loads", "tempfile.mktemp", "hydra.utils.instantiate", "instantiate", "torch.hub.load",
    "torch.jit.load", "pandas.read_pickle",
}  # fmt: skip
WORDS = {"shell", "weights_only", "allow_pickle", "trust_remote_code"}
IMPORTS = {"dill", "cloudpickle", "joblib", "marshal", "shelve"}


def problems(source: str) -> list[str]:
    """What in a file's code runs text, or may unpickle anything."""
    return [f"line {node.lineno}: {what}" for node, what in _found(ast.parse(source))]


def _found(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            yield from ((node, f"imports {name}") for name in sorted(IMPORTS & names))
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in WORDS}
        if name in CALLS:
            yield node, f"calls {name}"
        if given.get("shell", "False") != "False":
            yield node, "asks a shell"
        if name == "torch.load" and given.get("weights_only") != "True":
            yield node, "torch.load without weights_only=True"
        if given.get("allow_pickle", "False") != "False":
            yield node, "allow_pickle"
        if name.endswith("add_safe_globals"):
            yield node, "widens what torch.load builds"
        if given.get("trust_remote_code", "False") != "False":
            yield node, "trusts remote code"


def _name(node: ast.expr) -> str:
    """As in `a.b.c`; `?.c` where it is no chain of names."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_no_file_runs_text() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 250
    found = {str(path.relative_to(ROOT)): problems(path.read_text()) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)", "exec(x)", "os.system(x)", "subprocess.run(x, shell=True)", "yaml.load(x, Loader=L)",
        "pickle.loads(x)", "torch.load(x)", "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        "hydra.utils.instantiate(x)", "import dill", "torch.serialization.add_safe_globals([x])",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_each_of_them_would_be_found(line: str) -> None:
    assert len(problems(line)) == 1


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the environment is not that of make install")
def test_every_installed_package_is_pinned_as_it_is() -> None:
    folder = sysconfig.get_path("purelib")
    installed = {normal(each.metadata["Name"]): each.version for each in distributions(path=[folder])}
    # What makes the environment, and the project itself.
    for name in ("pip", "setuptools", "wheel", "k3train"):
        installed.pop(name, None)
    pinned = pins()
    assert sorted(set(installed) - set(pinned)) == []
    assert {
        name: v for name, v in installed.items() if v.partition("+")[0] != pinned[name].partition("+")[0]
    } == {}


REFUSED_LICENCES = re.compile(r"AGPL|(?<!L)GPL|SSPL|Commons Clause|Non-?Commercial|BUSL", re.IGNORECASE)
REVIEWED_LICENCES = {"pyroute2"}
"""GPL or Apache-2.0, as one likes; comes with megatron-energon, for tests alone."""


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the environment is not that of make install")
def test_no_package_has_a_licence_that_binds_its_users() -> None:
    refused = []
    for each in distributions(path=[sysconfig.get_path("purelib")]):
        classifiers = [
            line for line in each.metadata.get_all("Classifier") or [] if line.startswith("License")
        ]
        text = " ".join([each.metadata.get("License-Expression") or "", *classifiers])
        if REFUSED_LICENCES.search(text) and normal(each.metadata["Name"]) not in REVIEWED_LICENCES:
            refused.append(f"{each.metadata['Name']}: {text}")
    assert refused == []


def test_no_pin_is_one_of_the_reviewed_vulnerabilities() -> None:
    pinned = pins()
    assert reviewed_problems(pinned) == []
    old = {each.package: "1.0.post1" for each in REVIEWED}
    assert len(reviewed_problems(old)) == len(REVIEWED)
    assert reviewed_problems({"torch": "2.5.1"})[0].startswith(
        "torch 2.5.1: CVE-2025-32434, torch.load ran code"
    )
    assert reviewed_problems({"torch": "2.10.0"}) == []


def test_a_line_that_pins_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("a==1.0\n# b\nc>=2\n")
    with pytest.raises(ValueError, match="'c>=2' is no exact version"):
        pins(tmp_path / "constraints.txt")


def _entries(vulnerable: bool = False, unknown: str | None = None) -> str:
    found = [{"id": "PYSEC-1", "fix_versions": ["9.9"], "aliases": [], "description": ""}] * vulnerable
    entries = [
        {"name": name, "skip_reason": "not found"}
        if name == unknown
        else {"name": name, "version": version, "vulns": found if name == "torch" else []}
        for name, version in pins().items()
    ]
    return json.dumps({"dependencies": entries, "fixes": []})


@pytest.mark.parametrize(
    ("answer", "status", "lenient", "said"),
    [
        (_entries(), 0, 0, "audited: "),
        (_entries(vulnerable=True), 1, 1, "vulnerable: torch "),
        (_entries(unknown="torch"), 3, 0, "NOT AUDITED: the service knows nothing of 1 of "),
        ("Traceback: no network", 3, 0, "NOT AUDITED: the service does not answer"),
        (None, 3, 0, "NOT AUDITED: pip-audit is not installed"),
    ],
    ids=["clean", "vulnerable", "unknown", "no network", "not installed"],
)
def test_what_was_not_audited_is_no_success(
    answer: str | None,
    status: int,
    lenient: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "answer").write_text(answer or "")
    (tmp_path / "pip-audit").write_text(f"#!/bin/sh\ncat '{tmp_path}/answer'\n")
    (tmp_path / "pip-audit").chmod(0o755)
    program = None if answer is None else str(tmp_path / "pip-audit")
    monkeypatch.setattr(audit.shutil, "which", lambda name, path=None: program)
    assert main([]) == status
    assert main(["--may-be-offline"]) == lenient
    assert capsys.readouterr().out.count(said) == 2
