"""Where each value came from, and what it overrode.

Invariant: layers are laid on each other in one order, lowest first: default, file, command line, environment, code;
values kept for display are masked.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .keys import Path
from .masking import mask
from .yaml_source import plain

Source = Literal["default", "file", "command line", "environment", "code"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that somebody wrote, before it is checked."""

    path: Path
    value: Any
    """a Scalar, a list of values or an empty dict; plain values where `source` is code"""
    source: Source
    where: str
    """what messages begin with: `run.yaml:12`, `command line`, `MOONSHIFT__TRAINER__DEVICE`, `code`"""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the value of one key came from.

    Example: `run.yaml:12` gave 3 for `trainer.save_freq` and overrode the default -1.
    """

    source: Source
    where: str
    """`default`, `run.yaml:12`, `command line`, `MOONSHIFT__TRAINER__DEVICE` or `code`"""
    value: Any
    """masked where it is a secret; as it was written where it was overridden"""
    overrode: tuple["Provenance", ...] = ()
    """what lay below, highest first"""


def lay_over(givens: Iterable[Given]) -> dict[Path, list[Given]]:
    """For each path the values given, the one that counts last.

    An empty mapping empties what lies below it (`reward.kwargs={}`); a value and a mapping at one path replace
    each other.
    """
    stacks: dict[Path, list[Given]] = {}
    for given in givens:
        path = given.path
        clashing = [other for other in stacks if other != path and (_inside(other, path) or _inside(path, other))]
        for other in clashing:
            del stacks[other]
        stacks.setdefault(path, []).append(given)
    return stacks


def provenance_of(
    values: Mapping[str, Any], stacks: Mapping[Path, list[Given]], defaults: Mapping[str, Any]
) -> dict[str, Provenance]:
    """One Provenance a key of `values` (the effective ones, by dotted key)."""
    by_key = {".".join(path): stack for path, stack in stacks.items()}
    return {key: _provenance(key, value, by_key.get(key, []), defaults) for key, value in values.items()}


def _provenance(key: str, value: Any, stack: list[Given], defaults: Mapping[str, Any]) -> Provenance:
    shown = mask(key, value)
    if not stack:
        return Provenance(source="default", where="default", value=shown)
    *below, top = stack
    return Provenance(
        source=top.source, where=top.where, value=shown, overrode=tuple(_below(key, reversed(below), defaults))
    )


def _below(key: str, givens: Iterable[Given], defaults: Mapping[str, Any]) -> Iterator[Provenance]:
    for given in givens:
        yield Provenance(source=given.source, where=given.where, value=mask(key, plain(given.value)))
    if key in defaults:
        yield Provenance(source="default", where="default", value=mask(key, defaults[key]))


def _inside(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer
