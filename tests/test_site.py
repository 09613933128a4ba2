"""The documentation as a site: every page has its place, examples run, messages and flags are real."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3train.compatibility import FEATURES
from launch import cli, pages, pictures, site_hooks
from launch.groups import groups
from launch.help import VERBS
from launch.schema import keys
from tests.test_readme import FENCE, words

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PACKAGES = ("k3train", "parallel", "offload", "launch")
NOT_RUN = "<!-- not run -->\n"
"""Stands above a Python block that is no part of its page's program."""
ENOUGH = 12
"""Characters of a message that must stand in the source in one piece."""
LANGUAGES = {"sh", "console", "text", "python", "json", "yaml", "bash", ""}


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose slugs are made by a function that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # type: ignore[no-any-return]


def navigation(entry: Any) -> list[str]:
    """The pages below an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in navigation(child)]


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in a language, but those that are marked as not run."""
    text = page.read_text()
    return [
        match[2]
        for match in FENCE.finditer(text)
        if match[1] == language and not text[: match.start()].endswith(NOT_RUN)
    ]


def test_every_page_is_in_the_navigation_once() -> None:
    found = navigation(settings()["nav"])
    assert sorted(found) == [page.name for page in PAGES]
    assert list(settings()["nav"][0].values()) == ["index.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title_and_lists_that_every_renderer_sees(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    assert len(re.findall(r"^# .+", prose, re.MULTILINE)) == 1
    assert {match[1] for match in FENCE.finditer(page.read_text())} <= LANGUAGES
    for before, line in itertools.pairwise(["", *prose.splitlines()]):
        item = re.match(r"(- |\d+\. |\|)", line)
        if item and before.strip() and not before.startswith((" ", "|", "-")):
            assert re.match(r"\d+\. ", before), f"no blank line above {line!r}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if fenced(page, "python")], ids=lambda page: page.name
)
def test_python_blocks_run_as_one_program(page: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(fenced(page, "python"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def sessions() -> list[tuple[str, str]]:
    """(command, what it answers) of the console blocks of all pages."""
    blocks = [block for page in PAGES for block in fenced(page, "console")]
    pairs = [part.partition("\n") for block in blocks for part in block.split("$ ")[1:]]
    return [(command, answer.strip()) for command, _, answer in pairs]


@pytest.mark.parametrize(("line", "answer"), sessions())
def test_a_refusal_is_told_as_the_page_says(
    line: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    program, *arguments = words(line)
    assert program == "k3train"
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.strip() == answer


def messages() -> list[str]:
    return [line for block in fenced(DOCS / "troubleshooting.md", "text") for line in block.splitlines()]


@cache
def literals() -> list[str]:
    """Every string of the source, `…` where a value goes."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [
        text for path in files for node in ast.walk(ast.parse(path.read_text())) if (text := literal(node))
    ]


def literal(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def unknown_pieces(message: str) -> list[str]:
    """Pieces of a message, between its `…`, that no string of the source has."""
    pieces = [piece.strip(" ;:,=") for piece in message.split("…")]
    return [
        piece for piece in pieces if len(piece) >= ENOUGH and not any(piece in text for text in literals())
    ]


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_one_of_ours(message: str) -> None:
    assert max(map(len, message.split("…"))) >= ENOUGH
    assert unknown_pieces(message) == []


def test_messages_that_nobody_writes_are_found() -> None:
    assert unknown_pieces("run.steps=…: the moon is not in the right house; wait for it") != []


def migration() -> list[tuple[str, str]]:
    """(flags, what takes their place) of the tables of the migration page."""
    rows = re.findall(r"^\| (`--.+?) \| (.+?) \|", (DOCS / "migration.md").read_text(), re.MULTILINE)
    return [(flags, place) for flags, place in rows]


def test_each_flag_of_megatron_has_a_key_or_a_word_in_its_place() -> None:
    rows = migration()
    named = [name for flags, _ in rows for name in re.findall(r"`(--[a-z0-9-]+)`", flags)]
    assert len(named) > 80
    assert len(set(named)) == len(named)
    for flags, place in rows:
        found = re.findall(r"`([^`]+)`", place)
        assert place in ("always", "no") or found, flags
        assert [key for key in found if key not in keys()] == [], flags


def test_megatron_has_the_flags() -> None:
    program = (
        "from parallel.cpu import enable_cpu; enable_cpu()\n"
        "import argparse\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "add_megatron_arguments(parser)\n"
        "print(*parser._option_string_actions)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    known = set(done.stdout.split())
    named = {name for flags, _ in migration() for name in re.findall(r"`(--[a-z0-9-]+)`", flags)}
    assert named - known == set()


def test_pictures_are_drawings_for_light_and_dark() -> None:
    drawn = pictures.pictures()
    used = {name for page in PAGES for name in re.findall(r"\]\(pictures/([\w.-]+)\)", page.read_text())}
    assert used == drawn.keys()
    for name, text in drawn.items():
        assert (DOCS / "pictures" / name).is_file()
        assert ElementTree.fromstring(text).tag.endswith("svg"), name
        assert "prefers-color-scheme" in text and len(text) < 200_000, name


def test_a_bar_of_the_ledger_is_as_high_as_its_bytes() -> None:
    text = pictures.bars([{"parameters": 6 * 2**30, "gradients": 2 * 2**30}], 16 * 2**30)
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"><title>', text)]
    assert sum(heights) == pytest.approx(pictures.HEIGHT * 8 / 16, abs=0.2)
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.2)


def test_generated_pages_have_every_recipe_and_verb() -> None:
    titles = re.findall(r"^## (\w+)$", pages.recipes(), re.MULTILINE)
    assert titles == groups()["recipe"]
    assert "| 2.78T | 104B | 93 | 1024 | PP8 x VPP2 x EP128 x DP128 |" in pages.recipes()
    assert [verb for verb in VERBS if f"| `k3train {verb}` |" not in pages.commands()] == []


def test_links_that_leave_the_folder_lead_to_pages_of_the_site() -> None:
    text = "see [the test](../tests/test_site.py#L3), [a page](model.md) and [the launcher](../launch/cli.py)"

    class Page:
        class file:
            src_uri = "index.md"

    inside = site_hooks.on_page_markdown(text, page=Page, config=None, files=None)
    assert inside == (
        "see [the test](source/tests.test_site.py.md), [a page](model.md) "
        "and [the launcher](source/launch.cli.py.md)"
    )
    assert "def main(" in site_hooks.shown("launch/cli.py")
    linked = {path for page in PAGES for path in site_hooks.outside(page)}
    assert len(linked) > 30
    assert [path for path in linked if not (ROOT / path).exists()] == []


def test_a_capability_ends_with_its_pairs() -> None:
    text = site_hooks.pairs(("Muon", "QAT"))
    assert "| **ZeRO-1** | no: a shard of a matrix cannot be orthogonalised" in text
    assert "| **vision** | yes | yes |" in text and "| **Muon** | - | yes |" in text
    named = [name for features in site_hooks.CAPABILITIES.values() for name in features]
    assert [name for name in named if name not in {feature.name for feature in FEATURES}] == []
    assert [page for page in site_hooks.CAPABILITIES if not (DOCS / page).is_file()] == []


def test_every_capability_says_what_works_with_what() -> None:
    (listed,) = [entry["Capabilities"] for entry in settings()["nav"] if "Capabilities" in entry]
    assert len(listed) > 12
    for name in [*navigation(listed), "pipeline.md"]:
        text = (DOCS / name).read_text()
        assert re.search(r"#what-works-with-what\)|^## (What works with what|Works with)$", text, re.M), name
        assert re.search(r"^\|.*\|\n\|[-|: ]+\|\n", text, re.MULTILINE), name
