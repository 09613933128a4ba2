"""Lets megatron-core run on CPU and gloo. The only file that changes anything outside this project.

megatron-core names CUDA directly in hundreds of places; what stands here is what a training run, its
checkpoints and its tests were seen to reach. Where CUDA is available nothing here has any effect. CPU entry
points and tests call `enable_cpu` before megatron.core is imported.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._device import _device_constructors

FACTORIES = ("tensor", "zeros")


class _Idle:
    """Stands for a stream, and for the event that it records: work on a CPU is already in order."""

    def wait_stream(self, stream: _Idle) -> None: ...

    def record_event(self) -> _Idle:
        return self

    def synchronize(self) -> None: ...

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *args: object) -> None: ...


def enable_cpu() -> bool:
    """Prepare this process; True if it did, False with CUDA present, where it changes nothing.

    Raises:
        RuntimeError: megatron.core was imported first, so that parts of it already hold the originals.
    """
    if torch.cuda.is_available():
        return False
    if getattr(torch, "_k3train_cpu", False):
        return True
    if "megatron.core" in sys.modules:
        raise RuntimeError("parallel.cpu.enable_cpu() must run before megatron.core is imported")
    torch._k3train_cpu = True  # type: ignore[attr-defined]
    _redirect_devices()
    _still_streams()
    _share_random_state()
    _answer_cuda_types()
    _import_megatron()
    return True


def _redirect_devices() -> None:
    """Tensors that megatron-core asks for on "cuda" or on the current device are made on the default one.

    That is the CPU, unless a rehearsal says meta.
    """
    # Buffers, pipeline payloads and all-to-all outputs are made on the current device.
    torch.cuda.current_device = torch.get_default_device  # type: ignore[assignment]

    def on_default(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = torch.get_default_device()
            return factory(*args, **kwargs)

        return make

    # Torch lists what obeys a default device when first asked: the originals, before they are wrapped.
    _device_constructors()
    # The schedules' token counts and the optimizers' scales have device="cuda" written out.
    for name in FACTORIES:
        setattr(torch, name, on_default(getattr(torch, name)))


def _still_streams() -> None:
    """Streams do nothing. One object per name, or torch._dynamo objects."""
    idle = _Idle()
    # The token dispatcher copies its split sizes on a side stream.
    torch.cuda.Stream = _Idle  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: idle  # type: ignore[assignment,return-value]
    # Gradient buffers and the dispatcher order themselves behind the current stream.
    torch.cuda.current_stream = lambda *args: idle  # type: ignore[assignment,return-value]
    # Exchanges between pipeline stages wait for the device.
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]


def _share_random_state() -> None:
    """The tracker of model-parallel random states works on the one generator that a CPU has."""
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]


def _answer_cuda_types() -> None:
    """megatron-core's optimizers sort parameters by names such as torch.cuda.FloatTensor."""
    original = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return f"torch.cuda.{answer.rpartition('.')[2]}" if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]


def _import_megatron() -> None:
    """Import megatron-core, then mend what needs the imported modules."""
    with _plain_import():
        import megatron.core
        import megatron.core.optimizer  # noqa: F401
        from megatron.core.jit import disable_jit_fuser
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher
    disable_jit_fuser()
    # The tracker and recomputation set and read the device's generator through a pair of their own.
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


@contextmanager
def _plain_import() -> Iterator[None]:
    """Import without compiling, without remarks on absent GPU libraries, and without what is not needed."""
    compile_, level = torch.compile, logging.root.manager.disable

    def identity(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    # Decorated functions would be compiled at their first call, which needs a C++ compiler.
    torch.compile = identity  # type: ignore[assignment]
    logging.disable(logging.WARNING)
    try:
        import triton  # noqa: F401
    except ImportError:
        # Imported at the top of a module that only GPUs use.
        sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = types.ModuleType("paged_stash")
    # Its timers import wandb for a feature that is not used here: half a second.
    unwanted = "wandb" not in sys.modules
    if unwanted:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compile_
        logging.disable(level)
        if unwanted:
            del sys.modules["wandb"]


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes as lists, which gloo wants; megatron-core's own leaves a CPU tensor as it is."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor
