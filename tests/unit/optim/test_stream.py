"""The streamed update: windows, and step counts that a fused optimizer keeps for a whole group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3train.optim.stream import StreamedUpdate
from offload.files.engine import ThreadEngine
from offload.shelf import FileShelf, HostShelf, Shelf


class Fused(torch.optim.Optimizer):
    """Counts steps per group, as fused AdamW does, and makes its states itself where it finds none."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__([{"params": params}], {"lr": 0.1})
        self.sizes: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self.sizes.append(sum(main.numel() for main in group["params"]))
            for main in group["params"]:
                state = self.state[main]
                state["exp_avg"].mul_(0.9).add_(main.grad, alpha=0.1)
                state["exp_avg_sq"].add_(main.grad.square())
                main.data.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["step"]))


class Wrapper:
    """As much of `ShardedOptimizer` as the stream uses; every parameter is whole on this rank."""

    is_stub_optimizer = False

    def __init__(self, models: list[nn.Parameter]) -> None:
        self.models = models
        self.mains = [model.detach().float().view(-1) for model in models]
        self.optimizer: Any = Fused(self.mains)
        self.gathered = 0

    def parameter_shards(self) -> Any:
        return zip(self.models, self.mains, strict=True)

    def gradient(self, model: nn.Parameter) -> Tensor:
        return model.main_grad.view(-1)  # type: ignore[attr-defined]

    def write_back(self, model: nn.Parameter, main: Tensor) -> None:
        if model.dtype != main.dtype:
            model.data.copy_(main.view(model.shape))

    def start_param_sync_for_bucket_group_subset(self) -> None:
        self.gathered += 1


def models(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(size, 3).to(dtype)) for size in (4, 9, 2, 30, 1)]


def train(shelf: Shelf | None, window: int, dtype: torch.dtype) -> tuple[Wrapper, StreamedUpdate]:
    wrapper = Wrapper(models(dtype))
    if shelf is None:
        for main in wrapper.mains:
            wrapper.optimizer.state[main] = {
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }
    stream = StreamedUpdate(
        [wrapper], rotator=None, shelf=shelf, window_bytes=window, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for model in wrapper.models:
            model.main_grad = torch.randn(model.shape, generator=generator)  # type: ignore[attr-defined]
        stream.prepare()
        (window_gradients,) = stream.gradients()
        assert [model for _, model in window_gradients] == wrapper.models
        stream.scale(0.5)
        stream.step()
    return wrapper, stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("window", [4, 400, 1 << 20])
def test_windows_change_no_bit(tier: str, window: int, dtype: torch.dtype, tmp_path: Path) -> None:
    expected, _ = train(None, 0, dtype)
    shelf: Shelf = HostShelf(pinned=False)
    if tier == "disk":
        shelf = FileShelf(tmp_path, ThreadEngine(), pinned=False, fallback=False, warn=print)
    wrapper, stream = train(shelf, window, dtype)
    for model, other in zip(wrapper.models, expected.models, strict=True):
        assert torch.equal(model, other)
    assert wrapper.optimizer.param_groups[0]["step"] == expected.optimizer.param_groups[0]["step"] == 3
    assert wrapper.gathered == 3
    per_element = 12 if dtype == torch.bfloat16 else 8
    least = max(main.numel() for main in wrapper.mains) * per_element
    assert stream.states is not None
    assert stream.states.device_bytes <= 2 * max(window, least)
    assert max(wrapper.optimizer.sizes) * per_element <= max(window, least)
    with stream.states.at_hand():
        for main, other_main in zip(wrapper.mains, expected.mains, strict=True):
            assert torch.equal(main, other_main)
            for name in ("exp_avg", "exp_avg_sq"):
                state = wrapper.optimizer.state[main]
                assert torch.equal(state[name], expected.optimizer.state[other_main][name])
    moments = [state["exp_avg"] for state in wrapper.optimizer.state.values()]
    held = sum({m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in moments}.values())
    assert (held <= 4 * len(moments)) == (tier == "disk"), "on disk they hold no memory between steps"


def test_a_checkpoint_replaces_states_at_hand(tmp_path: Path) -> None:
    shelf = FileShelf(tmp_path, ThreadEngine(), pinned=False, fallback=False, warn=print)
    wrapper, stream = train(shelf, 400, torch.bfloat16)
    assert stream.states is not None
    with stream.states.at_hand():
        for main in wrapper.mains:
            wrapper.optimizer.state[main]["exp_avg"] = torch.full_like(main, 7.0)
            main.data.fill_(3.0)
    with stream.states.at_hand():
        for main in wrapper.mains:
            assert main.eq(3).all() and wrapper.optimizer.state[main]["exp_avg"].eq(7).all()
