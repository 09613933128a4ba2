"""A configuration as YAML text: written into each run directory, read back to resume, sample and report."""

from __future__ import annotations

import dataclasses
import shutil
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from .config import Config
from .errors import UserError


def to_yaml(config: Config) -> str:
    """YAML text of a configuration, keys in the order of the classes."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True, width=100)


def keep_before(run_dir: Path, step: int) -> None:
    """Let the configuration that a run had up to `step` stay beside the one that takes its place."""
    before, kept = run_dir / "config.yaml", run_dir / f"config-to-step-{step:08d}.yaml"
    if before.is_file() and not kept.exists():  # else a second start in the new layout
        shutil.copyfile(before, kept)


def load_yaml(path: str | Path) -> Config:
    """Read what `to_yaml` wrote. Raises UserError when the file is missing, torn or of another version."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; expected the config.yaml of a run directory"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping, found {type(tree).__name__}")
    return typing.cast(Config, _build(Config, tree, "", path))


def _build(cls: type, tree: dict[str, Any], prefix: str, path: str | Path) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = [key for key in tree if key not in hints]
    if unknown:
        raise UserError(f"{path}: unknown key {prefix}{unknown[0]}; was it written by another version?")
    values = {}
    for key, value in tree.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(typing.cast(type, hint), value or {}, f"{prefix}{key}.", path)
        else:
            values[key] = _cast(hint, value, f"{prefix}{key}", path)
    return cls(**values)


def _cast(hint: Any, value: Any, key: str, path: str | Path) -> Any:
    """`value` as its field's type; YAML reads 1e-5 as a string and 1 as an integer."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _cast(next(part for part in arguments if part is not type(None)), value, key, path)
    if origin is list and isinstance(value, list):
        return [_cast(arguments[0], item, key, path) for item in value]
    if origin is dict and isinstance(value, dict):
        return {str(name): _cast(arguments[1], item, key, path) for name, item in value.items()}
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if hint is Any or type(value) is hint:
        return value
    raise UserError(f"{path}: {key}={value!r}: expected {getattr(hint, '__name__', hint)}")
