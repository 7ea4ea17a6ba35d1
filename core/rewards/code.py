"""Grading code answers: the program in a response, the tests of a prompt, and the verdict on what the program wrote.

Nothing is run here; see `moonshift.infra.sandbox`. Invariant: an expected output never goes where the program is, so a
response cannot read it; a test written as Python code runs in the program's own process and can be cheated by one that
sets out to.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from ..errors import RewardError

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
_SHAPES = (
    'a list of {"input": …, "output": …}, a mapping {"inputs": […], "outputs": […]}, either of them as JSON text, or '
    "Python code with assert"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One run of a program: what it reads and what it must write, or code that is run after it."""

    input: str = ""
    output: str | None = None
    """None: `code` decides"""
    code: str = ""


def extract_code(response: str) -> str | None:
    """The last closed code block in Python or in no named language; None where there is none.

    Example: a response whose last block is ```` ```python\\nprint(1)\\n``` ```` gives `print(1)\\n`.
    """
    blocks = [code for language, code in _FENCE.findall(response) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


def read_tests(answer: Any, uid: str) -> list[CodeTest]:
    """The tests that a prompt's answer holds; raises RewardError naming the prompt where it holds none."""
    given = answer
    if isinstance(answer, str):
        try:
            given = json.loads(answer)
        except ValueError:
            if "assert" in answer:
                return [CodeTest(code=answer)]
    if isinstance(given, dict):
        given = _paired(given)
    is_list = isinstance(given, list) and bool(given)
    if not is_list or not all(isinstance(each, dict) and {"input", "output"} <= each.keys() for each in given):
        raise RewardError(f"{uid}: its answer holds no tests; write {_SHAPES}.")
    return [CodeTest(input=_lines(each["input"]), output=_lines(each["output"])) for each in given]


def _paired(given: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return []
    return [{"input": text, "output": output} for text, output in zip(inputs, outputs, strict=True)]


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(written: str, expected: str) -> bool:
    """Equal line by line, blanks at the ends of lines and empty lines at the end aside."""
    return _trimmed(written) == _trimmed(expected)


def _trimmed(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def with_test(program: str, test: CodeTest, token: str) -> str:
    """The program to run for a test; one with code of its own writes `token` at the end when all held."""
    return program if test.output is not None else f"{program}\n\n{test.code}\n\nprint({token!r})\n"


def verdict(passed: int, total: int, *, has_code: bool, partial: bool = False) -> dict[str, float]:
    """`score` is 1 where all tests passed, else 0, or the share with `partial`; `passed` is the share."""
    share = passed / total
    return {"score": share if partial else float(passed == total), "passed": share, "has_code": float(has_code)}
