"""Reads what a checkpoint's files have pickled, without running any of it.

A pickle names functions to be called while it is read, so that whoever writes one has the reader's rights.
A checkpoint has three kinds: the table of its tensors, read here through an allow-list of the classes that
torch puts into it; tensors and objects as `torch.save` writes them, read with `weights_only`; and the extra
state of a Transformer Engine layer, a tensor of pickled bytes, which is refused unless it is empty.
megatron-core and torch read the first two once more, and torch reads objects without `weights_only`: the
table has been read here by then, and `plain_values_only` holds torch to plain values.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import _get_layout

from ..errors import UserError

LEGACY_COMMON = "common.pt"
"""megatron-core prefers it to the common state among the objects; no checkpoint of k3train has it."""
EXTRA_STATE = "_extra_state"
REMEDY = "do not use this checkpoint, take one that you trust"
FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""torch's own switches; the first one also changes calls that ask for everything."""

_CLASSES: tuple[type, ...] = (
    metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex,
    metadata.StorageMeta, metadata.TensorProperties, metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size,
    planner.SavePlan, planner.TensorWriteData, planner.WriteItem, planner.WriteItemType,
)  # fmt: skip
_ALLOWED: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}
_ALLOWED["torch.serialization", "_get_layout"] = _get_layout
_FORBIDDEN = "would run code, or is nothing that a checkpoint has"
_UNSUPPORTED = re.compile(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) (\S+)")
_DETAIL = re.compile(r"WeightsUnpickler error: (.+)")


class ForbiddenError(pickle.UnpicklingError):
    """A pickle asks for something that its kind has no use for."""


class _TableUnpickler(pickle.Unpickler):
    """Finds what the table of a checkpoint is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or dtype of a name; raises ForbiddenError for any other."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise ForbiddenError(f"{module}.{name}")


def read_table(file: BinaryIO, origin: Path) -> metadata.Metadata:
    """Which rectangle of which tensor lies where, as torch's distributed format pickles it.

    Args:
        origin: the file's path, for messages.

    Raises:
        UserError: it would run code, leads out of its folder, or is torn.
    """
    before = [dict(vars(kind)) for kind in _CLASSES]
    try:
        table = _TableUnpickler(file).load()
    except ForbiddenError as error:
        raise UserError(would_run(origin, str(error))) from error
    except Exception as error:  # torn bytes can call for anything
        raise UserError(f"{origin}: missing or torn ({type(error).__name__}: {error})") from error
    if _restore_classes(before):
        raise UserError(would_run(origin, "an assignment to a class"))
    _check_places(table, origin)
    return table  # type: ignore[no-any-return]


def _restore_classes(before: list[dict[str, Any]]) -> bool:
    """Whether a pickle has set attributes of the classes that it was given; they are as before then."""
    changed = False
    for kind, known in zip(_CLASSES, before, strict=True):
        for name, value in dict(vars(kind)).items():
            if name not in known:
                delattr(kind, name)
            elif value is not known[name]:
                setattr(kind, name, known[name])
            else:
                continue
            changed = True
    return changed


def _check_places(table: Any, origin: Path) -> None:
    if type(table) is not metadata.Metadata or not isinstance(table.state_dict_metadata, dict):
        raise UserError(f"{origin}: missing or torn (it is no table of tensors)")
    for info in (table.storage_data or {}).values():
        name = info.relative_path
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise UserError(f"{origin}: {name!r} leads out of the checkpoint's folder; {REMEDY}")


def load_tensor(file: Any) -> Any:
    """What `torch.save` wrote, if it is tensors and plain values; raises UnpicklingError if not."""
    return torch.load(file, map_location="cpu", weights_only=True)


def reason(error: BaseException) -> str:
    """Why a file cannot be read, in a few words."""
    text = str(error)
    if found := _UNSUPPORTED.search(text):
        return f"{found[1]} {_FORBIDDEN}"
    detail = _DETAIL.search(text)
    return detail[1] if detail else text.partition("\n")[0] or type(error).__name__


def would_run(origin: Path, name: str) -> str:
    """What to say of a file that is not to be unpickled."""
    return f"{origin}: {name} {_FORBIDDEN}; {REMEDY}"


@contextmanager
def plain_values_only(folder: Path) -> Iterator[None]:
    """Hold megatron-core's and torch's readers of a checkpoint, whose table has been read, to plain values.

    Raises:
        UserError: an object or a tensor is anything else.
    """
    if (folder / LEGACY_COMMON).exists():
        raise UserError(f"{folder / LEGACY_COMMON}: no checkpoint of k3train has this file; {REMEDY}")
    kept = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    os.environ[FORCE] = "1"
    try:
        yield
    except (CheckpointException, pickle.UnpicklingError) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        refused = next((cause for cause, _ in failures if isinstance(cause, pickle.UnpicklingError)), None)
        if refused is None:
            raise
        found = _UNSUPPORTED.search(str(refused))
        raise UserError(would_run(folder, found[1] if found else reason(refused))) from error
    finally:
        os.environ.pop(FORCE, None)
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def refuse_pickled(folder: Path, state: Mapping[str, Any]) -> None:
    """Refuse extra states of layers that have anything in them: Transformer Engine would unpickle it.

    It keeps scales of FP8 there, which no layer of k3train's has; without, it is an empty tensor.
    """
    for name, value in state.items():
        if name.endswith(EXTRA_STATE) and not _is_empty(value):
            raise UserError(would_run(folder, f"{name}, a pickle of {type(value).__name__},"))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and value.numel() == 0)
