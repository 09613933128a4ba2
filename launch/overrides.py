"""Command-line overrides: parsed with Hydra's grammar, refused in one line that says what is valid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from k3train.errors import UserError

from .groups import groups
from .schema import keys, sections


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse each override by itself. Raises UserError for the first that is not `key=value`."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException as error:
            if "=" not in text:
                raise UserError(
                    f"{text}: not an override; write key=value, for example run.steps=10"
                ) from error
            raise UserError(f"{text}: cannot be read; {_remedy(text)}") from error
    return parsed


def _remedy(text: str) -> str:
    """How to write an override whose key or value Hydra's grammar has no room for."""
    key, _, value = text.partition("=")
    mapping = _mapping_of(key)
    name = key.removeprefix(mapping or "").lstrip(".")
    if mapping is not None and name and keys()[mapping].hint == dict[str, str]:
        return f"write '{mapping}={{{name}: {value}}}'"
    return "quote values with special characters: key='value'"


def check_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra should see them. Raises UserError for an unknown key, option or syntax."""
    parsed = parse(overrides)
    # Folders of the user's own may hold options that the package does not ship; Hydra looks those up.
    own = any(override.key_or_group == "hydra.searchpath" for override in parsed)
    return [_checked(override, own) for override in parsed]


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
    if not near and name:  # a right leaf in the wrong section
        near = [key for key in candidates if key.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]}?" if near else ""


def _checked(override: Override, own_options: bool) -> str:
    text, key = str(override.input_line), override.key_or_group
    if override.is_delete():
        raise UserError(f"{text}: keys cannot be removed; set another value, or null where the key allows it")
    if override.is_sweep_override():
        raise UserError(f"{text}: several values make a sweep, which needs -m")
    if override.package is not None:
        raise UserError(f"{text}: packages are not overridden here; write {key}=...")
    if key.startswith("hydra."):
        return text
    if key in groups() and not isinstance(override.value(), dict):
        if not own_options:
            _check_option(key, override.value())
    elif mapping := _mapping_of(key):
        if key == mapping and isinstance(override.value(), list):
            raise UserError(f"{text}: expected {keys()[key].expected}; write {key}={{NAME: ...}}")
        _check_strings(text, mapping, override.value())
        return _entry(text.lstrip("+"), key, mapping)
    elif key in sections():
        _check_section(text, key, override.value())
    elif key not in keys():
        raise UserError(f"{text}: no such key{closest(key, [*keys(), *groups()])}")
    return _listed(text.lstrip("+"), key, override.value())


def _listed(text: str, key: str, value: object) -> str:
    """A single name as a list of one, for a key that takes a list of them."""
    single = key in keys() and keys()[key].hint == list[str] and isinstance(value, str)
    return f"{key}=[{text.partition('=')[2]}]" if single and not str(value).startswith("$") else text


def _check_option(group: str, option: object) -> None:
    if option not in groups()[group]:
        raise UserError(f"{group}={option}: no such {group}; valid are {', '.join(groups()[group])}")


def _check_section(text: str, section: str, value: object) -> None:
    if not isinstance(value, dict):
        example = next(key for key in keys() if key.startswith(f"{section}."))
        raise UserError(f"{text}: {section} is a section; set one of its keys, for example {example}=...")


def _mapping_of(key: str) -> str | None:
    """The key that takes a mapping and is `key`, or that `key` lies inside."""
    return next(
        (name for name in keys() if keys()[name].is_mapping and f"{key}.".startswith(f"{name}.")), None
    )


def _check_strings(text: str, mapping: str, value: object) -> None:
    """Refuse nothing where a mapping wants strings; a whole that is no mapping is refused later."""
    given = value.values() if isinstance(value, dict) else [value]
    is_whole = text.lstrip("+").startswith(f"{mapping}=") and not isinstance(value, dict)
    if keys()[mapping].hint == dict[str, str] and not is_whole and any(v in (None, "") for v in given):
        raise UserError(f"{text}: says nothing; leave out what shall stay as it is")


def _entry(text: str, key: str, mapping: str) -> str:
    """An override of a mapping, or of one of its entries, whose name may have dots of its own.

    Entries of a mapping to anything are mappings themselves, and a dot leads into them.
    """
    name = key.removeprefix(mapping).lstrip(".")
    if keys()[mapping].hint == dict[str, Any]:
        return f"++{text}"
    return f"++{mapping}={{{name}: {text.partition('=')[2]}}}" if "." in name else f"++{text}"


def _one_line(error: Exception, overrides: list[Override]) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause)
    noted = re.search(r"full_key: (\S+)", text)  # Hydra keeps the text of an error in a file, not its fields
    full_key = str(getattr(cause, "full_key", None) or (noted[1] if noted else ""))
    name = full_key.partition("[")[0]
    given = [str(override.input_line) for override in overrides if override.key_or_group == name]
    first = re.sub(r"^In '.*': \w+ raised while composing config:\n", "", text).splitlines()[0]
    if isinstance(cause, ValidationError) and name in keys():
        return f"{given[-1]}: expected {keys()[name].expected}" if given else f"{name}: {first}"
    where = f"{given[-1]}: " if given else f"{full_key}: " if full_key and full_key not in first else ""
    return f"{where}{first}{closest(full_key, list(keys())) if name not in keys() else ''}"
