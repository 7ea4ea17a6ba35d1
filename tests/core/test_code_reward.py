"""Code answers: which part of a response is the program, which tests a prompt holds, and when outputs are the same."""

from typing import Any

import pytest

from moonshift.core.errors import RewardError
from moonshift.core.rewards.code import CodeTest, extract_code, read_tests, same_output, verdict


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("first\n```py\na\n```\nbetter:\n```python3 title=x\nb\n```\ndone", "b\n"),
        ("```python\ncode\n```\n```bash\nrun it\n```", "code\n"),
        ("  ```python\n  indented\n  ```", "  indented\n"),
        ("```python\nnever closed", None),
        ("print(1)", None),
        ("", None),
        ("```python\ns = '``` inside'\n```", "s = '``` inside'\n"),
    ],
)
def test_the_last_closed_block_in_python_is_the_program(response: str, code: str | None) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "answer",
    [
        [{"input": "1", "output": "2"}, {"input": "3\n4", "output": 5}],
        '[{"input": "1", "output": "2"}, {"input": ["3", "4"], "output": 5}]',
        {"inputs": ["1", ["3", 4]], "outputs": ["2", 5]},
        '{"inputs": ["1", "3\\n4"], "outputs": ["2", "5"]}',
    ],
)
def test_tests_are_read_in_every_shape(answer: Any) -> None:
    assert read_tests(answer, "u") == [CodeTest(input="1", output="2"), CodeTest(input="3\n4", output="5")]


@pytest.mark.parametrize("answer", ["42", "", None, [], {}, [1], {"inputs": ["1"], "outputs": []}, [{"input": "1"}]])
def test_an_answer_without_tests_is_refused(answer: Any) -> None:
    with pytest.raises(RewardError, match="row-7: its answer holds no tests"):
        read_tests(answer, "row-7")


def test_outputs_are_compared_line_by_line() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert same_output("", "\n")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")


def test_the_verdict_is_all_or_nothing_unless_asked() -> None:
    assert verdict(2, 4, has_code=True) == {"score": 0.0, "passed": 0.5, "has_code": 1.0}
    assert verdict(2, 4, has_code=True, partial=True)["score"] == 0.5
    assert verdict(4, 4, has_code=True)["score"] == 1.0
