from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from k3train import compatibility
from k3train.config import Config, ParallelConfig, flatten
from k3train.config_file import to_yaml
from k3train.data.indexed import write_index
from k3train.data.prepare import PreparedInfo
from k3train.errors import UserError
from k3train.resume import fixed_keys
from k3train.validate import ABOVE_ZERO, AT_LEAST, BETWEEN, CHOICES, validate
from launch import reference
from launch.compose import compose, ready, resolve_layout, world_size

SINGLE = ["recipe=tiny", "parallel=single", "optim=adamw"]
MOONEP = ["parallel.expert.size=2", "parallel.expert.dispatcher=moonep"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["run.steps=0"], ["run.steps=0", "at least 1"]),
        (["run.device=tpu"], ["run.device=tpu", "auto, cpu, cuda"]),
        (["optim.lr=-1"], ["optim.lr=-1.0", "at least 0"]),
        (["optim.lr=nan"], ["optim.lr=nan", "finite"]),
        (["optim.beta2=1.0"], ["optim.beta2=1.0", "from 0 to 1, 1 excluded"]),
        (["optim.min_lr_ratio=1.5"], ["optim.min_lr_ratio=1.5", "from 0 to 1"]),
        (["log.prometheus_port=80"], ["log.prometheus_port=80", "from 1024 to 65535, or 0"]),
        (["log.alerts.clear=1.5"], ["log.alerts.clear=1.5", "from 0 to 1"]),
        (["log.alerts.stall=-1"], ["log.alerts.stall=-1.0", "at least 0"]),
        (["log.alerts.webhook_env=a/s3cret"], ["log.alerts.webhook_env: is the name of an environment"]),
        (["model.norm_eps=0"], ["model.norm_eps=0.0", "above 0"]),
        (["model.gate_lower_bound=0"], ["model.gate_lower_bound=0.0", "below 0"]),
        (["model.dtype=fp8"], ["model.dtype=fp8", "float32, bfloat16"]),
        (["model.backends.kda=cute"], ["model.backends.kda=cute", "auto, fla, chunk, recurrent"]),
        (["model.mtp_layers=2"], ["model.mtp_layers=2", "0, 1"]),
        (["model.top_k=32"], ["model.top_k=32", "below model.num_experts=32"]),
        (["model.latent_size=512"], ["model.latent_size=512", "at most model.hidden_size=256"]),
        (["model.num_dense_layers=10"], ["model.num_dense_layers=10", "at most model.num_layers=9"]),
        (["model.vocab_size=256"], ["model.vocab_size=256", "at least 263"]),
        (["data.sequence_length=1"], ["data.sequence_length=1", "at least 2"]),
        (["parallel.virtual=5"], ["parallel.pipeline=2", "2 x 5 chunks", "model.num_layers=9"]),
        (["parallel.layers_per_chunk=[5,4]"], ["parallel.layers_per_chunk=[5,4]", "has 2 chunks", "needs 4"]),
        (["parallel.layers_per_chunk=[9,0,0,0]"], ["[9,0,0,0]", "at least one layer"]),
        (["parallel.layers_per_chunk=[2,2,2,2]"], ["[2,2,2,2]", "adds up to 8", "model.num_layers=9"]),
        (
            [*SINGLE, "parallel.context=4", "cluster.ranks_per_node=2"],
            ["parallel.context=4", "4 ranks, but there are 2", "use a divisor of 2"],
        ),
        (["cluster.nodes=3"], ["parallel.pipeline=2", "2 ranks, but there are 3", "divisor of 3"]),
        (
            [*SINGLE, "cluster.ranks_per_node=4", "parallel.data=2"],
            ["parallel.data=2", "2 ranks, but there are 4", "use 4"],
        ),
        (
            [*SINGLE, "parallel.data=3", "parallel.expert.size=2"],
            ["parallel.expert.size=2", "data x context = 3"],
        ),
        (
            [*SINGLE, "parallel.expert.size=5"],
            ["parallel.expert.size=5", "model.num_experts=32", "valid are 1"],
        ),
        (
            [*SINGLE, "parallel.expert.size=2", "model.num_experts=0"],
            ["parallel.expert.size=2", "no experts to spread"],
        ),
        (
            [*SINGLE, *MOONEP, "parallel.expert.slots=17"],
            ["parallel.expert.slots=17", "at most 16, the experts that live on a rank"],
        ),
        (
            [*SINGLE, *MOONEP, "parallel.expert.transport=peer", "run.device=cpu"],
            ["parallel.expert.transport=peer", "run.device=cpu", "use auto or collective"],
        ),
        (
            [*SINGLE, "parallel.expert.dispatcher=moonep", "parallel.expert.transport=peer"],
            ["parallel.expert.transport=peer", "parallel.expert.size=1", "use auto or collective"],
        ),
        (["parallel.context=3"], ["parallel.context=3", "data.sequence_length=256", "1, 2, 4, 8"]),
        (
            ["optim=adamw", "parallel.zero=1", "offload.gradients=host"],
            ["offload.gradients=host", "parallel.zero=1", "use parallel.zero=2"],
        ),
        (["optim=adamw", "parallel.zero=0", "offload.gradients=host"], ["needs parallel.zero=2; it is 0"]),
        (
            ["optim=adamw", "parallel.zero=0", "offload.optimizer=host"],
            ["needs parallel.zero=1 or 2; it is 0"],
        ),
        (
            ["optim=adamw", "parallel.zero=2", "offload.gradients=nvme"],
            ["offload.gradients=nvme", "set offload.nvme_dir"],
        ),
        (["offload.policy=nvme"], ["offload.policy=nvme", "*=nvme", "set offload.nvme_dir"]),
        (["offload.sites.kda.core=fp8+nvme"], ["offload.sites.kda.core=fp8+nvme", "set offload.nvme_dir"]),
        (["offload.sites.kda.core=hots"], ["offload.sites.kda.core=hots", "did you mean host?"]),
        (["offload.sites.kda.core=host", "offload.host_gb=0"], ["offload.host_gb=0 leaves no room"]),
        ([*SINGLE, "offload.policy=peer"], ["offload.policy=peer", "another pipeline rank"]),
        (["offload.sites.kda.cor=host"], ["kda.cor=host: no such site; did you mean kda.core?"]),
        (["offload.sites.kda.output=recompute"], ["kda.output=recompute", "regions there are kda.input"]),
        (["offload.sites.layer=host"], ["offload.sites.layer=host", "add recompute+"]),
        (["offload.policy=budget"], ["offload.policy=budget", "set offload.budget_gb"]),
        (["offload.policy=host", "offload.budget_gb=4"], ["offload.budget_gb=4", "leave one of them out"]),
        (["offload.budget_gb=-1"], ["offload.budget_gb=-1", "above 0"]),
        (["offload.allow=[hots]"], ["offload.allow=[hots]", "recompute, fp8, host"]),
        (["offload.recompute_layers=2"], ["offload.recompute_layers=2", "add offload.policy=recompute"]),
        (["offload.inflight_mib=0"], ["offload.inflight_mib=0", "at least 1"]),
        (["parallel=single", "parallel.microbatch_group=2"], ["only virtual stages have groups"]),
        (
            ["parallel.pipeline=3", "parallel.virtual=3", "parallel.microbatch_group=2"],
            ["parallel.microbatch_group=2", "at least parallel.pipeline=3"],
        ),
        (["parallel.zero=3"], ["parallel.zero=3", "valid are 0, 1, 2"]),
        (["optim=muon", "optim.qk_clip=50"], ["optim.qk_clip=50", "optim.name=muon_per_head", "use 0"]),
        (["optim=muon_per_head", "optim.qk_clip=-1"], ["optim.qk_clip=-1", "at least 0"]),
        (["optim=muon", "parallel.zero=1"], ["optim.name=muon", "parallel.zero=1", "use parallel.zero=0"]),
        (["data.train=[a]"], ["data.train=[a]", "data=indexed"]),
        (["data=indexed"], ["data.train=[]", "k3train data prepare"]),
        (["data=indexed", "data.train=[no/such]"], ["data.train=[no/such]", "no/such.bin does not exist"]),
        (["data=indexed", "data.max_bytes=9"], ["data.max_bytes=9", "data=bundled or needles only"]),
        (
            ["data=indexed", "data.train=[a,b]", "data.train_weights=[1]"],
            ["data.train_weights=[1.0]", "1 weights for 2 entries of data.train"],
        ),
        (
            ["data=indexed", "data.train=[a,b]", "data.train_weights=[1,-1]"],
            ["data.train_weights=[1.0,-1.0]", "above 0"],
        ),
        (["data=indexed", "data.train=[a,b]", "data.train_weights=[1,0]"], ["[1.0,0.0]", "above 0"]),
        (["data=indexed", "data.train=[a]", "data.train_weights=[inf]"], ["[inf]", "finite"]),
        (["data.path=[a.jsonl]"], ["data.path=[a.jsonl]", "data=chat only"]),
        (["data=chat", "data.path=[]"], ["data.path is empty", "exercises"]),
        (["data=chat", "data.path=[no.jsonl]"], ["no.jsonl does not exist"]),
        (["data=chat", "vision=tiny", "data.images=[digits]"], ["data.images=[digits]", "chats name their"]),
        (["data=chat", "data.overlong=wrap"], ["data.overlong=wrap", "cut, drop"]),
        (["data=needles"], ["data.images=[digits]", "add vision=none"]),
        (
            ["data=needles", "vision=none", "data.needles.questions=17"],
            ["data.needles.questions=17", "at most pairs=16"],
        ),
        (
            ["data=needles", "vision=none", "data.sequence_length=64"],
            ["data.sequence_length=64", "120 tokens"],
        ),
        (["data=needles", "vision=none", "data.needles.pairs=0"], ["data.needles.pairs=0", "at least 1"]),
        (["data=chat", "data.held_out=1"], ["data.held_out=1.0", "excluded"]),
        (["model.num_shared_experts=0"], ["model.num_shared_experts=0", "at least 1"]),
        (["cluster.restarts=-1"], ["cluster.restarts=-1", "at least 0"]),
        (["data.tokenizer=no.json"], ["data.tokenizer=no.json"]),
        (["cluster.time_limit=1h"], ["cluster.time_limit=1h", "HH:MM:SS"]),
    ],
)
def test_refusal_names_key_value_and_remedy(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        ready(["recipe=tiny", *overrides])
    message = str(refusal.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_rules_name_keys_that_exist() -> None:
    known = set(flatten(Config()))
    assert set(CHOICES) | set(AT_LEAST) | set(ABOVE_ZERO) | set(BETWEEN) <= known


def test_backend_names_are_those_of_the_operators() -> None:
    from k3train.ops import backends

    for op in ("kda", "short_conv", "attn_res", "situ", "attention", "grouped"):
        names = tuple(name for operator, name, *_ in backends.report() if operator == op)
        assert CHOICES[f"model.backends.{op}"] == ("auto", *names)


def test_half_a_pair_of_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    overrides = ["recipe=tiny", "data=indexed", f"data.train=[{tmp_path}/a]"]
    with pytest.raises(UserError, match=r"a\.idx does not exist"):
        ready(overrides)
    corpus(tmp_path / "a")
    overrides.append(f"data.valid=[{tmp_path}/a]")
    assert ready(overrides).data.train == [f"{tmp_path}/a"]
    assert ready(["recipe=tiny", "data=indexed", "data.train=[elsewhere]"], inputs=False).data.train == [
        "elsewhere"
    ]


def test_a_torn_pair_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(b"\0" * 5)
    with pytest.raises(UserError, match=r"data\.train=.*a\.bin holds 5 bytes where a\.idx says 6: torn"):
        ready(["recipe=tiny", "data=indexed", f"data.train=[{tmp_path}/a]", f"data.valid=[{tmp_path}/a]"])


def test_indexed_data_needs_a_validation_split(tmp_path: Path) -> None:
    corpus(tmp_path / "a")
    with pytest.raises(UserError, match=r"data\.valid=\[\]: name at least one prefix"):
        ready(["recipe=tiny", "data=indexed", f"data.train=[{tmp_path}/a]"])


def test_a_corpus_of_another_tokenizer_is_refused_and_its_own_named(tmp_path: Path) -> None:
    corpus(tmp_path / "a")
    corpus(tmp_path / "b", tokenizer="/models/k3/tiktoken.model", fingerprint="tiktoken:0a")
    overrides = ["recipe=tiny", "data=indexed", f"data.train=[{tmp_path}/a]"]
    assert ready([*overrides, f"data.valid=[{tmp_path}/a]"]).data.tokenizer == "byte"
    with pytest.raises(UserError) as refusal:
        ready([*overrides, f"data.valid=[{tmp_path}/b]"])
    message = str(refusal.value)
    assert message.startswith(f"data.valid=[{tmp_path}/b]: ")
    assert "prepared with the tokenizer /models/k3/tiktoken.model, and data.tokenizer is byte" in message
    assert "set data.tokenizer=/models/k3/tiktoken.model" in message


def test_data_is_checked_without_torch(tmp_path: Path) -> None:
    corpus(tmp_path / "a")
    overrides = ["recipe=tiny", "data=indexed", f"data.train=[{tmp_path}/a]", f"data.valid=[{tmp_path}/a]"]
    program = (
        "import sys; from launch.compose import ready; ready(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, *overrides], timeout=60, check=False)
    assert done.returncode == 0


def corpus(prefix: Path, tokenizer: str = "byte", fingerprint: str = "byte") -> None:
    """A document of three tokens, with the description that `data prepare` leaves beside it."""
    prefix.with_suffix(".bin").write_bytes(np.array([1, 2, 256], np.uint16).tobytes())
    write_index(prefix.with_suffix(".idx"), np.array([3], np.int32), np.uint16)
    info = PreparedInfo(
        prefix.name, tokenizer, fingerprint, 259, documents=1, tokens=3, bytes=2, empty=0, dtype="uint16",
        recipe="",
    )  # fmt: skip
    prefix.with_suffix(".json").write_text(json.dumps(asdict(info)))


def test_run_folder_has_to_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir=.*file/run: .*file is not a folder"):
        ready(["recipe=tiny", f"run.dir={tmp_path}/file/run"])


def test_run_folder_has_to_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"run\.dir=.* cannot be written"):
        ready(["recipe=tiny", f"run.dir={tmp_path}/run"])


def test_the_disk_of_activations_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    base = ["recipe=tiny", "offload.policy=nvme", f"run.dir={tmp_path}/run"]
    assert ready([*base, f"offload.nvme_dir={tmp_path}/disk"])
    with pytest.raises(UserError, match=r"nvme_dir=.*: there is no .*/not/mounted; make it, or name another"):
        ready([*base, f"offload.nvme_dir={tmp_path}/not/mounted/disk"])
    with pytest.raises(UserError, match=r"nvme_dir=.*: .*file is not a folder"):
        ready([*base, f"offload.nvme_dir={tmp_path}/file/disk"])
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match=r"nvme_dir=.* cannot be written"):
        ready([*base, f"offload.nvme_dir={tmp_path}/disk"])


def test_a_folder_of_another_run_is_refused_unless_it_starts_anew(tmp_path: Path) -> None:
    base = ["recipe=tiny", "optim.lr=0.002", f"run.dir={tmp_path}"]
    (tmp_path / "config.yaml").write_text(to_yaml(ready(base)))
    assert ready([*base, "run.steps=500", "log=wandb", "checkpoint.every=7"]).run.steps == 500
    with pytest.raises(
        UserError, match=r"optim\.lr=0\.5: the run in .* has 0\.002; keep that, or set another run\.dir"
    ):
        ready([*base, "optim.lr=0.5"])
    assert ready([*base, "optim.lr=0.5", "run.resume=false"]).optim.lr == 0.5


def test_a_run_may_go_on_in_another_layout_of_as_many_samples(tmp_path: Path) -> None:
    base = ["recipe=tiny", "parallel=ep2", "parallel.expert.dispatcher=moonep", f"run.dir={tmp_path}"]
    (tmp_path / "config.yaml").write_text(to_yaml(ready(base)))
    changed = ready([*base, "parallel.expert.slots=1", "parallel.expert.transport=collective"])
    assert changed.parallel.expert.slots == 1
    other = [
        "parallel.expert.dispatcher=alltoall",
        "parallel.data=4",
        "run.microbatches=2",
        "parallel.zero=0",
    ]
    assert ready([*base, *other]).parallel.data == 4
    with pytest.raises(
        UserError,
        match=r"= 16 samples a step, and the run in .* has 8; set run\.microbatches=2, or change it",
    ):
        ready([*base, "parallel.data=4"])
    with pytest.raises(UserError, match=r"= 6 samples .* has 8; choose factors that give it"):
        ready([*base, "parallel.data=6", "parallel.expert.size=2", "run.microbatches=1", "eval.batches=6"])


@pytest.mark.parametrize("held", ["metrics.jsonl", "checkpoints"])
def test_starting_anew_over_a_run_is_refused(held: str, tmp_path: Path) -> None:
    overrides = ["recipe=tiny", f"run.dir={tmp_path}", "run.resume=false"]
    assert not ready(overrides).run.resume
    (tmp_path / held).mkdir()
    with pytest.raises(UserError, match=rf"run\.resume=false: .* holds a run \({held}\); set"):
        ready(overrides)
    assert ready(overrides[:2]).run.resume


def test_layouts_that_work() -> None:
    for overrides, ranks in [
        (["parallel=pp2_vpp2_ep2"], 4),
        (["parallel=single", "parallel.expert.size=4", "parallel.data=8"], 8),
        (["parallel.pipeline=3", "parallel.virtual=3", "run.microbatches=6", "eval.batches=6"], 3),
        (["parallel=pp2", "run.microbatches=3"], 2),
        (["parallel=single", "parallel.virtual=3", "parallel.microbatch_group=2"], 1),
    ]:
        assert world_size(ready(["recipe=tiny", *overrides]), {}) == ranks


@pytest.mark.parametrize(("first", "second"), compatibility.pairs(), ids=lambda name: name.replace(" ", "_"))
def test_a_pair_works_or_is_refused_as_the_table_says(first: str, second: str) -> None:
    features = [compatibility.find(first), compatibility.find(second)]
    settings = [setting for feature in features for setting in feature.settings]
    config = compose([*SINGLE, *_defaults_beside(first, second), *settings])
    ranks = world_size(config, {})
    config = resolve_layout(config, ranks, {})
    assert all(feature.active(config) for feature in features), "the settings turn both features on"
    entry = compatibility.refusal(first, second)
    if entry is None:
        validate(config, ranks)
    else:
        with pytest.raises(UserError) as refusal:
            validate(config, ranks)
        assert entry.why in str(refusal.value)


def test_docs_hold_the_table() -> None:
    root = Path(__file__).parents[2]
    assert compatibility.markdown() in (root / reference.TARGET).read_text()
    assert compatibility.markdown().count("| yes") > 40


def _defaults_beside(first: str, second: str) -> list[str]:
    """ZeRO-1 follows AdamW when nothing is said; a pair that does not need it is tested without it."""
    if "gradients off device" in (first, second):
        return ["parallel.zero=2"]
    alone = {"ZeRO-1", "ZeRO-2", "states off device"} & {first, second}
    return [] if alone else ["parallel.zero=0"]


def test_a_run_may_go_on_with_rotating_buffers_and_without_them() -> None:
    def fixed(zero: int) -> object:
        return fixed_keys(Config(parallel=ParallelConfig(zero=zero)))["parallel.zero"]

    assert [fixed(zero) for zero in (0, 1, 2)] == [0, 1, 1]


def test_a_url_in_place_of_a_variable_is_not_repeated() -> None:
    with pytest.raises(UserError) as refusal:
        ready(["recipe=tiny", "log.alerts.webhook_env=https://hooks.example/s3cret"])
    assert "s3cret" not in str(refusal.value)
