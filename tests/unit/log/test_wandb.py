import sys
import threading
import time
import types

import pytest

from k3train.config import LogConfig
from k3train.log.alerts import Alert
from k3train.log.wandb import WandbSink, run_id


class FakeRun:
    def __init__(self, log=None):
        self.logged = []
        self.defined = {}
        self.finished = False
        self._log = log

    def define_metric(self, name, **options):
        self.defined[name] = options

    def log(self, record, step):
        if self._log is not None:
            self._log()
        self.logged.append((step, record))

    def finish(self):
        self.finished = True


@pytest.fixture
def install(monkeypatch):
    """Put a module in wandb's place whose `init` is the given function."""

    seen = []

    def put(init):
        fake = types.SimpleNamespace(
            init=init, Settings=lambda **options: options, setup=lambda settings: seen.append(settings)
        )
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return seen

    return put


def make(folder, **options):
    return WandbSink(folder, LogConfig(wandb="offline"), name="run", config={"recipe": "tiny"}, **options)


def eventually_raises(action, match):
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match=match):
        while time.monotonic() < deadline:
            action()
            time.sleep(0.01)


def test_records_reach_the_run_with_its_configuration(tmp_path, install):
    run, calls = FakeRun(), []

    def init(**options):
        calls.append(options)
        return run

    setups = install(init)
    sink = make(tmp_path)
    sink.log(1, {"loss": 2.0})
    sink.log(2, {"loss": 1.5})
    sink.close()
    assert run.logged == [(1, {"step": 1, "loss": 2.0}), (2, {"step": 2, "loss": 1.5})]
    assert run.finished
    assert setups == [{"silent": True}]
    assert (calls[0]["mode"], calls[0]["config"], calls[0]["resume"]) == (
        "offline",
        {"recipe": "tiny"},
        "allow",
    )
    assert run.defined["val_loss"] == {"step_metric": "step", "summary": "min"}


def test_a_resumed_run_keeps_its_id(tmp_path, install):
    ids = []

    def init(**options):
        ids.append(options["id"])
        return FakeRun()

    install(init)
    for _ in range(2):
        make(tmp_path).close()
    assert ids[0] == ids[1] == run_id(tmp_path)
    assert run_id(tmp_path / "other") != ids[0]


@pytest.mark.parametrize(
    "error", [RuntimeError("no login"), SystemExit("no login"), KeyboardInterrupt("no login")]
)
def test_a_failing_start_shows_as_one_error_in_log(tmp_path, install, error):
    def init(**options):
        raise error

    install(init)
    sink = make(tmp_path)
    eventually_raises(lambda: sink.log(1, {"loss": 1.0}), "no login")


def test_a_missing_package_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = make(tmp_path)
    eventually_raises(lambda: sink.log(1, {"loss": 1.0}), "wandb")


def test_a_failure_while_sending_is_told(tmp_path, install):
    def log():
        raise OSError("disk full")

    install(lambda **options: FakeRun(log))
    sink = make(tmp_path)
    eventually_raises(lambda: sink.log(1, {"loss": 1.0}), "disk full")


def test_a_hanging_start_does_not_block(tmp_path, install):
    release = threading.Event()
    install(lambda **options: release.wait(30))
    sink = make(tmp_path, init_seconds=0.2)
    sink.log(1, {"loss": 1.0})
    eventually_raises(lambda: sink.log(2, {"loss": 1.0}), "did not start within 0.2 s")
    release.set()


def test_a_hang_at_the_end_is_given_up(tmp_path, install):
    release = threading.Event()
    install(lambda **options: FakeRun(lambda: release.wait(30)))
    sink = make(tmp_path, close_seconds=0.2)
    sink.log(1, {"loss": 1.0})
    with pytest.raises(RuntimeError, match=r"did not finish sending within 0.2 s"):
        sink.close()
    release.set()


def test_a_full_queue_does_not_block(tmp_path, install, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("k3train.log.wandb.QUEUE_SIZE", 4)
    install(lambda **options: FakeRun(lambda: release.wait(30)))
    sink = make(tmp_path)
    with pytest.raises(RuntimeError, match="waiting to be sent"):
        for step in range(100):
            sink.log(step, {"loss": 1.0})
    release.set()


def test_offline_writes_a_run_without_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    sink = make(tmp_path)
    sink.log(1, {"loss": 2.0})
    sink.close()
    known = run_id(tmp_path)
    assert [path.stat().st_size > 0 for path in tmp_path.glob(f"wandb/offline-run-*/run-{known}.wandb")] == [
        True
    ]


def test_an_alert_reaches_the_run_behind_its_records(tmp_path, install):
    run, told = FakeRun(), []
    run.alert = lambda **options: told.append((len(run.logged), options))
    install(lambda **options: run)
    sink = make(tmp_path)
    sink.log(1, {"loss": 2.0})
    sink.alert(2, Alert("stall", "a step took 90 s"))
    sink.close()
    assert told == [(1, {"title": "stall", "text": "step 2: a step took 90 s", "level": "WARN"})]
