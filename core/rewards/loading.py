"""Finds a reward function by `package.module:name` or `path/to/file.py:name`.

Invariant: what is loaded can be called in its form with the configured arguments, or a RewardError says why not.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ..errors import RewardError
from ..types import Sample
from .contracts import Contract, call, check_signature, detect, signature_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A reward function with its configured arguments and the form it is called in."""

    spec: str
    """as it was given: what messages name"""
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    contract: Contract
    signature: inspect.Signature

    @property
    def own_name(self) -> str:
        """The last part of the spec: `score` of `rewards.py:score`."""
        return self.spec.rpartition(":")[2].rpartition(".")[2]

    def call(self, samples: Sequence[Sample]) -> Any:
        """The function's own result, not yet checked and perhaps to be awaited: see `contracts.call`."""
        return call(self.function, self.signature, self.contract, self.kwargs, samples)


def load_reward(spec: str, kwargs: Mapping[str, Any], contract: str = "auto") -> LoadedReward:
    """The function at `spec`; `contract` says in which form it is written, auto reads that off its signature.

    A relative file path is taken from the working folder. Raises RewardError: no such module, file or name (with the
    nearest names), a module that fails to import (with its traceback), not callable, or a signature that does not fit
    its form and `kwargs`.
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
    return reward_of(function, kwargs, spec=spec, contract=contract)


def reward_of(function: Any, kwargs: Mapping[str, Any], *, spec: str, contract: str = "auto") -> LoadedReward:
    """A function that is already there, under the name `spec`. Raises RewardError as `load_reward` does."""
    if not callable(function):
        raise RewardError(f"{spec}: is a {type(function).__name__}, not a function; write def name(sample) -> float.")
    signature = signature_of(function, spec)
    form = detect(signature) if contract == "auto" else Contract(contract)
    check_signature(signature, form, spec, kwargs)
    return LoadedReward(spec=spec, function=function, kwargs=dict(kwargs), contract=form, signature=signature)


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
