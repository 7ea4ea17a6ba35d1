"""Rewards: loading by name or file, checking of results, and the built-in ones."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonshift.core.datasets import load_prompts
from moonshift.core.errors import RewardError
from moonshift.core.rewards import LoadedReward, RewardSet, WeightedReward, load_reward, reward_of
from moonshift.core.rewards.exact import exact_match
from moonshift.core.rewards.reasoning import extract_answer, reasoning_gym_reward
from moonshift.core.types import Prompt, Sample

CHAIN_SUM = "reasoning_gym:chain_sum?size=8&seed=1&min_terms=2&max_terms=2&min_digits=2&max_digits=2"


def sample(response: str = "2", answer: Any = "2", extra: dict[str, Any] | None = None) -> Sample:
    messages = ({"role": "user", "content": "1+1?"},)
    prompt = Prompt(uid="a:0", messages=messages, text="1+1?", answer=answer, source="a", extra=extra or {})
    return respond(prompt, response)


def respond(prompt: Prompt, response: str) -> Sample:
    return Sample(prompt=prompt, response=response, finish_reason="stop", response_tokens=1)


def gym_prompts(source: str = CHAIN_SUM) -> list[Prompt]:
    return load_prompts([source], prompt_key="prompt", answer_key="answer", system_prompt=None)


def returning(value: Any) -> Callable[[Sample], Any]:
    def reward(sample: Sample) -> Any:
        return value

    return reward


def alone(reward: Any) -> RewardSet:
    loaded = reward if isinstance(reward, LoadedReward) else reward_of(reward, {}, spec=reward.__qualname__)
    return RewardSet([WeightedReward(reward=loaded)])


def score_sample(reward: Any, each: Sample) -> dict[str, float]:
    (graded,) = alone(reward).grade([each])
    if graded.components is None:
        raise RewardError(graded.error)
    return graded.components


def check_reward(reward: Any, prompts: list[Prompt]) -> None:
    alone(reward).check(prompts)


def write(file: Path, code: str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, "utf-8")
    return str(file)


def test_a_reward_loads_from_a_module_and_is_called_with_its_arguments() -> None:
    loaded = load_reward("moonshift.core.rewards.exact:exact_match", {})
    assert score_sample(loaded, sample()) == {"score": 1.0}
    weighted = load_reward("moonshift.core.rewards.reasoning:reasoning_gym_reward", {"format_weight": 0.25})
    prompt = gym_prompts()[0]
    right = f"<answer>{prompt.answer}</answer>"
    assert score_sample(weighted, respond(prompt, right)) == {"score": 1.0, "accuracy": 1.0, "format": 1.0}
    assert score_sample(weighted, respond(prompt, prompt.answer))["score"] == 0.75


def test_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    code = (
        "from dataclasses import dataclass\n@dataclass\nclass R:\n    v: float\ndef r(sample, **kw): return R({}).v\n"
    )
    specs = [write(tmp_path / folder / "reward.py", code.format(v)) + ":r" for folder, v in (("a", 0.5), ("b", 0.25))]
    loaded = [load_reward(spec, {"further": 1}) for spec in specs]
    assert [score_sample(reward, sample())["score"] for reward in loaded] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("spec", "kwargs", "reason"),
    [
        ("reward", {}, "write package.module:name or path/to/file.py:name"),
        ("no_such_package.rewards:r", {}, "there is no module 'no_such_package'"),
        ("moonshift.core.rewards.exakt:r", {}, "there is no module 'moonshift.core.rewards.exakt'"),
        ("moonshift.core.rewards.exact:exact_mach", {}, "did you mean 'exact_match'?"),
        ("moonshift.core.rewards.exact:zzz", {}, "Functions there: exact_match"),
        ("{folder}/none.py:r", {}, "no such file"),
        ("{folder}/r.py:number", {}, "is a int, not a function"),
        ("{folder}/r.py:two", {}, "signature is (a, b)"),
        ("{folder}/r.py:none", {}, "is called as (sample), but"),
        ("{folder}/r.py:one", {"scale": 2}, "called as (sample, scale=…), but its signature is (sample)"),
        ("{folder}/broken.py:r", {}, "importing it raised ZeroDivisionError"),
        ("{folder}/syntax.py:r", {}, "importing it raised SyntaxError"),
        ("{folder}/needs.py:r", {}, "No module named 'no_such_part'"),
        ("{folder}/leaves.py:r", {}, "importing it raised SystemExit"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(
    tmp_path: Path, spec: str, kwargs: dict[str, Any], reason: str
) -> None:
    write(tmp_path / "r.py", "number = 1\ndef two(a, b): return 1\ndef none(): return 1\ndef one(sample): return 1\n")
    write(tmp_path / "broken.py", "1 / 0\n")
    write(tmp_path / "syntax.py", "def r(:\n")
    write(tmp_path / "needs.py", "import no_such_part\n")
    write(tmp_path / "leaves.py", "raise SystemExit(0)\n")
    spec = spec.format(folder=tmp_path)
    with pytest.raises(RewardError) as raised:
        load_reward(spec, kwargs)
    assert spec in str(raised.value)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("value", "score"), [(True, 1.0), (3, 3.0), (-0.5, -0.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.True_, 1)]
)
def test_every_finite_number_is_a_score(value: Any, score: float) -> None:
    result = score_sample(returning(value), sample())
    assert result == {"score": score}
    assert type(result["score"]) is float


def test_components_are_kept_beside_the_score() -> None:
    assert score_sample(returning({"score": 1, "length": np.float64(2)}), sample()) == {"score": 1.0, "length": 2.0}


@pytest.mark.parametrize(
    "value",
    [
        None,
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        "1.0",
        [1.0],
        (1.0,),
        np.array([1.0]),
        np.float64("nan"),
        1j,
        {"accuracy": 1.0},
        {"score": None},
        {"score": 1.0, "length": "3"},
    ],
)
def test_what_is_no_finite_number_is_an_error_and_never_zero(value: Any) -> None:
    with pytest.raises(RewardError, match=r"returning.*on a:0 returned") as raised:
        score_sample(returning(value), sample())
    assert len(str(raised.value)) < 400


def test_an_exception_keeps_uid_and_the_users_own_traceback_and_can_be_pickled(tmp_path: Path) -> None:
    code = "def inner(x):\n    return 1 / x\n\ndef r(sample):\n    return inner(0)\n"
    spec = write(tmp_path / "r.py", code) + ":r"
    with pytest.raises(RewardError) as raised:
        score_sample(load_reward(spec, {}), sample())
    message = str(raised.value)
    for part in (spec, "ZeroDivisionError", "a:0", "return inner(0)", "line 2, in inner"):
        assert part in message
    assert str(pickle.loads(pickle.dumps(raised.value))) == message


def test_a_reward_that_exits_is_an_error_and_control_c_still_stops() -> None:
    def leaves(sample: Sample) -> float:
        raise SystemExit(0)

    def stopped(sample: Sample) -> float:
        raise KeyboardInterrupt

    with pytest.raises(RewardError, match="SystemExit"):
        score_sample(leaves, sample())
    with pytest.raises(KeyboardInterrupt):
        score_sample(stopped, sample())


@pytest.mark.case("D03")
def test_further_columns_reach_the_reward_and_a_missing_one_fails_before_the_start(tmp_path: Path) -> None:
    code = "def r(sample):\n    return float(sample.prompt.answer == '2' and sample.prompt.extra['difficulty'] == 3)\n"
    reward = load_reward(write(tmp_path / "r.py", code) + ":r", {})
    rows = [sample(response=text, extra={"difficulty": 3}) for text in ("2", "3")]
    assert [score_sample(reward, each)["score"] for each in rows] == [1.0, 1.0]
    check_reward(reward, [rows[0].prompt])
    with pytest.raises(RewardError, match=r"KeyError on a:0: 'difficulty'\nColumns .*: 'level', 'topic'"):
        check_reward(reward, [sample(extra={"level": 3, "topic": "x"}).prompt])


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [("2", "2", 1.0), (" 2\n", "2", 1.0), ("2.0", "2", 0.0), ("", "2", 0.0), ("seven", ["7", "seven"], 1.0)],
)
def test_exact_match_compares_texts(response: str, answer: Any, score: float) -> None:
    assert exact_match(sample(response, answer)) == score


@pytest.mark.parametrize(
    ("response", "right", "answer"),
    [
        ("12 + 34 = 46.", "46", "46"),
        ("The answer is **46**", "46", "46"),
        ("5 - 9 = -4", "-4", "-4"),
        ("5-9=-4", "-4", "-4"),
        ("5 - 9 = −4", "-4", "-4"),
        ("7-3", "3", "3"),
        ("so 1,234 it is", "1234", "1,234"),
        ("about 3.5.", "3.5", "3.5"),
        ("$46", "46", "46"),
        ("none", "46", ""),
        ("", "46", ""),
        ("", "word", ""),
        ("Step one.\nAnswer: **nus**.\n", "sun", "nus"),
        ("nus", "sun", "nus"),
    ],
)
def test_the_answer_is_found_in_the_response(response: str, right: str, answer: str) -> None:
    assert extract_answer(response, right) == (answer, False)


def test_the_last_tagged_answer_counts() -> None:
    assert extract_answer("<answer>1</answer> or <answer>\n 46 </answer> 7", "46") == ("46", True)
    assert extract_answer("<answer>46", "46") == ("46", False)


def test_the_tasks_own_verifier_gives_the_score() -> None:
    for prompt in gym_prompts():
        right = respond(prompt, f"{prompt.extra['reasoning_gym']['metadata']['expression']} = {prompt.answer}")
        assert reasoning_gym_reward(right) == {"score": 1.0, "accuracy": 1.0, "format": 0.0}
        assert reasoning_gym_reward(respond(prompt, f"1{prompt.answer}"))["score"] == 0.0
        assert reasoning_gym_reward(respond(prompt, f"{prompt.answer}.0"))["score"] == 1.0
        assert reasoning_gym_reward(respond(prompt, ""))["score"] == 0.0
    check_reward(reasoning_gym_reward, gym_prompts())


def test_part_marks_are_kept_for_answers_that_are_no_numbers() -> None:
    prompt = gym_prompts("reasoning_gym:spell_backward?size=1&seed=1")[0]
    assert reasoning_gym_reward(respond(prompt, prompt.answer)) == {"score": 1.0, "accuracy": 1.0, "format": 0.0}
    part = reasoning_gym_reward(respond(prompt, prompt.answer[:-1] + "?"))
    assert 0.0 < part["score"] < 1.0
    assert part["accuracy"] == 0.0


def test_the_verifier_refuses_other_prompts_and_weights() -> None:
    with pytest.raises(RewardError, match="is not from a source reasoning_gym"):
        reasoning_gym_reward(sample())
    with pytest.raises(RewardError, match=r"format_weight is 2"):
        reasoning_gym_reward(respond(gym_prompts()[0], "1"), format_weight=2.0)
