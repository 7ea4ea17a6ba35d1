"""verl's keys and Hydra's spelling turned into ours, each with what became of it; nothing is dropped in silence.

Invariant: a key that is ours is never touched.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from .keys import key_of
from .provenance import Given
from .verl_keys import REWARD_FILE, REWARD_NAME, Entry, entry_of
from .yaml_source import Scalar, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What became of one verl key."""

    key: str
    value: Any
    fate: Literal["mapped", "ignored"]
    target: str
    """our key; empty where it was ignored"""
    reason: str
    where: str


def translated(givens: Iterable[Given], faults: list[str], done: list[Translation]) -> Iterator[Given]:
    """`givens` with verl's keys under our names; what was mapped or ignored is added to `done`, what asks for
    something that is not done here to `faults`.
    """
    given_all = [_without_prefix(given) for given in givens]
    # verl filters first and cuts what is left, which is nothing: of its two keys for long prompts the filter wins
    given_all.sort(key=lambda given: given.key != "data.truncation")
    names = {given.key: str(plain(given.value)) for given in given_all if given.key in REWARD_NAME}
    for given in given_all:
        if given.key in REWARD_FILE:
            yield from _reward(given, next(iter(names.values()), "compute_score"), done)
        elif given.key in REWARD_NAME:
            done.append(_note(given, "mapped", "reward.function", "the name after the file's path"))
        elif _is_ours(given) or (entry := entry_of(given.key)) is None:
            yield given
        else:
            yield from _apply(given, entry, faults, done)


def _is_ours(given: Given) -> bool:
    """Whether key and value stand in the schema; `actor.strategy` does, and has a value of verl's that does not."""
    entry, value = entry_of(given.key), plain(given.value)
    renamed = (
        entry is not None and entry.target == given.key and isinstance(value, str) and value in (entry.values or {})
    )
    return key_of(given.path) is not None and not renamed


def _without_prefix(given: Given) -> Given:
    """Hydra's `+key` and `++key` (add, or add or change) name the same key."""
    first = given.path[0].lstrip("+") if given.path else ""
    return replace(given, path=(first, *given.path[1:])) if given.path and first != given.path[0] else given


def _apply(given: Given, entry: Entry, faults: list[str], done: list[Translation]) -> Iterator[Given]:
    value = plain(given.value)
    if entry.target is None:
        if entry.harmless is not None and not _among(value, entry.harmless):
            faults.append(
                f"{given.where} {given.key}: verl's {given.key}={value} cannot be followed: {entry.reason}; take it out"
            )
        else:
            done.append(_note(given, "ignored", "", entry.reason))
        return
    if value is None or value == -1:
        done.append(_note(given, "ignored", "", "stands for verl's own default"))
        return
    if entry.values is not None and value in entry.values:
        value = entry.values[value]
        if value is None:
            done.append(_note(given, "ignored", "", entry.reason))
            return
    done.append(_note(given, "mapped", entry.target, entry.reason))
    yield replace(given, path=tuple(entry.target.split(".")), value=Scalar(value=value, text=str(value)))


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed) or (
        value in (0, 0.0) and not isinstance(value, bool) and 0 in [other for other in allowed if other is not False]
    )


def _reward(given: Given, name: str, done: list[Translation]) -> Iterator[Given]:
    path = plain(given.value)
    if path is None:
        done.append(_note(given, "ignored", "", "no file is named"))
        return
    done.append(_note(given, "mapped", "reward.function", f"path:name, here {path}:{name}"))
    text = f"{path}:{name}"
    yield replace(given, path=("reward", "function"), value=Scalar(value=text, text=text))


def _note(given: Given, fate: Literal["mapped", "ignored"], target: str, reason: str) -> Translation:
    return Translation(
        key=given.key, value=plain(given.value), fate=fate, target=target, reason=reason, where=given.where
    )
