"""The built-in rewards for form, choice, structure and length."""

import json
from typing import Any

import pytest

from moonshift.core.errors import RewardError
from moonshift.core.rewards.choice import chosen_letter, multiple_choice
from moonshift.core.rewards.json_schema import json_schema_reward
from moonshift.core.rewards.length import finished_reward, length_reward
from moonshift.core.rewards.pattern import format_reward, regex_reward
from moonshift.core.types import Prompt, Sample


def sample(response: str = "", answer: Any = "B", tokens: int = 1, reason: str = "stop", **extra: Any) -> Sample:
    prompt = Prompt(uid="a:0", messages=(), text="?", answer=answer, source="a", extra=extra)
    return Sample(prompt=prompt, response=response, finish_reason=reason, response_tokens=tokens)


def test_a_pattern_is_found_or_is_the_whole_response() -> None:
    assert regex_reward(sample("so 42 it is"), pattern=r"\d+") == 1.0
    assert regex_reward(sample("so 42 it is"), pattern=r"\d+", mode="fullmatch") == 0.0
    assert regex_reward(sample(" 42\n"), pattern=r"\d+", mode="fullmatch") == 1.0
    assert regex_reward(sample("a\nb"), pattern="a.b") == 1.0
    with pytest.raises(RewardError, match="is no regular expression: missing"):
        regex_reward(sample(), pattern="(")
    with pytest.raises(RewardError, match="use search or fullmatch"):
        regex_reward(sample(), pattern="a", mode="match")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("Well. <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> done", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think><answer>a</think>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_tags_stand_in_order_and_nothing_stands_outside(response: str, score: float) -> None:
    assert format_reward(sample(response)) == score


def test_other_tags_can_be_asked_for() -> None:
    assert format_reward(sample("<plan>a</plan>"), tags=["plan"]) == 1.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("\\boxed{B} or \\boxed{", None),
        ("<answer>b</answer>", "B"),
        ("<answer>B) seven</answer>", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B).", "B"),
        ("The answer is **B**", "B"),
        ("Answer: B", "B"),
        ("**Answer:** B", "B"),
        ("The correct option is B) seven", "B"),
        ("The answer is option C", "C"),
        ("The answer is A. Wait, the answer is B.", "B"),
        ("B", "B"),
        ("B) seven", "B"),
        ("(B)", "B"),
        ("B. seven", "B"),
        ("It is not (A), it is (B)", "B"),
        ("The answer is A dog", None),
        ("A dog barks", None),
        ("I think so", None),
        ("Better not", None),
        ("The answer is E", None),
        ("", None),
        ("<think>The answer is B", None),
        ("<think>(A)</think>The answer is B", "B"),
    ],
)
def test_the_letter_that_a_response_settles_on(response: str, letter: str | None) -> None:
    assert chosen_letter(response) == letter


def test_multiple_choice_grades_and_refuses_rows_without_a_letter() -> None:
    assert multiple_choice(sample("The answer is B.", "(B)")) == {"score": 1.0, "answered": 1.0}
    assert multiple_choice(sample("The answer is C.", "B")) == {"score": 0.0, "answered": 1.0}
    assert multiple_choice(sample("No idea", "B")) == {"score": 0.0, "answered": 0.0}
    assert multiple_choice(sample("E", "E"), letters="ABCDE")["score"] == 1.0
    with pytest.raises(RewardError, match="is none of the choices ABCD"):
        multiple_choice(sample("B", "seven"))
    with pytest.raises(RewardError, match="write the choices as large letters"):
        multiple_choice(sample("B", "B"), letters="[B]")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "score", "parsed"),
    [
        ('{"name": "a", "age": 3}', 1.0, 1.0),
        ('Here:\n```json\n{"name": "a"}\n```\nDone.', 1.0, 1.0),
        ('```\n{"name": 1}\n```\n```json\n{"name": "a"}\n```', 1.0, 1.0),
        ('{"name": "a", "age": -1}', 0.0, 1.0),
        ('{"name": "a", "more": 1}', 0.0, 1.0),
        ("{}", 0.0, 1.0),
        ("[1]", 0.0, 1.0),
        ('{"name": "a"} and more', 0.0, 0.0),
        ('{"name": "a", "age": NaN}', 0.0, 0.0),
        ('{"name": "a", "name": "b"}', 0.0, 0.0),
        ('{"name": "a"', 0.0, 0.0),
        ("", 0.0, 0.0),
        ("[" * 200_000, 0.0, 0.0),
    ],
    ids=range(13),
)
def test_json_is_parsed_strictly_and_held_against_the_schema(response: str, score: float, parsed: float) -> None:
    assert json_schema_reward(sample(response), schema=SCHEMA) == {"score": score, "parsed": parsed}


def test_the_schema_may_come_with_the_row() -> None:
    good = '{"name": "a"}'
    assert json_schema_reward(sample(good, answer=SCHEMA))["score"] == 1.0
    assert json_schema_reward(sample(good, answer=json.dumps(SCHEMA)))["score"] == 1.0
    assert json_schema_reward(sample(good, wanted=SCHEMA), column="wanted")["score"] == 1.0
    with pytest.raises(RewardError, match=r"has no column 'wanted' .*Columns: 'other'"):
        json_schema_reward(sample(good, other=1), column="wanted")
    with pytest.raises(RewardError, match="the schema is no JSON"):
        json_schema_reward(sample(good, answer="a name"))
    with pytest.raises(RewardError, match=r"is no JSON schema: .*'strin' is not valid"):
        json_schema_reward(sample(good), schema={"type": "strin"})


def test_no_reference_of_a_schema_is_fetched() -> None:
    with pytest.raises(RewardError, match=r"points to http://127\.0\.0\.1:9/s\.json, which is not fetched"):
        json_schema_reward(sample("1"), schema={"$ref": "http://127.0.0.1:9/s.json"})
    local = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert json_schema_reward(sample("1"), schema=local)["score"] == 1.0


@pytest.mark.parametrize(("tokens", "score"), [(9, 0.9), (10, 1.0), (100, 1.0), (105, 0.5), (110, 0.0), (500, 0.0)])
def test_length_falls_off_outside_of_its_bounds(tokens: int, score: float) -> None:
    assert length_reward(sample(tokens=tokens), min_tokens=10, max_tokens=100, falloff=10) == pytest.approx(score)


def test_length_has_hard_bounds_without_a_falloff_and_refuses_contradictions() -> None:
    assert length_reward(sample(tokens=101), max_tokens=100) == 0.0
    assert length_reward(sample(tokens=10**6)) == 1.0
    with pytest.raises(RewardError, match="min_tokens=5, max_tokens=2"):
        length_reward(sample(), min_tokens=5, max_tokens=2)


def test_a_response_that_was_cut_off_is_not_finished() -> None:
    assert finished_reward(sample(reason="stop")) == 1.0
    assert finished_reward(sample(reason="length")) == 0.0
