from k3train.log.panels import PANELS, natural_key, sections


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
