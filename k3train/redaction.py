"""Keeps secrets out of what k3train writes: a configuration that holds one is refused, a message drops it.

A configuration lands in config.yaml, reports, job files and at wandb. What is secret is known by the name of
an environment variable, by such a name that is given a value in a text, or as the password in a URL. Needs
no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .config import Config, flatten
from .errors import UserError

MARK = "[left out]"
LEAST = 8
"""Characters of a value that is looked for elsewhere: shorter ones are found by chance."""
_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|KEY"
_NAME = re.compile(rf"(?:^|_)(?:{_WORDS})(?:_ID)?$|_SECRET_", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""\b(\w+_(?:{_WORDS})|PASSWORD|PASSPHRASE|SECRET|APIKEY)(\s*[=:]\s*)(?!["']?\$)("[^"]*"|'[^']*'|[^\s,;&}}\]]*[^\s,;&}}\]:])""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
REMEDY = (
    "which would stand in config.yaml, reports and job files; export it in the shell that starts the job, or "
    """read it on the nodes, as in cluster.setup=['export NAME="$(cat FILE)"']"""
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, as WANDB_API_KEY, HF_TOKEN or DB_PASSWORD."""
    return _NAME.search(name) is not None


def secrets_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Secret value -> the variable that holds it; paths to files with secrets are none."""
    return {
        value: name
        for name, value in environ.items()
        if len(value) >= LEAST and is_secret_name(name) and not value.startswith(("/", "~", "."))
    }


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A message without the secrets in it."""
    for value in sorted(secrets_of(environ), key=len, reverse=True):
        text = text.replace(value, MARK)
    text = _IN_URL.sub(rf"\1{MARK}@", text)
    return _ASSIGNED.sub(rf"\1\2{MARK}", text)


def check_secrets(config: Config, world_size: int) -> None:
    """Refuse a configuration that holds a secret, or a variable's name that is none; says no value.

    Raises:
        UserError: the key and what to do.
    """
    for name, value in config.cluster.environment.items():
        if not _VARIABLE.fullmatch(name):
            raise UserError(
                f"cluster.environment: {name!r} is no name of a variable; use letters, digits and _"
            )
        if is_secret_name(name) and value and not value.startswith(("/", "~", ".")):
            raise UserError(f"cluster.environment sets {name}, a secret by its name, {REMEDY}")
    known = secrets_of(os.environ)
    hook = config.log.alerts.webhook_env
    if hook is not None and len(os.environ.get(hook, "")) >= LEAST:
        known[os.environ[hook]] = hook
    for key, text in _texts(flatten(config)):
        if "\0" in text:
            raise UserError(f"{key}: has a NUL character, which no program can be given; remove it")
        if found := next((name for value, name in known.items() if value in text), None):
            raise UserError(f"{key} has what the variable {found} holds, a secret, {REMEDY}")
        if _IN_URL.search(text):
            raise UserError(f"{key} has a URL with a user or a password, {REMEDY}")
        if key == "cluster.setup" and (assigned := _ASSIGNED.search(text)):
            raise UserError(f"{key} sets {assigned[1]}, a secret by its name, {REMEDY}")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of everything written in a configuration; entries of lists and mappings under their key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(str(name), key)
            yield from _texts(entry, key or str(name))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry, key)
