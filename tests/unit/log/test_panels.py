import re
from pathlib import Path

from k3train.log.panels import PANELS, as_regex, natural_key, sections

ROOT = Path(__file__).parents[3]


def panel(title):
    return next(panel for panel in PANELS if panel.title == title)


def test_the_loss_panel_takes_its_metrics_in_its_own_order():
    assert panel("Loss").select(["val_loss", "lr", "loss", "closs"]) == ["loss", "val_loss"]


def test_layers_come_in_the_order_of_their_numbers():
    prefix = "moe/expert_load_max_over_mean/layer_"
    names = [f"{prefix}{number}" for number in (10, 2, 9)]
    others = ["moe/expert_load_max_over_mean/layer_2/extra", "moe/unbiased_load_max_over_mean/layer_3"]
    chosen = panel("Expert load after balancing").select([*names, *others])
    assert chosen == [f"{prefix}{number}" for number in (2, 9, 10)]


def test_natural_order_mixes_numbers_and_words():
    assert sorted(["b2", "b10", "a", "b"], key=natural_key) == ["a", "b", "b2", "b10"]


def test_every_metric_stands_on_one_panel_only():
    patterns = [pattern for panel in PANELS for pattern in panel.metrics]
    assert len(patterns) == len(set(patterns))
    assert sum(len(panels) for panels in sections().values()) == len(PANELS)


def documented():
    """Names in the tables of metrics, with a layer for `layer_N`."""
    names = []
    for page, prefix in (("training", ""), ("moonep", "moonep/")):
        part = (ROOT / f"docs/{page}.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
        cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        names += [prefix + name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [name.replace("layer_N", "layer_7") for name in names if not name.endswith(("...", "/_after"))]


def test_every_documented_metric_has_a_panel():
    names = documented()
    assert len(names) > 30
    words = {"stage", "stage_number"}
    without = [name for name in names if name not in words and not any(p.select([name]) for p in PANELS)]
    assert without == []


def test_a_star_is_read_alike_by_tensorboard_and_wandb():
    for pattern in (pattern for panel in PANELS for pattern in panel.metrics):
        # wandb takes a star at the end alone; TensorBoard gets the regular expression.
        assert "*" not in pattern[:-1]
        name = pattern.replace("*", "x1")
        assert re.fullmatch(as_regex(pattern), name)
        assert not re.fullmatch(as_regex(pattern), f"{name}/more")
