"""Known vulnerabilities of the pinned packages: `make audit`, or `python -m launch.audit [--may-be-offline]`.

First against a short reviewed list, which needs no network; then by pip-audit, where that is installed and
its service answers for every package. What was not looked up is said, and is no success by itself: pip-audit
ends with 0 for packages that its service does not know.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 3
TIMEOUT = 300


class Advisory(NamedTuple):
    """A vulnerability on a path of ours, and the first release without it."""

    package: str
    fixed: str
    name: str
    why: str


REVIEWED = (
    Advisory("torch", "2.6.0", "CVE-2025-32434", "torch.load ran code in spite of weights_only=True"),
    Advisory("torch", "2.10.0", "CVE-2026-24747", "torch.load wrote out of bounds with weights_only=True"),
    Advisory("pyarrow", "14.0.1", "CVE-2023-47248", "reading a Parquet file ran code"),
    Advisory("pyyaml", "5.4", "CVE-2020-14343", "full_load ran code"),
    Advisory("pillow", "10.3.0", "CVE-2024-28219", "a buffer overflow in colour management of images"),
    Advisory("setuptools", "78.1.1", "CVE-2025-47273", "a package index could write outside the folder"),
    Advisory("requests", "2.32.4", "CVE-2024-47081", "passwords of .netrc went to another host"),
    Advisory("urllib3", "2.5.0", "CVE-2025-50181", "redirects were followed where they were turned off"),
    Advisory("jinja2", "3.1.6", "CVE-2025-27516", "templates got out of their sandbox"),
    Advisory("protobuf", "6.31.1", "CVE-2025-4565", "nested messages without end"),
    Advisory("protobuf", "6.33.5", "CVE-2026-0994", "nested messages in JSON without end"),
    Advisory("werkzeug", "3.0.6", "CVE-2024-49767", "uploads without end"),
)
"""Checked by hand; a source for each is the entry of its name at the CVE programme."""


def pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Normalised name -> version of each line; raises ValueError for a line that is no exact version."""
    found = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)", text)
        if text and not match:
            raise ValueError(f"{path.name}: {text!r} is no exact version")
        if match:
            found[normal(match[1])] = match[2]
    return found


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def reviewed_problems(pinned: Mapping[str, str]) -> list[str]:
    """What of the reviewed list a set of versions has."""
    return [
        f"{each.package} {pinned[each.package]}: {each.name}, {each.why}; fixed in {each.fixed}"
        for each in REVIEWED
        if each.package in pinned and _release(pinned[each.package]) < _release(each.fixed)
    ]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release; a pre-release counts as the release."""
    leading = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in leading[1].split(".")) if leading else ()


def look_up(pinned: Mapping[str, str], path: Path = CONSTRAINTS) -> tuple[list[str], list[str]]:
    """Vulnerabilities that pip-audit finds, and why something was not looked up."""
    program = shutil.which("pip-audit", path=f"{Path(sys.executable).parent}") or shutil.which("pip-audit")
    if program is None:
        return [], ["pip-audit is not installed"]
    options = ["--format=json", "--no-deps", "--disable-pip", "--progress-spinner=off", "-r", str(path)]
    try:
        done = subprocess.run(
            [program, *options], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        return [], [f"the service does not answer ({type(error).__name__})"]
    entries = answer["dependencies"]
    found = [_shown(entry, each) for entry in entries for each in entry.get("vulns", [])]
    looked_up = {normal(entry["name"]) for entry in entries if "skip_reason" not in entry}
    absent = sorted(set(pinned) - looked_up)
    missing = (
        [f"the service knows nothing of {len(absent)} of {len(pinned)} packages, as {absent[0]}"]
        if absent
        else []
    )
    return found, missing


def _shown(entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    fixed = ", ".join(found["fix_versions"]) or "no release"
    return f"{entry['name']} {entry['version']}: {found['id']}; fixed in {fixed}"


def main(arguments: Sequence[str]) -> int:
    """0 all looked up and none found, 1 some found, 3 not all looked up."""
    parser = argparse.ArgumentParser(prog="launch.audit", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--may-be-offline",
        action="store_true",
        help="end with 0 where nothing was found but not all looked up",
    )
    options = parser.parse_args(list(arguments))
    pinned = pins()
    found, missing = look_up(pinned)
    found = [*reviewed_problems(pinned), *found]
    for text in found:
        print(f"vulnerable: {text}")
    for text in missing:
        print(f"NOT AUDITED: {text}; only the {len(REVIEWED)} reviewed advisories were looked at")
    if not found and not missing:
        print(f"audited: {len(pinned)} packages, no known vulnerability")
    if found:
        return VULNERABLE
    return NOT_AUDITED if missing and not options.may_be_offline else CLEAN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
