from __future__ import annotations

import pytest

from k3train.activation_policy import policy_of
from k3train.config import Config
from k3train.errors import UserError
from launch.compose import compose, ready, resolve_layout, world_size


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_groups() -> None:
    config = compose(["recipe=tiny", "optim=adamw", "optim.lr=1e-3", "log=wandb", "parallel=ep2"])
    assert isinstance(config, Config)
    assert (config.optim.name, config.optim.lr, config.log.wandb) == ("adamw", 1e-3, "online")
    assert (config.parallel.pipeline, config.parallel.expert.size) == (1, 2)
    assert config.model.num_layers == 9


def test_recipe_names_the_run_and_its_folder() -> None:
    config = compose(["recipe=h200_small"])
    assert (config.recipe, config.run.name, config.run.dir) == ("h200_small", "h200_small", "runs/h200_small")
    assert compose(["run.name=a"]).run.dir == "runs/a"


def test_free_mappings_take_new_keys() -> None:
    config = compose(["cluster.environment.NCCL_DEBUG=INFO", "+cluster.environment.A=b"])
    assert config.cluster.environment == {"NCCL_DEBUG": "INFO", "A": "b"}
    assert compose(["cluster.environment={X: y}"]).cluster.environment == {"X": "y"}


def test_one_pipeline_stage_drops_the_recipe_s_chunks_but_not_the_user_s() -> None:
    assert compose(["parallel.pipeline=1"]).parallel.virtual == 1
    assert compose(["recipe=k3_pretrain", "parallel.pipeline=1"]).parallel.layers_per_chunk is None
    assert compose(["parallel.pipeline=1", "parallel.virtual=2"]).parallel.virtual == 2


@pytest.mark.parametrize(
    ("overrides", "environ", "ranks", "data", "nodes", "per_node"),
    [
        (["recipe=tiny"], {}, 2, 1, 1, 2),
        (["recipe=tiny", "parallel.expert.size=2"], {}, 4, 2, 1, 4),
        (["recipe=tiny", "parallel.data=3"], {}, 6, 3, 1, 6),
        (["recipe=h200_small", "cluster.nodes=4"], {}, 32, 32, 4, 8),
        (["recipe=h200_small", "cluster.ranks_per_node=2"], {}, 2, 2, 1, 2),
        (["recipe=k3_pretrain", "cluster.nodes=64"], {}, 512, 64, 64, 8),
        (["recipe=tiny"], {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 8, 4, 2, 4),
    ],
)
def test_layout_is_derived(
    overrides: list[str], environ: dict[str, str], ranks: int, data: int, nodes: int, per_node: int
) -> None:
    config = compose(overrides)
    assert world_size(config, environ) == ranks
    resolved = resolve_layout(config, ranks, environ)
    assert resolved.parallel.data == data
    assert (resolved.cluster.nodes, resolved.cluster.ranks_per_node) == (nodes, per_node)
    assert config.cluster.ranks_per_node in (None, 2), "the argument is left as it was"


def test_zero_clip_and_vocabulary_are_derived() -> None:
    names = ("adamw", "muon", "muon_per_head")
    adamw, muon, per_head = (ready(["recipe=tiny", f"optim={name}"]) for name in names)
    assert (adamw.parallel.zero, muon.parallel.zero, per_head.parallel.zero) == (1, 0, 1)
    assert (adamw.optim.qk_clip, muon.optim.qk_clip, per_head.optim.qk_clip) == (0, 0, 100)
    assert ready(["recipe=tiny", "optim=muon_per_head", "optim.qk_clip=0"]).optim.qk_clip == 0
    assert adamw.model.vocab_size == 320  # 256 bytes and 3 special ids, up to a multiple of 64
    assert ready(["recipe=tiny", "model.vocab_multiple=100"]).model.vocab_size == 300


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "recipe=tinny",
            "recipe=tinny: no such recipe; valid are h200_slice, h200_small, k3_pretrain,",
        ),
        ("optim=sgd", "optim=sgd: no such optim; valid are adamw, muon, muon_per_head"),
        ("run.stepz=3", "run.stepz=3: no such key; did you mean run.steps?"),
        ("hidden_size=3", "hidden_size=3: no such key; did you mean model.hidden_size?"),
        ("modell=tiny", "modell=tiny: no such key; did you mean model?"),
        ("+run.stepz=3", "no such key; did you mean run.steps?"),
        ("run.steps=1.5", "run.steps=1.5: expected an integer"),
        ("run.steps=true", "run.steps=true: expected an integer"),
        ("run.steps=null", "run.steps=null: expected an integer"),
        ("optim.lr=fast", "optim.lr=fast: expected a number"),
        ("run.resume=maybe", "run.resume=maybe: expected true or false"),
        ("parallel.layers_per_chunk=[1,a]", "expected a list of integers like [a,b] or null"),
        ("run=3", "run=3: run is a section; set one of its keys, for example run.name=..."),
        ("run={stepz: 3}", "run.stepz: Key 'stepz' not in 'RunConfig'; did you mean run.steps?"),
        ("run.steps", "run.steps: not an override; write key=value, for example run.steps=10"),
        ("run.name=[", "run.name=[: cannot be read; quote values"),
        ("~run.steps", "~run.steps: keys cannot be removed"),
        ("run.seed=1,2", "run.seed=1,2: several values make a sweep, which needs -m"),
        ("run.name=${nope}", "run.name=${nope}: Interpolation key 'nope' not found"),
        ("optim@x=muon", "optim@x=muon: packages are not overridden here"),
    ],
)
def test_refused_override(override: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose([override])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_group_file_with_a_key_of_another_version_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/adamw.yaml").write_text("name: adamw\n")
    (tmp_path / "log").mkdir()
    (tmp_path / "log/extra.yaml").write_text("evry: 3\n")
    with pytest.raises(
        UserError, match=r"log\.evry: Key 'evry' not in 'LogConfig'; did you mean log\.every\?"
    ):
        compose([f"hydra.searchpath=[file://{tmp_path}]", "log=extra"])


@pytest.mark.parametrize(
    ("overrides", "ranks", "batches"),
    [
        (["recipe=tiny", "eval.batches=31"], 2, 31),
        (["recipe=tiny", "parallel=single", "eval.batches=8"], 3, 9),
        (["recipe=h200_small"], 16, 16),
    ],
)
def test_evaluation_is_rounded_up_to_what_the_layout_shares(
    overrides: list[str], ranks: int, batches: int
) -> None:
    assert resolve_layout(compose(overrides), ranks).eval.batches == batches


def test_whether_the_tower_recomputes_is_decided_before_the_run() -> None:
    def said(*overrides: str) -> str | None:
        policy = policy_of(ready(overrides, inputs=False))
        return str(policy.storage("vit.layer")) if policy.pattern("vit.layer") else None

    assert compose(["recipe=tiny"]).offload.resolved == {}
    overrides = ["recipe=tiny", "vision.mode=phase", "run.microbatches=64"]
    assert said(*overrides) == "keep"
    # 255 MiB are needed, and a tenth of the memory is left free.
    short = [*overrides, "cluster.memory_gib=0.26"]
    assert said(*short) == "recompute"
    assert said(*short, "offload.sites.vit.layer=keep") == "keep"
    assert said(*short, "offload.policy=recompute", "offload.sites={vit.*: keep}") == "keep"
    assert said("recipe=h200_small") is None, "there is no tower"


def test_a_policy_is_read_by_name_and_changed_by_site() -> None:
    config = compose(
        ["offload.policy=recompute", "offload.sites={kda.*: fp8+host}", "offload.sites.mla.core=host"]
    )
    assert config.offload.sites == {"kda.*": "fp8+host", "mla.core": "host"}
    assert config.offload.resolved == {
        "layer": "recompute",
        "mtp.layer": "recompute",
        "vit.layer": "recompute",
    }
    policy = policy_of(config)
    assert [str(policy.storage(name)) for name in ("layer", "kda.core", "mla.core", "mla.key")] == [
        "recompute",
        "fp8+host",
        "host",
        "keep",
    ]


def test_a_policy_of_one_s_own_is_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.yaml"
    path.write_text('"kda.*": host\n')
    assert compose([f"offload.policy={path}"]).offload.resolved == {"kda.*": "host"}
    for text, message in (
        ("[1]", "expected a mapping"),
        ("{", "not YAML"),
        ("kda.core: {a: b}", "line 1: expected a site"),
        ("kda.core: host\n\nmla.core: 3", "line 3: expected a site"),
        ("kda.core: host\nmla.core: host\nkda.core: keep", "line 3: kda.core has a storage already"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            compose([f"offload.policy={path}"])
    with pytest.raises(UserError, match="No such file"):
        compose([f"offload.policy={tmp_path}/other.yaml"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("offload.policy=hots", "offload.policy=hots: no such policy; valid are fp8_host, host,"),
        ("offload.policy=mixd", "did you mean mixed?"),
        ("offload=host", "offload is a section; set one of its keys, for example offload.policy=..."),
        ("offload.resolved.layer=keep", "offload.resolved: is derived from offload.policy"),
        ("offload.sites=host", "offload.sites=host: expected a mapping from strings to strings"),
        ("offload.site.layer=host", "no such key"),
        ("offload.sites.kda.core=", "offload.sites.kda.core=: says nothing"),
        ("offload.sites.kda.core=null", "offload.sites.kda.core=null: says nothing"),
        ("offload.sites={kda.*: null}", "says nothing"),
        ("offload.sites.kda.*=host", "write 'offload.sites={kda.*: host}'"),
    ],
)
def test_a_refused_policy(override: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose([override])
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
