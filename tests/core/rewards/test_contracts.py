"""Reward functions in every form that is taken as it is, and what each is called with."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moonshift.core.errors import RewardError
from moonshift.core.rewards import Contract, Graded, RewardSet, WeightedReward, load_reward, reward_of
from moonshift.core.types import Prompt, Sample

TURNS = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"})


def prompt(**changes: Any) -> Prompt:
    values: dict[str, Any] = {
        "uid": "a:0", "messages": ({"role": "user", "content": "1+1?"},), "text": "1+1?", "answer": "2", "source": "a",
        "extra": {},
    }  # fmt: skip
    return Prompt(**(values | changes))


def samples(*responses: str, of: Prompt | None = None) -> list[Sample]:
    return [
        Sample(prompt=of or prompt(uid=f"a:{row}"), response=text, finish_reason="stop", response_tokens=len(text))
        for row, text in enumerate(responses)
    ]


def grade(function: Any, given: list[Sample], contract: str = "auto", **kwargs: Any) -> list[Graded]:
    reward = reward_of(function, kwargs, spec="r.py:r", contract=contract)
    return RewardSet([WeightedReward(reward=reward)]).grade(given)


def scores(graded: list[Graded]) -> list[float]:
    assert [each.error for each in graded] == [None] * len(graded)
    return [each.components["score"] for each in graded if each.components]


def from_file(folder: Path, code: str, name: str = "r", **kwargs: Any) -> RewardSet:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "reward.py"
    file.write_text(code, "utf-8")
    return RewardSet([WeightedReward(reward=load_reward(f"{file}:{name}", kwargs))])


def test_the_form_is_read_off_the_signature() -> None:
    def verl(data_source, solution_str, ground_truth, extra_info=None): ...
    def verl_batch(data_sources, solution_strs, ground_truths, extra_infos): ...
    def trl(completions, **kwargs): ...
    def trl_keywords(**kwargs): ...
    def listed(batch: list[Sample]): ...

    forms = {
        Contract.VERL: verl, Contract.VERL_BATCH: verl_batch, Contract.SAMPLES: listed, Contract.TRL: trl,
    }  # fmt: skip
    for form, function in forms.items():
        assert reward_of(function, {}, spec="x").contract is form
    assert reward_of(trl_keywords, {}, spec="x").contract is Contract.TRL
    assert reward_of(lambda samples: [], {}, spec="x").contract is Contract.SAMPLES
    assert reward_of(lambda s: 0.0, {}, spec="x").contract is Contract.SAMPLE
    assert reward_of(lambda s: 0.0, {}, spec="x", contract="samples").contract is Contract.SAMPLES


def test_a_batched_function_gets_all_samples_in_order() -> None:
    def r(samples: list[Sample], scale: float) -> list[Any]:
        return [{"score": scale * float(each.response), "n": len(samples)} for each in samples]

    graded = grade(r, samples("1", "2", "3"), scale=0.5)
    assert [each.components for each in graded] == [{"score": s, "n": 3.0} for s in (0.5, 1.0, 1.5)]


def test_verls_function_gets_its_four_values_and_its_texts_are_left_out() -> None:
    seen: list[Any] = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return {"score": 1.0, "acc": True, "pred": "2", "other": None}

    row = prompt(source="gsm8k", extra={"extra_info": {"index": 7}, "ability": "math"})
    graded = grade(compute_score, samples("#### 2", of=row))
    assert graded == [Graded({"score": 1.0, "acc": 1.0}, None)]
    assert seen == [("gsm8k", "#### 2", "2", {"index": 7}, {})]

    def plain(solution_str, ground_truth, extra_info):
        return float(solution_str == ground_truth and extra_info == {"level": 3})

    assert scores(grade(plain, samples("2", "3", of=prompt(extra={"level": 3})))) == [1.0, 0.0]


def test_verls_batched_function_gets_lists() -> None:
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        assert data_sources == ["a", "a"] and extra_infos == [{}, {}]
        return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]

    assert scores(grade(compute_score, samples("2", "3"))) == [1.0, 0.0]


@pytest.mark.case("D03")
def test_every_column_reaches_a_trl_reward_and_a_missing_one_fails_before_the_start(tmp_path: Path) -> None:
    code = (
        "def r(completions, answer, difficulty, **kw):\n"
        "    return [float(a=='2' and d==3) for a,d in zip(answer,difficulty)]"
    )
    rewards = from_file(tmp_path, code)
    row = prompt(extra={"difficulty": 3})
    assert scores(rewards.grade(samples("2", "2", of=row))) == [1.0, 1.0]
    rewards.check([row])
    with pytest.raises(RewardError, match=r"takes 'difficulty', which the data from a lacks\. Columns: .*'level'"):
        rewards.check([prompt(extra={"level": 3})])


def test_the_answer_has_the_name_of_its_column() -> None:
    def r(completions, solution, answer):
        return [float(c == s == a) for c, s, a in zip(completions, solution, answer, strict=True)]

    assert scores(grade(r, samples("2", "3", of=prompt(answer_column="solution")))) == [1.0, 0.0]


def test_trls_prompts_and_completions_are_turns_where_the_row_held_turns() -> None:
    seen: list[Any] = []

    def r(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [0.5] * len(completions)

    assert scores(grade(r, samples("2"))) == [0.5]
    assert scores(grade(r, samples("2", of=prompt(chat=True, messages=TURNS)))) == [0.5]
    text, chat = seen
    assert text == (["1+1?"], ["2"], {"answer": ["2"]})
    assert chat[0] == [list(TURNS)] and chat[1] == [[{"role": "assistant", "content": "2"}]]


def test_a_column_that_one_row_lacks_is_none_there() -> None:
    def r(completions, level):
        return [0.0 if each is None else float(each) for each in level]

    rows = [*samples("x", of=prompt(extra={"level": 2})), *samples("y", of=prompt())]
    assert scores(grade(r, rows)) == [2.0, 0.0]


@pytest.mark.case("R01")
@pytest.mark.parametrize(
    ("code", "got"),
    [
        ("[1.0]", "expected 4, got 1"),
        ("[1.0] * 3", "expected 4, got 3"),
        ("[1.0] * 5", "expected 4, got 5"),
        ("1.0", "expected a list of 4 values"),
        ("(1.0 for _ in completions)", "expected a list of 4 values"),
        ("{'score': 1.0}", "expected a list of 4 values"),
        ("'1111'", "expected a list of 4 values"),
        ("None", "expected a list of 4 values"),
    ],
)
def test_a_wrong_number_of_rewards_is_never_spread(tmp_path: Path, code: str, got: str) -> None:
    graded = from_file(tmp_path, f"def r(completions, **kw): return {code}").grade(samples("a", "b", "c", "d"))
    assert len(graded) == 4
    for each in graded:
        assert each.components is None and each.error is not None
        assert each.error.startswith("RewardContractError") and "reward.py:r" in each.error and got in each.error


@pytest.mark.case("R01")
def test_a_reward_that_answers_for_one_only_fails_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="expected 2, got 1"):
        from_file(tmp_path, "def r(completions, **kw): return [1.0]").check([prompt()])


@pytest.mark.case("R02")
@pytest.mark.parametrize("missing", [None, float("nan"), float("inf"), float("-inf")])
def test_a_missing_score_is_the_error_of_its_sample_alone(missing: Any) -> None:
    graded = grade(lambda completions, **kw: [1.0, missing, 0.0, 1.0], samples("a", "b", "c", "d"))
    assert [each.components for each in graded] == [{"score": 1.0}, None, {"score": 0.0}, {"score": 1.0}]
    assert "on a:1 (position 1 of 4) returned" in str(graded[1].error)


@pytest.mark.case("R05")
def test_closures_lambdas_partials_and_files_of_one_name_work(tmp_path: Path) -> None:
    code = (
        "import functools\nk={k}\ndef make():\n    def r(completions, **kw): return [k*1.0]*len(completions)\n"
        "    return r\nreward=make()\nlam=lambda completions, **kw: [k]*len(completions)\n"
        "def scaled(completions, by, **kw): return [by]*len(completions)\npart=functools.partial(scaled, by=k)\n"
        "class C:\n    def m(self, completions, **kw): return [k]*len(completions)\nobject_=C()\n"
    )
    for name in ("reward", "lam", "part", "object_.m"):
        first = from_file(tmp_path / "a", code.replace("{k}", "2"), name)
        second = from_file(tmp_path / "b", code.replace("{k}", "3"), name)
        assert scores(first.grade(samples("x", "y"))) == [2.0, 2.0]
        assert scores(second.grade(samples("x", "y"))) == [3.0, 3.0]


@pytest.mark.case("R06")
@pytest.mark.parametrize("name", ["r", "obj.method", "partial", "call", "one"])
def test_async_rewards_are_awaited_inside_a_running_loop_too(tmp_path: Path, name: str) -> None:
    code = (
        "import asyncio, functools\n"
        "async def r(completions, **kw):\n    await asyncio.sleep(0)\n    return [1.0 for _ in completions]\n"
        "class C:\n    async def method(self, completions, **kw): return [1.0 for _ in completions]\n"
        "    __call__ = method\n"
        "obj = C()\ncall = C()\npartial = functools.partial(r, scale=2)\n"
        "async def one(sample): return 1.0\n"
    )
    rewards = from_file(tmp_path, code, name)
    assert scores(rewards.grade(samples("a", "b"))) == [1.0, 1.0]

    async def inside() -> list[Graded]:
        return rewards.grade(samples("a", "b"))

    assert scores(asyncio.run(inside())) == [1.0, 1.0]


def test_async_rewards_of_one_sample_wait_together_and_fail_alone() -> None:
    running = most = 0

    async def r(sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if sample.response == "bad":
            raise SystemExit(3)
        return float(sample.response)

    graded = grade(r, samples("1", "bad", "2"))
    assert [each.components for each in graded] == [{"score": 1.0}, None, {"score": 2.0}]
    assert "raised SystemExit on a:1: 3" in str(graded[1].error)
    assert most == 3


def test_an_async_client_finds_its_loop_again_at_the_next_call() -> None:
    loops: set[int] = set()

    async def r(sample: Sample) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    for _ in range(3):
        assert scores(grade(r, samples("a"))) == [1.0]
    assert len(loops) == 1


@pytest.mark.case("R07")
def test_an_exception_is_the_error_of_every_sample_of_the_call(tmp_path: Path) -> None:
    graded = from_file(tmp_path, "def r(completions, **kw): raise KeyError('answer')").grade(samples("a", "b"))
    for each in graded:
        assert each.components is None and each.error is not None
        assert "raised KeyError on 2 samples, the first a:0: 'answer'" in each.error
        assert "line 1, in r" in each.error


def test_an_exception_in_the_place_of_a_value_is_that_samples_error() -> None:
    graded = grade(lambda samples: [1.0, ValueError("too long")], samples("a", "b"))
    assert graded[0].components == {"score": 1.0}
    assert "on a:1 (position 1 of 2) failed: ValueError: too long" in str(graded[1].error)


@pytest.mark.case("R12")
@pytest.mark.parametrize(
    "returned",
    [[True, False], np.array([1, 0]), [np.float32(1), np.int64(0)], torch.tensor([1.0, 0.0])],
    ids=["bool", "array", "scalars", "tensor"],
)
def test_numbers_of_every_library_are_rewards(returned: Any) -> None:
    found = scores(grade(lambda completions, **kw: returned, samples("a", "b")))
    assert found == [1.0, 0.0] and all(type(score) is float for score in found)


@pytest.mark.case("R12")
@pytest.mark.parametrize(
    ("returned", "wrong", "kind"),
    [
        (["1", "0"], [0, 1], "str"),
        ([1.0, "nan"], [1], "str"),
        (np.array([[1], [0]]), [0, 1], "ndarray"),
        ([[1.0], [0.0]], [0, 1], "list"),
    ],
)
def test_texts_and_arrays_are_errors_with_position_and_type(returned: Any, wrong: list[int], kind: str) -> None:
    graded = grade(lambda completions, **kw: returned, samples("a", "b"))
    assert [place for place, each in enumerate(graded) if each.error] == wrong
    for place in wrong:
        error = str(graded[place].error)
        assert error.startswith("RewardContractError")
        assert f"position {place} of 2" in error and f"({kind})" in error


@pytest.mark.parametrize(
    ("function", "kwargs", "reason"),
    [
        (lambda a, b: 0, {}, r"is called as \(sample\)"),
        (lambda completions: [], {"scale": 2}, "no parameter 'scale'"),
        (lambda solution_str, ground_truth, url: 0, {}, "missing a required argument: 'url'"),
    ],
)
def test_a_signature_that_does_not_fit_says_why(function: Any, kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        reward_of(function, kwargs, spec="r.py:r")
