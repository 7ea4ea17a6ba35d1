"""Finds a reward function by `package.module:name` or `path/to/file.py:name`.

Invariant: what is loaded can be called with one Sample and the configured arguments, or a RewardError says why not.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ..errors import RewardError
from ..types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A reward function with its configured arguments; call it with a Sample."""

    spec: str
    """as it was given: what messages name"""
    function: Callable[..., float | dict[str, float]]
    kwargs: dict[str, Any]

    def __call__(self, sample: Sample) -> float | dict[str, float]:
        """The function's own result, not yet checked: see `score_sample`."""
        return self.function(sample, **self.kwargs)


def load_reward(spec: str, kwargs: Mapping[str, Any]) -> LoadedReward:
    """The function at `spec`, called as `f(sample, **kwargs)`.

    A relative file path is taken from the working folder. Raises RewardError: no such module, file or name (with the
    nearest names), a module that fails to import (with its traceback), not callable, async, or a signature that does
    not take one Sample and `kwargs`.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise RewardError(f"reward.function is {spec!r}; write package.module:name or path/to/file.py:name.")
    module = _load_file(place, spec) if place.endswith(".py") else _load_module(place, spec)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise RewardError(f"{spec}: {place} has no {name!r}{_candidates(name, module)}")
        function = getattr(function, part)
    _check_signature(function, spec, kwargs)
    return LoadedReward(spec=spec, function=function, kwargs=dict(kwargs))


class _Importing:
    """Turns what a user's module raises while it is imported into a RewardError with its traceback."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception | SystemExit):
            text = "".join(traceback.format_exception(error, limit=-4))
            raise RewardError(f"{self.spec}: importing it raised {type(error).__name__}: {error}\n{text}") from error


def _load_module(place: str, spec: str) -> ModuleType:
    try:
        with _Importing(spec):
            return importlib.import_module(place)
    except RewardError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{place}.".startswith(f"{cause.name}."):
            raise RewardError(
                f"{spec}: there is no module {cause.name!r}. Install it, or give the file: path/to/file.py:name."
            ) from cause
        raise


def _load_file(place: str, spec: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise RewardError(f"{spec}: no such file (looked for {file}). Correct the path in reward.function.")
    # named by its path, so that two files of one name do not replace each other
    module_name = f"moonshift_reward_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    found = importlib.util.spec_from_file_location(module_name, file)
    if found is None or found.loader is None:
        raise RewardError(f"{spec}: {file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses look their module up there while it is executed
    try:
        with _Importing(spec):
            found.loader.exec_module(module)
    except RewardError:
        del sys.modules[module_name]
        raise
    return module


def _candidates(name: str, module: ModuleType) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    close = difflib.get_close_matches(name, own, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f". Functions there: {', '.join(sorted(own)) or 'none'}."


def _check_signature(function: Any, spec: str, kwargs: Mapping[str, Any]) -> None:
    if not callable(function):
        raise RewardError(f"{spec}: is a {type(function).__name__}, not a function; write def name(sample) -> float.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise RewardError(f"{spec}: is async; write a plain def name(sample) -> float.")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"{spec}: its signature cannot be read; wrap it in def name(sample) -> float.") from error
    try:
        signature.bind(object(), **kwargs)
    except TypeError as error:
        given = ", ".join(["sample", *(f"{key}=…" for key in kwargs)])
        raise RewardError(
            f"{spec}: is called as ({given}), but its signature is {signature}: {error}. "
            f"It must take one sample; further arguments come from reward.kwargs."
        ) from error
