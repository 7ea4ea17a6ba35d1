"""Every key of the schema: its full name, kind, default, description, and which keys a mistyped one is near to.

Invariant: all is derived from `schema.py`; no key is named here.
"""

import difflib
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from .schema import Config, Section

Path = tuple[str, ...]
"""A key's parts: ("trainer", "save_freq")."""
Kind = Literal["int", "float", "bool", "str", "choice", "strings", "floats", "mapping", "mappings"]
CLOSE = 0.55
"""Least likeness of a suggestion, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """One key. Example: `trainer.save_freq`, type `int`, default -1, "steps between checkpoints; …"."""

    key: str
    type: str
    """in words: int, list of str, `auto | cpu | cuda`, `int or none` …"""
    kind: Kind
    nullable: bool
    required: bool
    default: Any
    """None where `required`"""
    choices: tuple[str, ...]
    """allowed words of a key of kind choice"""
    description: str

    @property
    def path(self) -> Path:
        return tuple(self.key.split("."))


def all_keys() -> list[KeyInfo]:
    """Every key, in the schema's order."""
    return list(keys_by_path().values())


@cache
def keys_by_path() -> dict[Path, KeyInfo]:
    """The same keys by their parts."""
    return {info.path: info for info in _walk(Config, ())}


@cache
def sections() -> frozenset[Path]:
    """Paths that hold keys and are none: ("trainer",), ("actor_rollout_ref", "actor") …"""
    return frozenset(path[:length] for path in keys_by_path() for length in range(len(path)))


def key_of(path: Path) -> KeyInfo | None:
    """The key that a path names, or lies inside of (`reward.kwargs.x` lies in `reward.kwargs`)."""
    known = keys_by_path()
    if path in known:
        return known[path]
    for length in range(1, len(path)):
        info = known.get(path[:length])
        if info is not None and info.kind == "mapping":
            return info
    return None


def nearest_keys(given: str) -> list[str]:
    """At most two keys that were perhaps meant, nearest first.

    Looks at the full name, the last part, and the description's first words: `learning_rate` finds `…optim.lr`.
    """
    wanted = given.lower().replace("-", "_")
    scored = [(_likeness(wanted, info), info.key) for info in all_keys()]
    close = sorted((pair for pair in scored if pair[0] >= CLOSE), key=lambda pair: -pair[0])
    return [key for score, key in close[:2] if score >= close[0][0] - 0.1]


def _likeness(wanted: str, info: KeyInfo) -> float:
    """0 to 1. A bare name is compared with last parts; a dotted one with whole and last parts."""
    if wanted == info.key:
        return 1.0
    if info.key.endswith("." + wanted):
        return 0.99
    last, key_last = wanted.rpartition(".")[2], info.key.rpartition(".")[2]
    whole, end = _ratio(wanted, info.key), _ratio(last, key_last)
    subject = re.split(r"[,;:(]", info.description)[0].strip().lower()
    words = _ratio(last.replace("_", " "), subject)
    end = (whole + end) / 2 if "." in wanted else 0.95 * end
    return max(whole, end, 0.9 * words if words >= 0.8 else 0.0)


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _walk(section: type[Section], prefix: Path) -> Iterator[KeyInfo]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _walk(inner, (*prefix, name))
            continue
        annotation, nullable = _bare(inner)
        kind, text, choices = _kind(annotation)
        yield KeyInfo(
            key=".".join((*prefix, name)),
            type=f"{text} or none" if nullable else text,
            kind=kind,
            nullable=nullable,
            required=field.is_required(),
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            choices=choices,
            description=field.description or "",
        )


def _bare(annotation: Any) -> tuple[Any, bool]:
    """The annotation without `Annotated` and `| None`, and whether None is allowed."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = [part for part in get_args(annotation) if part is not type(None)]
        return _bare(inner)[0], True
    return annotation, False


def _kind(annotation: Any) -> tuple[Kind, str, tuple[str, ...]]:
    plain: dict[Any, Kind] = {int: "int", float: "float", bool: "bool", str: "str"}
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in plain:
        return plain[annotation], annotation.__name__, ()
    if origin is Literal:
        return "choice", " | ".join(parts), parts
    if origin is dict:
        return "mapping", "mapping", ()
    assert origin is tuple, f"schema.py has a type that the loader does not read: {annotation}"
    if parts[-1] is Ellipsis and _bare(parts[0])[0] is float:
        return "floats", "list of floats", ()
    if parts[-1] is Ellipsis:
        return ("strings", "list of str", ()) if parts[0] is str else ("mappings", "list of mappings", ())
    return "floats", f"{len(parts)} floats", ()
