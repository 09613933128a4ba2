"""The keys of a configuration as data: name, type, default and meaning, read from `k3train.config`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from k3train import alert_config, fault_config, hardware_config, vision_config
from k3train import config as config_module
from k3train.config import Config


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration."""

    name: str
    hint: Any
    default: Any
    meaning: str = ""

    @property
    def expected(self) -> str:
        """What a value has to be, in words."""
        return _words(self.hint)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a dict whose own keys are free."""
        return typing.get_origin(self.hint) is dict


@cache
def keys() -> dict[str, Key]:
    """Every leaf key of `Config` by its dotted name, in the order of the classes."""
    return {key.name: key for key in _leaves(Config, "", _meanings())}


@cache
def sections() -> dict[str, str]:
    """Every dotted section name -> the first line of its class's docstring."""
    return dict(_sections(Config, ""))


def _leaves(cls: type, prefix: str, meanings: dict[tuple[str, str], str]) -> list[Key]:
    hints = typing.get_type_hints(cls)
    found: list[Key] = []
    for entry in dataclasses.fields(cls):
        name, hint = f"{prefix}{entry.name}", hints[entry.name]
        if dataclasses.is_dataclass(hint):
            found += _leaves(typing.cast(type, hint), f"{name}.", meanings)
        else:
            found.append(Key(name, hint, _default(entry), meanings.get((cls.__name__, entry.name), "")))
    return found


def _sections(cls: type, prefix: str) -> list[tuple[str, str]]:
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found.append((f"{prefix}{name}", (hint.__doc__ or "").splitlines()[0]))
            found += _sections(typing.cast(type, hint), f"{prefix}{name}.")
    return found


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def _meanings() -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal that follows the field in the source."""
    found: dict[tuple[str, str], str] = {}
    modules = (config_module, alert_config, fault_config, hardware_config, vision_config)
    sources = map(inspect.getsource, modules)
    for cls in (node for source in sources for node in ast.parse(source).body):
        if not isinstance(cls, ast.ClassDef):
            continue
        for entry, after in zip(cls.body, cls.body[1:], strict=False):
            if not (isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[cls.name, entry.target.id] = " ".join(str(after.value.value).split())
    return found


_SINGULAR = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURAL = {int: "integers", float: "numbers", str: "strings", Any: "anything"}


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(part) for part in arguments if part is not type(None)) + " or null"
    if origin is list:
        return f"a list of {_PLURAL[arguments[0]]} like [a,b]"
    if origin is dict:
        return f"a mapping from {_PLURAL[arguments[0]]} to {_PLURAL[arguments[1]]}"
    return _SINGULAR[hint]
