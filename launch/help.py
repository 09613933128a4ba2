"""The texts of `--help`. Imports neither Hydra nor torch, so that they appear at once."""

from __future__ import annotations

import textwrap

from .groups import groups, policies, summary
from .schema import keys

VERBS = {
    "train": "train a recipe, on as many ranks of this machine as its layout needs",
    "plan": "parameters, memory, traffic and step time of a configuration, without running it",
    "bench": "measure this machine for the plan: operators, layers, collectives",
    "doctor": "what is installed here, what is used, and why not",
    "data prepare": "turn .jsonl, .txt and .parquet files into training data",
    "data longmix": "make long samples of documents and of tasks that need evidence from all over them",
    "convert": "import released weights, export trained ones, verify either",
    "data show": "print samples, with what is learnt in colour",
    "sample": "continue text or answer in a chat, from a checkpoint",
    "eval": "does a model read across its window? Answers by depth of their evidence",
    "report": "write a run's curves, or several runs' over each other, as one HTML page",
    "checkpoint": "list, verify and prune what a run has saved",
    "launch": "write a Slurm job or a Kubernetes manifest for a configuration",
}

USAGE = {
    "train": "k3train train [-m] [OVERRIDE...]\n\n"
    "  -m, --multirun   one run after another over lists and ranges: optim.lr=1e-3,2e-3 run.seed=range(0,3)",
    "plan": "k3train plan [--json] [out=FOLDER] [costs=entry|uniform] [costs.from=RUN] [schedule=NAME] "
    "[costs.tiers=FILE] [images=COUNTxROWSxCOLUMNS] [stage=NAME] [OVERRIDE...]\n\n"
    "  --json           one JSON object on standard output\n"
    "  out=FOLDER       write plan.html and the pipeline's timeline: timeline.svg, .png, .html, .trace.json\n"
    "  costs=uniform    each chunk's forward takes 1 and its backward 2, not what the hardware entry says\n"
    "  costs.from=RUN   what operations took in a run, from its timeline.json\n"
    "  costs.tiers=FILE bandwidths of host, peer and disk, from benchmarks/offload_tiers.py --json FILE\n"
    "  schedule=NAME    look at another order: gpipe, 1f1b, interleaved, zb1p, zbh2, zbv\n"
    "  images=4x64x48   the images of every micro-batch: here four of 64 x 48 patches\n"
    "  stage=NAME       one stage of a run in stages, of which the plan else has a line each\n\n"
    "k3train plan --rehearse [--json] [rank=N | ranks=all | ranks=0,8-15] [stage=NAME] [OVERRIDE...]\n\n"
    "  --rehearse       build what ranks of the run would have, without values and GPUs, and compare it\n"
    "                   among them and with the plan: the groups of all ranks, the first and the last\n"
    "                   rank of each pipeline stage\n\n"
    "k3train plan search [cluster.gpus=N] [--top 10] [--json] [batch=TOKENS] [out=FOLDER] [OVERRIDE...]\n\n"
    "  cluster.gpus=N   find the best layouts of so many GPUs within their memory; what is set of a layout,\n"
    "                   such as parallel.pipeline=8, stays\n"
    "  --top N          how many are shown, and with --json listed\n"
    "  batch=TOKENS     of a step; the recipe's own on its own layout when left out\n"
    "  out=FOLDER       write search.html: memory over time of all that was planned, and the best",
    "bench": "k3train bench calibrate [--quick] [--json] [out=FILE] [ranks=COUNT] [steps=COUNT] "
    "[OVERRIDE...]\n\n"
    "  out=FILE         where it goes (calibration.json); shapes measured before stay in it\n"
    "  ranks=COUNT      ranks of this machine that work at once; those of the configuration when left out\n"
    "  steps=COUNT      measured training steps\n"
    "  then             k3train plan cluster.calibration=FILE OVERRIDE...",
    "doctor": "k3train doctor [--json]\n"
    "k3train doctor --health [folder=PATH] [--json]\n\n"
    "  --health         try this machine out: GPUs, disk, clocks and the network among its ranks; ends with\n"
    "                   status 4 if one is unfit. On several: torchrun ... -m launch.health --folder PATH\n"
    "  folder=PATH      where a file of 8 MiB is written and removed: the disk of the checkpoints",
    "sample": 'k3train sample RUN prompt="def " [tokens=200] [temperature=0.8] [top_p=0.95] [seed=0]\n'
    '       k3train sample RUN chat="2+3?" [system=TEXT] [effort=low|medium|high|max] [the same]\n\n'
    '  chat=TEXT        what a user says, or a whole chat as JSON: {"messages": [..], "tools": [..]}',
    "eval": "k3train eval needle RUN [lengths=128,1024] [samples=64]\n"
    "       k3train eval longmix RUN PREFIX [samples=COUNT]\n\n"
    "  needle           codes in held-out text, at the stages' lengths, else 1, 2, 4 and 8 times the run's\n"
    "  longmix          the tasks of a corpus that `k3train data longmix` made",
    "report": "k3train report RUN\n"
    "k3train report RUN RUN... [out=FILE]\n\n"
    "  one RUN          its page is RUN/report.html\n"
    "  several          one page with curves over each other, results, keys that differ, events; at most 8\n"
    "  out=FILE         where that page goes (comparison.html)",
    "launch": "k3train launch slurm|kubernetes [--output FILE] [OVERRIDE...]\n\n"
    "  --output FILE    write the job there instead of to standard output",
}

TAKES_OVERRIDES = ("train", "plan", "bench", "launch")

COMMON = (
    "run.dir", "run.steps", "run.seed", "run.microbatches", "run.resume", "checkpoint.every",
    "parallel.pipeline", "parallel.virtual", "parallel.expert.size", "parallel.context", "parallel.data",
    "parallel.zero", "offload.policy", "offload.budget_gb",
    "optim.lr", "log.wandb",
)  # fmt: skip


def general() -> str:
    """`k3train --help`."""
    verbs = "\n".join(f"  {verb:<14}{line}" for verb, line in VERBS.items())
    return (
        "usage: k3train VERB [OVERRIDE...]\n\n"
        f"{verbs}\n\n{overrides()}\n\n"
        "k3train VERB --help says more; --version prints the version.\n"
        "exit status: 0 done; 75 stopped and saved; 2 refused configuration or input; 3 diverged; 124 hung;\n"
        "1 anything else (docs/launch.md has all)"
    )


def verb(name: str) -> str:
    """`k3train VERB --help`."""
    if name == "data":
        from .data import help_text

        return help_text()
    if name == "checkpoint":
        from .checkpoint import help_text as of_checkpoint

        return of_checkpoint()
    if name == "convert":
        from .convert import parsers

        return "\n\n".join(each.format_help().rstrip() for each in parsers())
    text = f"usage: {USAGE[name]}\n\n{VERBS[name]}"
    return f"{text}\n\n{overrides()}" if name in TAKES_OVERRIDES else text


def overrides() -> str:
    """The recipes, the groups and the keys that are set most."""
    recipes = "\n".join(
        textwrap.fill(
            summary("recipe", name), 108, initial_indent=f"  {name:<18}", subsequent_indent=" " * 20
        )
        for name in groups()["recipe"]
    )
    options = "\n".join(
        f"  {name:<12}{', '.join(values)}" for name, values in groups().items() if name != "recipe"
    )
    options += f"\n  {'offload.policy':<16}{', '.join(policies())}"
    common = "\n".join(_described(name) for name in COMMON)
    return (
        f"recipes (recipe=NAME)\n{recipes}\n\ngroups (GROUP=NAME)\n{options}\n\n"
        f"keys set most (KEY=VALUE; all are in docs/configuration.md)\n{common}"
    )


def _described(name: str) -> str:
    key = keys()[name]
    default = "derived" if key.default is None else str(key.default)
    default = default.lower() if isinstance(key.default, bool) else default
    meaning = key.meaning or f"expects {key.expected}"
    return textwrap.fill(
        meaning, 108, initial_indent=f"  {name + '=' + default:<32}", subsequent_indent=" " * 34
    )
