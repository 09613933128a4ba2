"""Lets megatron-core run on CPU and gloo. The only file that changes anything outside this project.

megatron-core names CUDA directly in hundreds of places. Where CUDA is available nothing here has any
effect; CPU entry points and tests call `enable_cpu` before megatron.core is imported.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange")


class _Idle:
    """Stands for a stream or an event: work on a CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Idle:
        return self

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
    """Tensors that megatron-core asks for on "cuda" or on the current device are made on the CPU."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = cpu
            return factory(*args, **kwargs)

        return make

    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    # Checkpoint loading and gradient statistics move tensors explicitly.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    barrier = torch.distributed.barrier

    @functools.wraps(barrier)
    def barrier_without_devices(*args: Any, **kwargs: Any) -> Any:
        # gloo refuses the argument.
        kwargs.pop("device_ids", None)
        return barrier(*args, **kwargs)

    torch.distributed.barrier = barrier_without_devices


def _still_streams() -> None:
    """Streams, events and profiler ranges do nothing. One object per name, or torch._dynamo objects."""
    idle = _Idle()
    torch.cuda.Stream = _Idle  # type: ignore[assignment,misc]
    torch.cuda.Event = _Idle  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: idle  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: idle  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    torch.cuda.nvtx.range_push = lambda message: 0
    torch.cuda.nvtx.range_pop = lambda: 0


def _share_random_state() -> None:
    """The tracker of model-parallel random states works on the one generator that a CPU has."""
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]


def _answer_cuda_types() -> None:
    """megatron-core's optimizers sort parameters by names such as torch.cuda.FloatTensor."""
    original = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]


def _import_megatron() -> None:
    """Import megatron-core quietly and without compiling; then mend what needs the imported modules."""
    compile_ = torch.compile

    def identity(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = identity  # type: ignore[assignment]
    try:
        import triton  # noqa: F401
    except ImportError:
        # Imported at the top of a module that only GPUs use.
        sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = types.ModuleType("paged_stash")
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core
            import megatron.core.optimizer
            from megatron.core.jit import disable_jit_fuser
            from megatron.core.tensor_parallel import random
            from megatron.core.transformer.moe import token_dispatcher
    finally:
        torch.compile = compile_
        logging.disable(level)
    disable_jit_fuser()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes as lists, which gloo wants; megatron-core's own leaves a CPU tensor as it is."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor
