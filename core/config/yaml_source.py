"""YAML 1.2 text to plain values that remember their line; nothing in it can run code.

Invariant: a scalar means what YAML 1.2's core schema says (`no` and `12:30` are text, `1e-6` is a number), and every
fault of the text is found: duplicate keys, foreign tags, keys that are no names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .keys import Path

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

MAX_NODES = 100_000
"""Far above any config; stops a file whose aliases unfold to billions of values."""
NULLS = ("", "~", "null", "Null", "NULL")
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INT = re.compile(r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}", re.ASCII)
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
SPECIAL = re.compile(r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN")
CORE = "tag:yaml.org,2002:"
SCALAR_TAGS = {CORE + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A value with the characters it was written with: `0010` is the number 10, and the text 0010 where text is due."""

    value: str | int | float | bool | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A path and its value: a Scalar, a list of values, or an empty dict. `line` is 1-based."""

    path: Path
    value: Any
    line: int


@dataclass(slots=True, kw_only=True)
class YamlText:
    """What a text holds and what is wrong with it; `faults` are "file:line: …" lines."""

    name: str
    leaves: list[Leaf] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_yaml(text: str, name: str) -> YamlText:
    """All leaves and all faults of a YAML mapping; `name` is the file as the user called it."""
    result = YamlText(name=name)
    node = _compose(text, result)
    if result.faults:
        return result
    if node is None:
        result.faults.append(f"{name}: is empty; write at least data.train_files and actor_rollout_ref.model.path")
        return result
    if node.tag != CORE + "map":
        line = node.start_mark.line + 1
        result.faults.append(f"{name}:{line}: holds no mapping; write keys such as `trainer:` with values below them")
        return result
    reader = _Reader(result)
    result.leaves.extend(reader.leaves(node, ()))
    return result


def read_value(text: str, name: str) -> tuple[Any, list[str]]:
    """An override's value, and faults: `[…]`, `{…}` and quoted text are YAML; all else is one plain scalar.

    So `a=b: c # d` is the text "b: c # d" and needs no quoting beyond the shell's.
    """
    bare = text.strip()
    if not bare.startswith(("[", "{", '"', "'")):
        return Scalar(value=resolve(bare), text=bare), []
    result = YamlText(name=name)
    node = _compose(bare, result)
    value = None if node is None or result.faults else _Reader(result).value(node, ())
    # a line number means nothing in one word of a command line
    return value, [re.sub(r"^(.*?)(:\d+)+: ", r"\1: ", fault) for fault in result.faults]


def resolve(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar under YAML 1.2's core schema."""
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    if INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if FLOAT.fullmatch(text):
        return float(text)
    if SPECIAL.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def plain(value: Any) -> Any:
    """The value without the memory of its characters."""
    if isinstance(value, Scalar):
        return value.value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def _compose(text: str, result: YamlText) -> "Node | None":
    """The node graph; only nodes are made, no objects, so no tag can run anything."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # legal, and the warning would print lines of the file
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{result.name}:{mark.line + 1}:{mark.column + 1}" if mark else result.name
        context = f" ({error.context})" if error.context else ""
        result.faults.append(f"{place}: is not YAML: {error.problem}{context}")
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        result.faults.append(f"{result.name}:{line}:{column}: is not YAML: a character that YAML does not allow")
    except (YAMLError, ValueError) as error:
        result.faults.append(f"{result.name}: is not YAML: {error}")
    except RecursionError:
        result.faults.append(f"{result.name}: is nested too deeply")
    return None


class _Reader:
    """Walks a node graph once; faults go to `result.faults`."""

    def __init__(self, result: YamlText) -> None:
        self._result = result
        self._open: set[int] = set()
        self._num_nodes = 0

    def leaves(self, node: "Node", path: Path) -> Iterator[Leaf]:
        """The leaves below a mapping node; a mapping inside a list is part of the list's value."""
        if not self._enter(node, path):
            return
        if node.tag == CORE + "map" and node.value:
            for key, child in self._pairs(node, path):
                yield from self.leaves(child, (*path, key))
        else:
            num_faults = len(self._result.faults)
            value = self._content(node, path)
            if len(self._result.faults) == num_faults:
                yield Leaf(path=path, value=value, line=node.start_mark.line + 1)
        self._open.discard(id(node))

    def value(self, node: "Node", path: Path) -> Any:
        """A node as a Scalar, list or dict."""
        if not self._enter(node, path):
            return None
        content = self._content(node, path)
        self._open.discard(id(node))
        return content

    def _content(self, node: "Node", path: Path) -> Any:
        if node.tag == CORE + "map":
            return {key: self.value(child, (*path, key)) for key, child in self._pairs(node, path)}
        if node.tag == CORE + "seq":
            return [self.value(child, path) for child in node.value]
        if node.tag not in SCALAR_TAGS or not isinstance(node.value, str):
            self._fault(node, path, f"the tag {node.tag.replace(CORE, '!!')} is refused; write a plain value")
            return None
        as_text = getattr(node, "style", None) is not None or node.tag == CORE + "str"
        return Scalar(value=node.value if as_text else resolve(node.value), text=node.value)

    def _pairs(self, node: "Node", path: Path) -> Iterator[tuple[str, "Node"]]:
        seen: dict[str, int] = {}
        for key_node, child in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key, str) or key_node.tag not in SCALAR_TAGS:
                self._fault(key_node, path, "a key is no plain name")
            elif key == "<<" and key_node.style is None:
                self._fault(key_node, (*path, key), "merge keys are not read; write the values out")
            elif key in seen:
                self._fault(key_node, (*path, key), f"is given twice; first on line {seen[key]}")
            else:
                seen[key] = line
                yield key, child

    def _enter(self, node: "Node", path: Path) -> bool:
        """Whether to go into a node: not into itself, and not without end."""
        self._num_nodes += 1
        if id(node) in self._open:
            self._fault(node, path, "contains itself through an alias")
            return False
        if self._num_nodes > MAX_NODES:
            if self._num_nodes == MAX_NODES + 1:
                self._fault(node, path, f"unfolds to more than {MAX_NODES} values; write less or use no aliases")
            return False
        self._open.add(id(node))
        return True

    def _fault(self, node: "Node", path: Path, what: str) -> None:
        place = f"{self._result.name}:{node.start_mark.line + 1}"
        self._result.faults.append(f"{place} {'.'.join(path)}: {what}" if path else f"{place}: {what}")
