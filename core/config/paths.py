"""Relative paths in a config: from the file's own folder if they exist there, else from the working folder.

Invariant: only what names something that exists (a pattern: at least one file) is touched, and becomes absolute, so
that a worker or a later attempt in another working folder finds the same; a hub name, a source (`sums:…`, `builtin:…`,
`package:…`) and a misspelt path reach their reader as they were written.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .provenance import Given
from .yaml_source import Scalar, plain

PATH_KEYS = {
    "data.train_files",
    "data.val_files",
    "warm_start.files",
    "actor_rollout_ref.model.path",
    "reward.function",
    "reward.functions",
}
SOURCE = re.compile(r"[A-Za-z][\w-]+:(?![/\\])")
"""A scheme has two letters or more: `C:x` is a path."""


def located(given: Given, folders: Sequence[Path]) -> Given:
    """`given` with the paths in its value made absolute, from the first of `folders` where they exist."""
    if given.key not in PATH_KEYS:
        return given
    value = given.value
    if isinstance(value, list):
        return replace(given, value=[_located(item, given.key, folders) for item in value])
    return replace(given, value=_located(value, given.key, folders))


def _located(value: Any, key: str, folders: Sequence[Path]) -> Any:
    if isinstance(value, dict):
        return {
            name: _located(item, "reward.function", folders) if name == "function" else item
            for name, item in value.items()
        }
    text, suffix = plain(value), ""
    if not isinstance(text, str):
        return value
    if key == "reward.function":
        text, colon, name = text.rpartition(":")
        suffix = colon + name
        if not text.endswith(".py"):
            return value
    elif SOURCE.match(text):
        return value
    for start in folders:
        place = start / os.path.expanduser(text)
        if text and _exists(place):
            absolute = os.path.abspath(place) + suffix
            return Scalar(value=absolute, text=absolute) if isinstance(value, Scalar) else absolute
    return value


def _exists(place: Path) -> bool:
    try:
        return place.exists() or (glob.has_magic(place.name) and any(place.parent.glob(place.name)))
    except (OSError, ValueError):  # a name that no file can have: too long, or with a null character
        return False
