"""The few calls of CUDA's driver that share a GPU's memory between processes; torch has none without a group.

torch makes the device's primary context current on every thread that works on it, which these calls use.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from . import OffloadError

LAZY_ENABLE_PEER_ACCESS = 1
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


@functools.cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise OffloadError(f"CUDA's driver cannot be loaded: {error}") from error
    pointer, size = ctypes.c_uint64, ctypes.c_size_t
    library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(pointer), size)
    library.cuMemFree_v2.argtypes = (pointer,)
    library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), pointer)
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
    library.cuIpcCloseMemHandle.argtypes = (pointer,)
    library.cuMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_void_p)
    library.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    answer = getattr(library, name)(*arguments)
    if answer:
        text = ctypes.c_char_p()
        library.cuGetErrorName(answer, ctypes.byref(text))
        raise OffloadError(f"{name}: {(text.value or b'unknown error').decode()}")


def allocate(nbytes: int) -> int:
    """The address of new memory on the current device. Raises OffloadError."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
    return address.value


def release(address: int) -> None:
    """Free what `allocate` gave."""
    _call("cuMemFree_v2", address)


def export(address: int) -> bytes:
    """What another process of this host needs to open memory of `allocate`."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle.bytes)


def attach(handle: bytes) -> int:
    """The address, on the current device, of memory that another process exported. Raises OffloadError."""
    address = ctypes.c_uint64()
    given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, LAZY_ENABLE_PEER_ACCESS)
    return address.value


def detach(address: int) -> None:
    """Undo `attach`."""
    _call("cuIpcCloseMemHandle", address)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy between any two addresses on a stream (its handle)."""
    _call("cuMemcpyAsync", target, source, nbytes, stream)
