"""What the pages say is so: commands run or compose, and keys, recipes, files and links exist."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch import cli, doctor, reference
from launch.compose import ready
from launch.groups import groups
from launch.help import VERBS
from launch.multirun import plan_jobs
from launch.plan import OPTIONS as PLAN_OPTIONS
from launch.plan_search import OPTIONS as SEARCH_OPTIONS
from launch.rehearse import OPTIONS as REHEARSAL_OPTIONS
from launch.sample import OPTIONS
from launch.schema import keys, sections
from tests.dist.launch import free_port

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = ("conf", "launch", "k3train", "parallel", "offload", "tests", "docs", "benchmarks")
SMALL = ("data.max_bytes=200000", "data.sequence_length=64", "eval.batches=2")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The shell blocks of a page."""
    return [body for language, body in FENCE.findall(page.read_text()) if language == "sh"]


def commands(page: Path) -> list[str]:
    """Their lines."""
    return [line for block in blocks(page) for line in block.splitlines() if line.strip()]


def words(line: str) -> list[str]:
    """A command without its comment and redirection."""
    split = shlex.split(line, comments=True)
    return split[: split.index(">")] if ">" in split else split


def code_words(page: Path) -> list[str]:
    """The words of a page's inline code."""
    prose = FENCE.sub("", page.read_text())
    return [word.strip(",;") for span in re.findall(r"`([^`\n]+)`", prose) for word in span.split()]


def dry_run(line: str) -> str:
    """What a `make` line would do."""
    command = ["make", "--no-print-directory", "-n", "-C", str(ROOT), *words(line)[1:]]
    # `make test ARGS=...` hands its variables down to every make below it.
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
    }
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True, timeout=30).stdout


def run(command: list[str], home: Path) -> str:
    """Run a command in `home`; its standard output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "K3TRAIN_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def k3train(arguments: list[str], home: Path) -> str:
    return run([sys.executable, "-m", "launch.cli", *arguments], home)


def metrics(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "runs/tiny/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after the README's `make train`, of two small steps, and its `data prepare` lines."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "text").mkdir()
    (folder / "text/train.jsonl").write_text('{"text": "def f(): return 1"}\n' * 50)
    (folder / "text/valid.txt").write_text("def g(): return 2\n" * 20)
    (trained,) = [line for line in dry_run("make train").splitlines() if "k3train train" in line]
    k3train([*words(trained)[1:], "run.steps=2", *SMALL], folder)
    shutil.copytree(folder / "runs/tiny", folder / "runs/other")
    for line in commands(README):
        if line.startswith("k3train data prepare"):
            k3train(words(line)[1:], folder)
    return folder


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(home)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return home


def every_command() -> list[str]:
    return list(dict.fromkeys(line for page in PAGES for line in commands(page)))


def test_the_readme_opens_with_one_sentence_and_the_two_commands() -> None:
    title, sentence, block, *_ = re.split(r"\n\n", README.read_text())
    assert title == "# k3train"
    assert sentence.endswith(".") and sentence.count(". ") == 0
    assert block.splitlines() == ["```sh", "make train", "make test", "```"]


def test_the_shortened_run_leaves_what_the_readme_lists(home: Path) -> None:
    table = README.read_text().partition("## A run")[2].partition("```")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert {"config.yaml", "metrics.jsonl", "checkpoints/", "report.html"} <= set(listed)
    assert [name for name in listed if not (home / "runs/tiny" / name).exists()] == []
    last = metrics(home)[1]
    assert set(re.findall(r"`(\w+)`", table.partition("metrics.jsonl")[2].splitlines()[0])) <= last.keys()


def test_every_metric_is_explained(home: Path) -> None:
    explained = set(re.findall(r"`([^`]+)`", (ROOT / "docs/training.md").read_text()))
    written = {re.sub(r"/(layer_\d+|mtp)$", "/layer_N", name) for line in metrics(home) for name in line}
    assert len(written) > 15
    assert written - explained == {"step"}


def test_torchrun_continues_the_same_run(home: Path) -> None:
    (line,) = [line for line in commands(README) if line.startswith("torchrun --nproc")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    output = run([*launcher, *words(line)[1:], "run.steps=3", "run.resume=true", *SMALL], home)
    assert "step 2" in output
    assert [entry["step"] for entry in metrics(home)] == [1, 2, 3]


def test_sample_continues_the_prompt(home: Path) -> None:
    (line,) = [line for line in commands(README) if line.startswith("k3train sample")]
    assert k3train([*words(line)[1:], "tokens=3"], home).startswith("def ")


@pytest.mark.parametrize("line", every_command())
def test_command(line: str, at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = words(line)
    if program == "make":
        assert dry_run(line).strip()
    elif program == "python" and arguments[0].startswith("benchmarks/"):
        takes_its_options(arguments)
    elif program == "python" and "launch.train" not in arguments:
        runs_where_it_needs_no_service(arguments)
    elif program in ("torchrun", "python"):
        composes_under_torchrun(arguments)
    elif program == "tensorboard":
        assert Path(sys.executable).with_name(program).exists() and Path(arguments[-1]).is_dir()
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert arguments[-1].removeprefix(".[").removesuffix("]") in extras
    elif program == "git":
        assert line == doctor.APEX_INSTALL
    else:
        assert program == "k3train"
        runs_or_composes(arguments)
        silent = arguments[0] in ("train", "sample") or "--output" in arguments
        assert silent or capsys.readouterr().out


def runs_or_composes(arguments: list[str]) -> None:
    """Do what a `k3train` line says, short of training; sampling has a test of its own."""
    verb, *rest = arguments
    if verb == "train" and "-m" in rest:
        assert len(plan_jobs([word for word in rest if word != "-m"])) > 1
    elif verb == "train":
        ready(rest)
    elif verb == "sample":
        assert {word.partition("=")[0] for word in rest[1:]} <= OPTIONS.keys()
    else:
        # What takes a minute or two has a quick form.
        quick = ["--quick"] if verb == "bench" else []
        assert cli.main([*arguments, *quick]) == 0


def takes_its_options(arguments: list[str]) -> None:
    """A benchmark knows the options that it is shown with."""
    helped = run([sys.executable, str(ROOT / arguments[0]), "--help"], ROOT)
    assert [word for word in arguments if word.startswith("--") and word not in helped] == []


def runs_where_it_needs_no_service(arguments: list[str]) -> None:
    """A module of ours is there; what only prints is run."""
    assert arguments[0] == "-m" and find_spec(arguments[1]) is not None
    if "--json" in arguments:
        assert run([sys.executable, *arguments], ROOT)


def composes_under_torchrun(arguments: list[str]) -> None:
    """Compose what the ranks of a torchrun line would."""
    place = arguments.index("launch.train")
    options = dict(itertools.pairwise(arguments[:place]))
    ranks = int(options["--nproc-per-node"])
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": str(int(options.get("--nnodes", 1)) * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    try:
        ready([*arguments[place + 1 :], "run.name=composed"])
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


def test_every_recipe_is_in_the_table() -> None:
    table = README.read_text().partition("## Recipes")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == groups()["recipe"]


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / reference.TARGET).read_text() == reference.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    wrong = [word for word in code_words(page) if not names_something(word)]
    assert wrong == []


def names_something(word: str) -> bool:
    """Whether a key, an option of a group, or a file that `word` looks like exists."""
    key, equals, value = word.partition("=")
    if equals and re.fullmatch(r"[a-z_.]+", key):
        if key in groups():
            return value in groups()[key] or value.isupper()
        return (
            key in keys()
            or key in (*OPTIONS, *PLAN_OPTIONS, *SEARCH_OPTIONS, *REHEARSAL_OPTIONS)
            or is_free(key)
        )
    if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+", word) and word.partition(".")[0] in sections():
        return word in keys() or word in sections()
    if word.partition("/")[0] in ROOMS and "/" in word and "<" not in word:
        return (ROOT / word).exists()
    return not re.fullmatch(r"\w+\.py", word) or any(ROOT.glob(f"k3train/**/{word}"))


def is_free(key: str) -> bool:
    return any(key.startswith(f"{name}.") for name, entry in keys().items() if entry.is_mapping)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_targets_exist(page: Path) -> None:
    spans = re.findall(r"`(?:\S*/)?(k3train|make) ([a-z]+)", FENCE.sub("", page.read_text()))
    spans += [tuple(words(line)[:2]) for line in commands(page) if line.startswith(("k3train", "make"))]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    verbs = {verb.partition(" ")[0] for verb in VERBS}
    assert [name for program, name in spans if name not in (verbs if program == "k3train" else targets)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    broken = [link for link in links if not link.startswith("https://") and not resolves(page, link)]
    assert broken == []


def resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return False
    titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else []
    slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    return not anchor or anchor in slugs


WRONG = ("run.stepz=3", "recipe=tinny", "optim.rate", "k3train/modle", "nothing.py")
RIGHT = ("run.steps=3", "recipe=tiny", "optim.lr", "k3train/model", "decoder.py")


def test_the_checks_tell_right_from_wrong() -> None:
    assert [word for word in WRONG if names_something(word)] == []
    assert [word for word in RIGHT if not names_something(word)] == []
    assert not resolves(README, "docs/nowhere.md") and not resolves(README, "docs/model.md#nowhere")
    assert resolves(README, "docs/model.md#layers")
