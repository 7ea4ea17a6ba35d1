"""Verdicts on mathematics: the public cases, a truth table, and inputs that must never be evaluated."""

import csv
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moonshift.core.errors import RewardError
from moonshift.core.rewards.expense import too_expensive
from moonshift.core.rewards.final_answer import final_answer
from moonshift.core.rewards.latex_text import normalized
from moonshift.core.rewards.math import grade_math, math_reward
from moonshift.core.types import Prompt, Sample

with (Path(__file__).parent / "math_truth.csv").open(encoding="utf-8", newline="") as _file:
    TRUTH = list(csv.DictReader(_file))


def test_the_truth_table_is_large_and_has_both_verdicts() -> None:
    assert len(TRUTH) >= 200
    assert len({(row["response"], row["answer"]) for row in TRUTH}) == len(TRUTH)
    assert min(sum(row["verdict"] == verdict for row in TRUTH) for verdict in "01") >= 80


@pytest.mark.parametrize("row", TRUTH, ids=[f"{place}-{row['why']}" for place, row in enumerate(TRUTH)])
def test_the_truth_table_holds(row: dict[str, str]) -> None:
    verdict = grade_math(row["response"], row["answer"])
    assert verdict.right == (row["verdict"] == "1"), verdict


def rows(case: str, values: list[list[Any]]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.case(case), id=f"{case}-{place}") for place, row in enumerate(values)]


FILLER = " and the reasoning above confirms this result is consistent." * 8


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        *rows("M01", [["\\boxed{\\frac{1}{2}}", "0.5", 1], ["\\boxed{\\text{E}}", "E", 1],
                      ["\\boxed{\\sqrt{2+\\sqrt{3}}}", "\\sqrt{2+\\sqrt{3}}", 1], ["\\boxed{\\frac{a}{b}", "a/b", 0]]),
        *rows("M02", [["\\boxed{2/3}", "\\frac{2}{3}", 1], ["\\boxed{\\frac12}", "\\frac{1}{2}", 1],
                      ["\\boxed{-\\frac{2}{3}}", "\\frac{2}{3}", 0], ["\\boxed{\\frac{-2}{3}}", "-\\frac{2}{3}", 1],
                      ["\\boxed{\\dfrac34}", "0.75", 1], ["\\boxed{2}", "2/3", 0]]),
        *rows("M03", [["\\boxed{1,000}", "1000", 1], ["\\boxed{1{,}000}", "1000", 1],
                      ["\\boxed{1,000,000}", "1000000", 1], ["\\boxed{1,2}", "12", 0], ["\\boxed{1000}", "1,000", 1]]),
        *rows("M04", [[f"2+40=42\n#### 42\n{FILLER}", "42", 1], ["2+40=42\n#### 42\n", "42", 1]]),
        *rows("M06", [["\\boxed{4} wait, actually \\boxed{", "4", 0], ["first \\boxed{4} then \\boxed{3}", "4", 0],
                      ["first \\boxed{3} then \\boxed{4}", "4", 1]]),
        *rows("M07", [["\\boxed{\\frac{1}{2004!}}", "\\frac{1}{2006!}", 0], ["\\boxed{\\pm 2021}", "2021", 0],
                      ["\\boxed{D=(0,1.5)}", "D=(0,1)", 0], ["\\boxed{1:00}", "12:00", 0],
                      ["\\boxed{n=1,2,3}", "n=2,3,4", 0]]),
        *rows("M08", [["\\boxed{7.41\\%}", "7.41\\%", 1], ["\\boxed{50\\%}", "0.5", 1],
                      ["\\boxed{5\\text{ cm}}", "5", 1], ["\\boxed{90^\\circ}", "90", 1],
                      ["\\boxed{\\$12.50}", "12.5", 1], ["\\boxed{50}", "0.5", 0]]),
        *rows("M12", [["\\boxed{1.5\\times 10^{3}}", "1500", 1], ["\\boxed{3e8}", "300000000", 1],
                      ["\\boxed{-3}", "3", 0], ["\\[ \\boxed{42} \\]", "42", 1], ["\\boxed{x=5}", "5", 1],
                      ["\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1], ["\\boxed{2^{10}}", "1024", 1]]),
    ],
)  # fmt: skip
def test_public_cases(response: str, answer: str, right: int) -> None:
    assert grade_math(response, answer).right == bool(right)


@pytest.mark.case("M05")
@pytest.mark.parametrize(
    ("response", "answer", "right"), [["Answer: \\boxed{5}", "5", 1], ["5", "5", 0], ["\\boxed{}", "5", 0]]
)
def test_strict_boxed_mode_strips_one_box_once(response: str, answer: str, right: int) -> None:
    assert grade_math(response, answer, extraction="boxed").right == bool(right)


@pytest.mark.parametrize(
    "formula",
    [
        "10^{10^{10}}",
        "9^{9^{9^9}}",
        "2**9**9**9",
        "(10^{1000})!",
        "99999!",
        "3!!",
        "(100!)!",
        "((2^{9999})^{9999})",
        "(2^{9999})^{(9999)}",
        "2^{9999\\cdot9999}",
        "10^{999999999999}",
        "(x+y+z+w)^{400}",
        "\\sum_{k=1}^{10^9} k",
        "\\prod_{k=1}^{n} k",
        "\\int_0^1 x dx",
        "\\Gamma(10^9)",
        "\\exp(\\exp(\\exp(10)))",
        "\\binom{10^9}{5}",
        "\\binom{1000000}{500000}",
        "(" * 30 + "1" + ")" * 30,
        "9" * 1900,
        "x+" * 500 + "1",
    ],
)
def test_dear_formulas_are_compared_as_texts_only(formula: str) -> None:
    assert too_expensive(normalized(formula)) is not None
    started = time.perf_counter()
    assert not grade_math(f"\\boxed{{{formula}}}", "5").right
    assert not grade_math("\\boxed{5}", formula).right
    assert grade_math(f"\\boxed{{{formula}}}", formula).right
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    "formula", ["2^{2004}", "5!", "2006!", "(x+1)^{12}", "\\binom{52}{5}", "x^{2^{2}}", "e^{-x^2}"]
)
def test_ordinary_formulas_are_evaluated(formula: str) -> None:
    assert too_expensive(normalized(formula)) is None


@pytest.mark.parametrize(
    "piece",
    [
        "$",
        "answer is ",
        "1,000",
        "<answer>",
        "####\n",
        "-",
        "\\boxed{",
        "\\boxed{5} and ",
        "(",
        "\\frac",
        "<think>",
        "9",
    ],
)
def test_time_grows_with_the_length_and_no_faster(piece: str) -> None:
    started = time.perf_counter()
    verdict = grade_math(piece * (400_000 // len(piece)), "\\frac{1}{7}")
    assert not verdict.right
    assert time.perf_counter() - started < 5.0


def test_large_numbers_in_formulas_are_told_apart_at_once() -> None:
    started = time.perf_counter()
    assert not grade_math("\\boxed{\\frac{x}{2004!}}", "\\log_2 3").right
    assert not grade_math("\\boxed{x^{9999}+\\frac{1}{50!}}", "x^{9999}").right
    assert grade_math("\\boxed{\\frac{x}{2004!}+1}", "1+\\frac{x}{2004!}").right
    assert time.perf_counter() - started < 3.0


def test_verdicts_are_the_same_in_a_thread() -> None:
    found: list[bool] = []
    graded = [("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"), ("\\boxed{x(x+1)}", "x^2+x"), ("\\boxed{x}", "y+1")]
    thread = threading.Thread(target=lambda: found.extend(grade_math(*each).right for each in graded))
    thread.start()
    thread.join()
    assert found == [True, True, False]


def test_the_reason_names_what_was_compared() -> None:
    assert grade_math("so \\boxed{3}", "4").reason == "is not 4"
    assert grade_math("I do not know this.", "4").reason == "no final answer"
    assert "not evaluated: a power or factorial in an exponent" in grade_math("\\boxed{9^{9^{99}}}", "4").reason


def test_the_reward_takes_alternatives_and_says_whether_there_was_an_answer() -> None:
    prompt = Prompt(uid="a:0", messages=(), text="", answer=["5", "6"], source="a", extra={})

    def reward(response: str, extraction: Any = "flexible") -> dict[str, float]:
        sample = Sample(prompt=prompt, response=response, finish_reason="stop", response_tokens=1)
        return math_reward(sample, extraction=extraction)

    assert reward("\\boxed{6}") == {"score": 1.0, "answered": 1.0}
    assert reward("\\boxed{7}") == {"score": 0.0, "answered": 1.0}
    assert reward("5", "boxed") == {"score": 0.0, "answered": 0.0}
    with pytest.raises(RewardError, match="use boxed or flexible"):
        reward("5", "loose")


def test_the_answer_is_shown_as_it_was_written() -> None:
    assert final_answer("so \\boxed{ \\frac{1}{2} }.") == "\\frac{1}{2}"
    assert final_answer("The answer is **7 apples**.") == "7 apples"
    assert final_answer("#### 42\nDone.") == "42"


@pytest.mark.slow
def test_the_docs_list_every_wrong_verdict_of_the_library_alone() -> None:
    """`verify(parse("$answer$"), parse(response))` with its defaults, on what can be evaluated, against the table."""
    from math_verify import parse, verify

    docs = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = docs.partition("### Where math-verify")[2]
    listed = {line for line in table.splitlines() if line.startswith("| `")}
    found = set()
    for row in TRUTH:
        answer = row["answer"]
        if too_expensive(normalized(answer)):
            continue
        is_plain = not any(mark in answer for mark in ("$", "####", "boxed"))
        verdict = verify(parse(f"${answer}$" if is_plain else answer), parse(row["response"]))
        if verdict != (row["verdict"] == "1"):
            right, wrong = ("right", "wrong") if row["verdict"] == "1" else ("wrong", "right")
            found.add(f"| `{row['response']}` | `{answer}` | {right} | {wrong} | {row['why']} |")
    assert found == listed
