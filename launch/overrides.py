"""Command-line overrides: parsed with Hydra's grammar, refused in one line that says what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from k3train.errors import UserError

from .schema import keys, sections


@cache
def groups() -> dict[str, list[str]]:
    """Config group -> the options shipped in `conf/`."""
    root = Path(str(resources.files("conf")))
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("_"))
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def summary(group: str, option: str) -> str:
    """The first sentence of a group file's leading comment."""
    text = (Path(str(resources.files("conf"))) / group / f"{option}.yaml").read_text()
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return " ".join(lines)


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse each override by itself. Raises UserError for the first that is not `key=value`."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException as error:
            if "=" not in text:
                raise UserError(f"{text}: not an override; write key=value, for example run.steps=10") from error
            raise UserError(f"{text}: cannot be read; quote values with special characters: key='value'") from error
    return parsed


def check_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra should see them. Raises UserError for an unknown key, option or syntax."""
    return [_checked(override) for override in parse(overrides)]


@contextmanager
def explain(overrides: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise while composing into a one-line UserError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(_one_line(error, parse(overrides))) from error


def closest(name: str, candidates: Sequence[str]) -> str:
    """`; did you mean X?` for the candidate nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if not near:  # a right leaf in the wrong section
        near = [key for key in candidates if key.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]}?" if near else ""


def _checked(override: Override) -> str:
    text, key = str(override.input_line), override.key_or_group
    if override.is_delete():
        raise UserError(f"{text}: keys cannot be removed; set another value, or null where the key allows it")
    if override.is_sweep_override():
        raise UserError(f"{text}: several values sweep, which needs -m; quote a value that holds a comma")
    if key.startswith("hydra."):
        return text
    if key in groups() and isinstance(override.value(), str):
        _check_option(key, str(override.value()))
    elif _mapping_of(key):
        return f"++{text.lstrip('+')}"
    elif key not in keys() and key not in sections():
        raise UserError(f"{text}: no such key{closest(key, [*keys(), *groups()])}")
    return text.lstrip("+")


def _check_option(group: str, option: str) -> None:
    if option not in groups()[group]:
        raise UserError(f"{group}={option}: no such {group}; valid are {', '.join(groups()[group])}")


def _mapping_of(key: str) -> bool:
    """Whether `key` lies inside a key that takes a mapping."""
    parent = key.rpartition(".")[0]
    return parent in keys() and keys()[parent].is_mapping


def _one_line(error: Exception, overrides: list[Override]) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    full_key = str(getattr(cause, "full_key", None) or "")
    name = full_key.partition("[")[0]
    given = [str(o.input_line) for o in overrides if o.key_or_group == name]
    first = str(cause).splitlines()[0]
    if name in keys():
        return f"{given[-1] if given else name}: expected {keys()[name].expected}" + ("" if given else f" ({first})")
    where = f"{given[-1]}: " if given else f"{full_key}: " if full_key and full_key not in first else ""
    return f"{where}{first}{closest(full_key, list(keys())) if full_key else ''}"
