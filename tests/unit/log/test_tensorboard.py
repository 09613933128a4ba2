import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from k3train.log.tensorboard import TensorBoardSink


def read_back(folder):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def test_scalars_read_back_with_their_steps(tmp_path):
    sink = TensorBoardSink(tmp_path, resume_step=0)
    sink.log(1, {"loss": 2.5, "moe/bias_range/layer_3": 0.25, "text": "left out"})
    sink.log(2, {"loss": 2.25})
    sink.close()
    events = read_back(tmp_path)
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [(1, 2.5), (2, 2.25)]
    assert sorted(events.Tags()["scalars"]) == ["loss", "moe/bias_range/layer_3"]


def test_a_resume_hides_what_the_killed_run_wrote_later(tmp_path):
    killed = TensorBoardSink(tmp_path, resume_step=0)
    for step in range(1, 8):
        killed.log(step, {"loss": 100.0 + step, "only_before": 1.0})
    resumed = TensorBoardSink(tmp_path, resume_step=4)
    resumed.log(5, {"loss": 5.0})
    resumed.close()
    events = read_back(tmp_path)
    expected = [(1, 101.0), (2, 102.0), (3, 103.0), (4, 104.0), (5, 5.0)]
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == expected
    assert [scalar.step for scalar in events.Scalars("only_before")] == [1, 2, 3, 4]


def test_the_layout_holds_the_panels(tmp_path):
    TensorBoardSink(tmp_path, resume_step=0).close()
    (event,) = read_back(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    loss = layout.category[0].chart[0]
    assert (layout.category[0].title, loss.title) == ("Loss", "Loss")
    assert list(loss.multiline.tag) == ["^loss$", "^mtp_loss$", "^val_loss$"]


def test_a_directory_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(OSError):
        TensorBoardSink(tmp_path, resume_step=0)
