"""Loads the effective config: defaults, then the file, the command line, the environment, and code.

Invariant: every fault of all layers is found in one go and named with its place, key and what is allowed.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .faults import check_values
from .keys import Path as KeyPath
from .keys import all_keys, key_of, keys_by_path, nearest_keys, sections
from .masking import mask, mask_text
from .paths import located
from .provenance import Given, Provenance, Source, lay_over, provenance_of
from .schema import Config
from .serialize import flatten
from .translate import Translation, translated
from .yaml_source import plain, read_value, read_yaml

ENVIRONMENT = "MOONSHIFT__"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config that is valid, and for each dotted key where its value came from."""

    config: Config
    provenance: dict[str, Provenance]
    translations: tuple[Translation, ...] = ()
    """verl's keys that were given, and what became of each"""


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    code: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Read and check everything; later layers win.

    `path`: a YAML file, or None. `overrides`: `a.b=c`, the value being a YAML scalar, `[…]` or `{…}`. `environ`:
    `MOONSHIFT__A__B=c`, by default the process's. `code`: dotted keys or nested mappings. Paths in the file are taken
    from the file's folder where they exist there; in all other layers from the working folder.

    Raises ConfigError with one line a fault: `file:line key: what is wrong; what is allowed`.
    """
    faults: list[str] = []
    givens = [
        *(_from_file(path, faults) if path is not None else ()),
        *_from_overrides(overrides, faults),
        *_from_environment(os.environ if environ is None else environ, faults),
        *_from_code(code or {}, faults),
    ]
    translations: list[Translation] = []
    stacks = lay_over(_known(_relocated(translated(givens, faults, translations)), faults))
    config = check_values(stacks, str(path) if path is not None else "config", faults)
    if config is None:
        lines = list(dict.fromkeys(faults))
        raise ConfigError(f"The config has {len(lines)} fault(s):\n  " + "\n  ".join(lines))
    defaults = {info.key: info.default for info in all_keys() if not info.required}
    return LoadedConfig(
        config=config,
        provenance=provenance_of(flatten(config), stacks, defaults),
        translations=tuple(translations),
    )


def without_secrets(overrides: Sequence[str], environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """`overrides` without those that hold a secret, which go into `environ` where they mean the same.

    A key with capital letters (below `reward.kwargs`) has no variable and stays.
    """
    kept = []
    for text in overrides:
        name, _, value = text.partition("=")
        key = name.strip().removeprefix("--").removeprefix("config.")
        if mask(key, value) == value or key != key.lower():
            kept.append(text)
        else:
            environ.setdefault(ENVIRONMENT + key.upper().replace(".", "__"), value)
    return tuple(kept)


def _relocated(givens: Iterable[Given]) -> Iterator[Given]:
    """Paths of a key that was verl's are found as ours are; the others were located where they were read."""
    return (located(given, (Path(),)) for given in givens)


def _from_file(path: Path, faults: list[str]) -> Iterator[Given]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}; name a YAML file") from None
    read = read_yaml(text, str(path))
    if read.faults and not read.leaves:
        # nothing could be read: more lines about missing keys would only hide this
        raise ConfigError("\n".join(read.faults))
    faults.extend(read.faults)
    for leaf in read.leaves:
        given = Given(path=leaf.path, value=leaf.value, source="file", where=f"{path}:{leaf.line}")
        yield located(given, (path.parent, Path()))


def _from_overrides(overrides: Sequence[str], faults: list[str]) -> Iterator[Given]:
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("--").removeprefix("config.")
        if not equals or not name:
            faults.append(f"command line: {mask_text(text)!r} is no override; write key=value, such as run.seed=1")
        else:
            yield from _written(tuple(name.split(".")), value, "command line", "command line", faults)


def _from_environment(environ: Mapping[str, str], faults: list[str]) -> Iterator[Given]:
    """Variables whose name begins with MOONSHIFT and two underscores; letters become small ones."""
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT):
            path = tuple(name[len(ENVIRONMENT) :].lower().split("__"))
            yield from _written(path, environ[name], "environment", name, faults)


def _written(path: KeyPath, text: str, source: Source, where: str, faults: list[str]) -> Iterator[Given]:
    value, found = read_value(text, f"{where} {'.'.join(path)}")
    faults.extend(found)
    if not found:
        yield from _leaves(path, value, source, where)


def _from_code(code: Mapping[str, Any], faults: list[str]) -> Iterator[Given]:
    for key, value in code.items():
        for given in _leaves(tuple(str(key).split(".")), _of_code(value), "code", "code"):
            foreign = _foreign(given.value)
            if foreign is None:
                yield given
            else:
                faults.append(f"code {given.key}: is a {foreign}; give a plain value: text, number, bool, list, dict")


def _leaves(path: KeyPath, value: Any, source: Source, where: str) -> Iterator[Given]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item, source, where)
    else:
        yield located(Given(path=path, value=value, source=source, where=where), (Path(),))


def _of_code(value: Any) -> Any:
    """Tuples as lists, mappings as dicts, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _of_code(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_of_code(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _foreign(value: Any) -> str | None:
    """The type's name of something that no file could hold."""
    if isinstance(value, list):
        return next(filter(None, map(_foreign, value)), None)
    if isinstance(value, dict):
        return next(filter(None, map(_foreign, value.values())), None)
    return None if value is None or isinstance(value, str | int | float | bool) else type(value).__name__


def _known(givens: Iterable[Given], faults: list[str]) -> Iterator[Given]:
    """Those that name a key; an empty section says nothing and is passed over."""
    for given in givens:
        if key_of(given.path) is not None:
            yield given
        elif given.path not in sections():
            faults.append(f"{given.where} {given.key}: unknown key; {_suggestion(given)}")
        elif plain(given.value) not in (None, {}):
            names = ", ".join(_inside(given.path))
            faults.append(f"{given.where} {given.key}: is a section and takes no value; its keys: {names}")


def _suggestion(given: Given) -> str:
    parts = tuple(given.key.split("."))
    if parts in keys_by_path():
        return f"in a file write sections, not dots: {': {'.join(parts)}: …{'}' * (len(parts) - 1)}"
    near = nearest_keys(given.key)
    if near:
        return f"did you mean {' or '.join(near)}?"
    section = given.path[:-1]
    while section not in sections():
        section = section[:-1]
    place = f"keys of {'.'.join(section)}" if section else "sections"
    return f"{place}: {', '.join(_inside(section))}"


def _inside(section: KeyPath) -> list[str]:
    return list(dict.fromkeys(path[len(section)] for path in keys_by_path() if path[: len(section)] == section))


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f"; there is no folder {path.parent} that can be read" if not path.parent.is_dir() else ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else "; give the path of a YAML file"
