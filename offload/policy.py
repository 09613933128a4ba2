"""How the tensors of each site are held from forward to backward, as data: patterns of sites -> storages.

A storage is written `[recompute+][fp8+][TIER]`, each part at most once, or `keep` for none of them: with
`fp8+host` it is coded in block-FP8 and moved to host memory, with `recompute+host` the inputs of the region
are moved and it is run again. Needs no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

TIERS = ("host", "peer", "nvme")
"""Places below the device, the nearest first."""

GRAMMAR = f"keep, or parts joined in this order: [recompute+][fp8+][{'|'.join(TIERS)}]"


class PolicyError(ValueError):
    """A policy that cannot be read; the message names the site, the value and what is valid."""


@dataclass(frozen=True)
class Storage:
    """How the tensors of one site are held."""

    recompute: bool = False
    """A region is run again in backward: what it saves is not held, its inputs are, as the rest says."""
    fp8: bool = False
    """Held as block-FP8."""
    tier: str | None = None
    """One of `TIERS`; None: device memory."""

    @classmethod
    def parse(cls, text: str) -> Storage:
        """What `str` of a storage gave. Raises PolicyError."""
        if text == "keep":
            return KEEP
        parts = iter(str(text).split("+"))
        part = next(parts, None)
        recompute = part == "recompute"
        part = next(parts, None) if recompute else part
        fp8 = part == "fp8"
        part = next(parts, None) if fp8 else part
        if (part is not None and part not in TIERS) or next(parts, None) is not None:
            raise PolicyError(f"{text}: no such storage; valid is {GRAMMAR}{_near(str(text))}")
        return cls(recompute, fp8, part)

    def __str__(self) -> str:
        parts = [name for name, used in (("recompute", self.recompute), ("fp8", self.fp8)) if used]
        return "+".join([*parts, *([self.tier] if self.tier else [])]) or "keep"


KEEP = Storage()


@dataclass(frozen=True)
class Policy:
    """Storages by pattern of sites: an exact name, else the longest pattern of `fnmatch` that matches."""

    sites: Mapping[str, Storage] = field(default_factory=dict)
    """Said for this run; these come before `base`."""
    base: Mapping[str, Storage] = field(default_factory=dict)
    """Of the named policy."""

    @classmethod
    def read(cls, base: Mapping[str, str], sites: Mapping[str, str] | None = None) -> Policy:
        """From the texts of a configuration. Raises PolicyError."""
        return cls(_parsed(sites or {}), _parsed(base))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """What `str` of a policy gave. Raises PolicyError."""
        halves: list[dict[str, str]] = []
        for half in text.split(";"):
            pairs = [entry.partition("=") for entry in half.split(",") if entry.strip()]
            halves.append({name.strip(): value.strip() for name, _, value in pairs})
        if len(halves) > 2:
            raise PolicyError(f"{text}: has {len(halves)} parts; write SITE=STORAGE,... or RUN'S;POLICY'S")
        return cls.read(halves[-1], halves[0] if len(halves) == 2 else {})

    def __str__(self) -> str:
        """One line, exact: the run's own patterns, a semicolon, the policy's."""
        halves = [self.sites, self.base] if self.sites else [self.base]
        return ";".join(",".join(f"{name}={value}" for name, value in half.items()) for half in halves)

    def storage(self, site: str) -> Storage:
        """How a site's tensors are held; `keep` where nothing is said of it."""
        own, named = _match(self.sites, site), _match(self.base, site)
        if own is not None:
            return self.sites[own]
        return KEEP if named is None else self.base[named]

    def pattern(self, site: str) -> str | None:
        """The pattern that decides about a site, None where there is none."""
        own = _match(self.sites, site)
        return own if own is not None else _match(self.base, site)

    def tiers(self, sites: Iterable[str] | None = None) -> set[str]:
        """Tiers that some pattern names, or with `sites` that one of them is held on."""
        found = self.values() if sites is None else map(self.storage, sites)
        return {storage.tier for storage in found if storage.tier is not None}

    def values(self) -> Iterator[Storage]:
        """The storage of every pattern."""
        yield from self.sites.values()
        yield from self.base.values()

    def unmatched(self, sites: Iterable[str]) -> list[str]:
        """Patterns said for this run that match none of `sites`; a named policy may speak of more models."""
        known = list(sites)
        return [pattern for pattern in self.sites if not any(fnmatchcase(name, pattern) for name in known)]


def check_sites(policy: Policy, sites: Iterable[str]) -> None:
    """Raise PolicyError for a pattern of the run that no site has, with the nearest one."""
    known = sorted(sites)
    for pattern in policy.unmatched(known):
        hint = _closest(pattern, known) or f"; valid are {', '.join(known)}, and patterns of them like kda.*"
        raise PolicyError(f"{pattern}={policy.sites[pattern]}: no such site{hint}")


def _parsed(texts: Mapping[str, str]) -> dict[str, Storage]:
    found = {}
    for pattern, text in texts.items():
        if not pattern:
            raise PolicyError(f"={text}: names no site")
        try:
            found[pattern] = Storage.parse(text)
        except PolicyError as error:
            raise PolicyError(f"{pattern}={error}") from None
    return found


def _match(patterns: Mapping[str, Storage], site: str) -> str | None:
    if site in patterns:
        return site
    matching = [pattern for pattern in patterns if fnmatchcase(site, pattern)]
    return max(matching, key=len, default=None)


def _near(text: str) -> str:
    """A hint for parts that are right but in another order or misspelt."""
    known = ("keep", "recompute", "fp8", *TIERS)
    parts = [next(iter(difflib.get_close_matches(part, known, n=1)), "") for part in text.lower().split("+")]
    ordered = [name for name in known[1:3] if name in parts] + [name for name in TIERS if name in parts][:1]
    return f"; did you mean {'+'.join(ordered)}?" if ordered and all(parts) else ""


def _closest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
