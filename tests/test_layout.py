"""The house rules that a machine can check."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("flows", "tasks", "core", "infra")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_no_module_is_known_by_two_names() -> None:
    faults = []
    for path in [*SOURCES, *TESTS]:
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            faults += [f"{path}:{node.lineno} {name}" for name in names if name.split(".")[0] in ROOMS]
    assert faults == []


def test_relative_imports_stay_inside_a_room() -> None:
    faults = []
    for path in SOURCES:
        depth = len(path.relative_to(ROOT).parts) - 1
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.level > depth:
                faults.append(f"{path}:{node.lineno}")
    assert faults == []


def test_files_and_functions_can_be_read_in_one_sitting() -> None:
    faults = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 600:
            faults.append(f"{path}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 80:
                    faults.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert faults == []


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "misc", "helpers", "helper", "common", "base"}
    assert [path for path in SOURCES if path.stem in vague] == []


def test_no_pickle_on_the_way_in() -> None:
    banned = ("pickle.load", "torch.load(", "allow_pickle=True", "yaml.load(", "eval(", "exec(")
    faults = [
        f"{path}: {word}"
        for path in SOURCES
        for word in banned
        if word in path.read_text(encoding="utf-8").replace(".eval()", "").replace("safetensors.torch.load(", "")
    ]
    assert faults == []


@pytest.mark.parametrize("module", ["moonshift", "moonshift.core.config", "moonshift.core.plan"])
def test_light_imports_stay_light(module: str) -> None:
    heavy = "{'torch', 'ray', 'prefect', 'mlflow', 'transformers', 'sqlalchemy'}"
    code = f"import sys, {module}; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_wheel_holds_what_the_import_name_needs() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["moonshift"]
    for room in ROOMS:
        link = ROOT / "moonshift" / room
        assert link.is_symlink() and not link.readlink().is_absolute() and link.resolve() == ROOT / room
