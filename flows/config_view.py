"""`moonshift config`: every effective value, where it came from, what it overrode; and what became of verl's keys."""

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moonshift.core.config import KeyInfo, LoadedConfig, all_keys, flatten, mask
from moonshift.core.config.translate import Translation


def show(loaded: LoadedConfig, console: Console, *, changed_only: bool, describe: bool) -> None:
    """One row a key, in the schema's order."""
    known = {info.key: info for info in all_keys()}
    columns = ("key", "value", "from", "overrode") + (("type", "what it is") if describe else ())
    table = Table(*columns, box=box.SIMPLE)
    for key, value in flatten(loaded.config).items():
        found = loaded.provenance[key]
        if changed_only and found.source == "default":
            continue
        below = "; ".join(f"{_text(other.value)} ({other.where})" for other in found.overrode)
        table.add_row(
            key, _text(mask(key, value)), found.where, below, *(_described(known.get(key)) if describe else ())
        )
    console.print(table, markup=False)


def show_translations(translations: Sequence[Translation], console: Console) -> None:
    """verl's keys: mapped to ours or ignored, each with the reason; prints nothing where there are none."""
    if not translations:
        return
    table = Table("verl's key", "value", "", "here", "reason", title="Keys of verl's", box=box.SIMPLE)
    for item in sorted(translations, key=lambda item: (item.fate != "mapped", item.key)):
        table.add_row(item.key, _text(mask(item.key, item.value)), item.fate, item.target or "–", item.reason)
    console.print(table, markup=False)


def as_json(loaded: LoadedConfig) -> str:
    """`{key: {value, source, where, overrode}}`, secrets masked, and `verl_keys`."""
    values: dict[str, Any] = {}
    for key, value in flatten(loaded.config).items():
        found = loaded.provenance[key]
        values[key] = {
            "value": mask(key, value),
            "source": found.source,
            "where": found.where,
            "overrode": [{"value": other.value, "where": other.where} for other in found.overrode],
        }
    keys = [
        {"key": item.key, "fate": item.fate, "target": item.target, "reason": item.reason}
        for item in loaded.translations
    ]
    return json.dumps({"values": values, "verl_keys": keys}, indent=1, default=str)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple | dict | bool) else str(value)


def _described(info: KeyInfo | None) -> tuple[str, str]:
    return (info.type, info.description) if info else ("", "")
