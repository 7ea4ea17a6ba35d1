"""Every key that the schema accepts is read by code outside of the config's own package.

The sources are walked as syntax trees. An expression's section is followed from annotations (`config: Config`), from
attributes called `config`, and through assignments; reading a field of a known section counts for its key.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from moonshift.core.config import all_keys
from moonshift.core.config import schema as schema_module
from moonshift.core.config.schema import Config, Section

ROOT = Path(__file__).parent.parent.parent
SECTIONS = {
    name: value for name, value in vars(schema_module).items() if isinstance(value, type) and issubclass(value, Section)
}
Types = dict[str, type[Section]]


class Reads(ast.NodeVisitor):
    """Collects `(section, field)` pairs of one module."""

    def __init__(self) -> None:
        self.found: set[tuple[type[Section], str]] = set()
        self.known: Types = {}
        self.attributes: Types = {}
        """what was assigned to an attribute of `self`, anywhere in the module"""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.known = self.known, dict(self.known)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            if isinstance(argument.annotation, ast.Name) and argument.annotation.id in SECTIONS:
                self.known[argument.arg] = SECTIONS[argument.annotation.id]
        self.generic_visit(node)
        self.known = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            for name, value in _pairs(target, node.value):
                section = self.section(value)
                if section is not None:
                    self.known[name] = section
            section = self.section(node.value)
            if section is not None and isinstance(target, ast.Attribute):
                self.attributes[target.attr] = section

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        section = self.section(node.value)
        if section is not None and node.attr in section.model_fields:
            self.found.add((section, node.attr))

    def section(self, node: ast.expr) -> type[Section] | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id, Config if node.id == "config" else None)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.attributes:
            return self.attributes[node.attr]
        outer = self.section(node.value)
        if outer is None:
            return Config if node.attr in ("config", "_config") else None
        field = outer.model_fields.get(node.attr)
        inner = field.annotation if field else None
        return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for left, right in zip(target.elts, value.elts, strict=False):
            yield from _pairs(left, right)


def reads(source: str) -> set[tuple[type[Section], str]]:
    visitor = Reads()
    visitor.visit(ast.parse(source))
    return visitor.found


def section_of(key: str) -> tuple[type[Section], str]:
    *sections, name = key.split(".")
    section: type[Section] = Config
    for part in sections:
        inner = section.model_fields[part].annotation
        assert isinstance(inner, type) and issubclass(inner, Section)
        section = inner
    return section, name


def test_every_accepted_key_is_read_somewhere() -> None:
    found: set[tuple[type[Section], str]] = set()
    for room in ("flows", "tasks", "infra", "core"):
        for file in (ROOT / room).rglob("*.py"):
            if "config" not in file.relative_to(ROOT).parts[:2]:
                found |= reads(file.read_text(encoding="utf-8"))
    assert [info.key for info in all_keys() if not is_read(info.key, found)] == []


def is_read(key: str, found: set[tuple[type[Section], str]]) -> bool:
    """A field that a section inherits is read where its base's is."""
    section, name = section_of(key)
    return any((base, name) in found for base in section.__mro__)


def test_the_walk_sees_what_is_read_and_nothing_else() -> None:
    source = """
def f(config: Config) -> int:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    other.n
    return actor.optim.lr + rollout.n
"""
    names = {f"{section.__name__}.{name}" for section, name in reads(source)}
    assert {"OptimSection.lr", "RolloutSection.n", "ActorSection.optim"} <= names
    assert not {"RolloutSection.name", "SamplingSection.n", "DataSection.n"} & names
