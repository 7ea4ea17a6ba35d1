"""Gives each value its key's type, has the schema check the whole, and says each fault in words.

Invariant: no text becomes a number by accident and no number is rounded; what does not fit is a fault.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .keys import KeyInfo, Path, key_of, keys_by_path, sections
from .masking import mask
from .provenance import Given
from .schema import Config
from .yaml_source import Scalar, plain

WANTED: dict[str, str] = {
    "int": "write a whole number, such as 8 or 1e3, without quotes",
    "float": "write a number, such as 1e-6, without quotes",
    "bool": "write true or false",
    "str": "write text, in quotes where it looks like something else",
    "strings": "write one text or a list of texts",
    "mapping": "write a mapping: {name: value}",
    "mappings": "write a list of mappings: [{name: value}]",
    "floats": "write numbers: [0.9, 0.999]",
    "choice": "write one of the words",
}
BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def check_values(stacks: Mapping[Path, list[Given]], name: str, faults: list[str]) -> Config | None:
    """The config made of the last value of each path, or None, with every fault added to `faults`.

    `name`: what a missing key is missing from. Also None where `faults` held something before.
    """
    tops = {path: stack[-1] for path, stack in stacks.items()}
    for given in tops.values():
        faults.extend(_not_finite(given))
    try:
        config = Config.model_validate(_tree(tops), strict=True)
    except ValidationError as error:
        faults.extend(_fault(fault, tops, name) for fault in error.errors(include_url=False))
        return None
    return None if faults else config


def _tree(tops: Mapping[Path, Given]) -> dict[str, Any]:
    """Nested mappings with all sections, so that the schema names the missing key and not its section."""
    tree: dict[str, Any] = {}
    for section in sorted(sections(), key=len):
        _place(tree, section, {})
    for path, given in tops.items():
        info = key_of(path)
        assert info is not None, f"{path} was let through though it is no key"
        inside = info.path != path
        _place(tree, path, plain(given.value) if inside else _typed(given.value, info))
    return tree


def _place(tree: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    if path:
        tree[path[-1]] = value


def _typed(value: Any, info: KeyInfo) -> Any:
    """The value as the key wants it, where nothing is lost by that; else as it was."""
    bare = plain(value)
    if bare is None:
        return {} if info.kind == "mapping" else None
    if info.kind in ("str", "choice"):
        return _text(value)
    if info.kind == "int" and isinstance(bare, float) and bare.is_integer():
        return int(bare)
    if info.kind == "strings" and isinstance(bare, str | list):
        return tuple(_text(item) for item in (value if isinstance(value, list) else [value]))
    if info.kind in ("floats", "mappings") and isinstance(bare, list):
        return tuple(bare)
    return bare


def _text(value: Any) -> Any:
    """The characters of an unquoted scalar: `name: 0010` is the text 0010."""
    return value.text if isinstance(value, Scalar) and value.value is not None else plain(value)


def _not_finite(given: Given) -> list[str]:
    """Infinite and NaN numbers, in free mappings and lists too: canonical JSON has none."""
    pending, found = [plain(given.value)], False
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)
        found = found or (isinstance(value, float) and not math.isfinite(value))
    info = key_of(given.path)
    is_free = info is not None and info.kind in ("mapping", "mappings")
    return [f"{given.where} {given.key}: is not finite; write a finite number"] if found and is_free else []


def _fault(fault: Any, tops: Mapping[Path, Given], name: str) -> str:
    """One line of a schema fault: place, key, what is wrong, what is allowed."""
    loc = tuple(str(part) for part in fault["loc"])
    info = next(
        (keys_by_path()[loc[:length]] for length in range(len(loc), 0, -1) if loc[:length] in keys_by_path()), None
    )
    assert info is not None, f"the schema refused {loc}, which is no key"
    given = tops.get(info.path)
    place = given.where if given else name
    if fault["type"] == "missing" and loc == info.path:
        return f"{place} {info.key}: is missing; {info.description}"
    inside = loc[len(info.path) :]
    item = f" (item {int(loc[-1]) + 1})" if inside and loc[-1].isdigit() else ""
    if info.kind == "mappings" and len(inside) > 1:
        name, shown = ".".join(inside[1:]), _shown(inside[-1], fault["input"])
        return f"{place} {info.key}: item {int(inside[0]) + 1}, {name}: {fault['msg']}; given: {shown}"
    return f"{place} {info.key}: is {_shown(info.key, fault['input'])}{item}; {_allowed(fault, info)}"


def _allowed(fault: Any, info: KeyInfo) -> str:
    context = fault.get("ctx", {})
    if fault["type"] in BOUNDS:
        bound, words = BOUNDS[fault["type"]]
        limit = context[bound]
        return f"it must be {words} {limit if isinstance(limit, int) else format(limit, 'g')}" + (
            " or none" if info.nullable else ""
        )
    if fault["type"] == "literal_error":
        near = difflib.get_close_matches(str(fault["input"]), info.choices, n=1)
        return f"use one of {', '.join(info.choices)}" + (f"; did you mean {near[0]}?" if near else "")
    if fault["type"] == "string_pattern_mismatch":
        return f"it must match {context['pattern']}: letters, digits, . _ - and no slash"
    if fault["type"] == "finite_number":
        return "write a finite number"
    if fault["type"] == "too_short" and info.kind == "strings":
        return "name at least one"
    if info.kind == "floats":
        return f"write {info.type}: [{', '.join(map(str, info.default or (1.0, 0.5)))}]"
    if fault["type"] == "string_too_short":
        return "write at least one character"
    return WANTED[info.kind] + ("; null for none" if info.nullable else "")


def _shown(key: str, value: Any) -> str:
    """A value in a message: its kind where that is what is wrong, never a secret, never long."""
    masked = mask(key, value)
    text = repr(list(masked) if isinstance(masked, tuple) else masked)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"the text {text}" if isinstance(value, str) else "empty" if value is None else text
