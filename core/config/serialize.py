"""The config as dotted keys, JSON and YAML, and back from JSON.

Invariant: the JSON is canonical (sorted keys, no spaces, ASCII), so equal configs have equal text.
"""

import json
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError
from .keys import Path, keys_by_path
from .masking import mask
from .schema import Config


def flatten(config: Config) -> dict[str, Any]:
    """Dotted keys and values in the schema's order; free mappings are unfolded: `reward.kwargs.format_weight`.

    An empty mapping stays one entry with the value {}. Values are not masked.
    """
    return {".".join(path): value for _, path, value in unfold(config)}


def unfold(config: Config) -> Iterator[tuple[str, Path, Any]]:
    """(key of the schema, path, value) of every value."""
    dump = config.model_dump()
    for path, info in keys_by_path().items():
        value: Any = dump
        for part in path:
            value = value[part]
        for inner, item in _unfold_value(path, value):
            yield info.key, inner, item


def _unfold_value(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _unfold_value((*path, str(key)), item)
    else:
        yield path, value


def to_json(config: Config, *, masked: bool = False) -> str:
    """Canonical JSON of the whole config; with `masked`, secrets are `********` and the text may be stored."""
    values = config.model_dump(mode="json")
    return canonical(mask("", values) if masked else values)


def canonical(values: Any) -> str:
    """Sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def config_from_json(text: str) -> Config:
    """The config that `to_json` wrote. Raises ConfigError naming each key that does not fit."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_input=False)]
        raise ConfigError("A stored config cannot be read:\n  " + "\n  ".join(lines)) from None


def to_yaml(config: Config, masked: bool = True) -> str:
    """YAML of every effective value, in the schema's order; `load_config` reads it back. `masked` hides secrets."""
    from ruamel.yaml import YAML

    values: Mapping[str, Any] = config.model_dump(mode="json")
    writer = YAML()
    writer.default_flow_style = False
    writer.width = 120
    text = StringIO()
    writer.dump(mask("", values) if masked else values, text)
    return text.getvalue()
