"""Several rewards as one, from the config to weighted scores."""

from pathlib import Path
from typing import Any

import pytest

from moonshift.core.config import config_from_json, load_config, to_json, to_yaml
from moonshift.core.config.schema import RewardSection
from moonshift.core.errors import ConfigError, RewardError
from moonshift.core.rewards import Graded, load_rewards
from moonshift.core.types import Prompt, Sample

CODE = """
def length(sample): return {"score": len(sample.response), "words": len(sample.response.split())}
def half(samples): return [0.5] * len(samples)
def sums(completions, **kw): return [1.0 if "+" in c else None for c in completions]
def others(completions, **kw): return [None if "+" in c else 2.0 for c in completions]
def nothing(completions, **kw): return [None] * len(completions)
def none(sample): return None
def picky(sample):
    if sample.response == "bad": raise ValueError("no")
    return 1.0
def huge(sample): return 1e308
"""


def section(folder: Path, *functions: dict[str, Any], **further: Any) -> RewardSection:
    file = folder / "rewards.py"
    file.write_text(CODE, "utf-8")
    listed = tuple(each | {"function": f"{file}:{each['function']}"} for each in functions)
    return RewardSection.model_validate({"functions": listed, **further})


def samples(*responses: str) -> list[Sample]:
    prompt = Prompt(uid="a:0", messages=({"role": "user", "content": "?"},), text="?", answer="2", source="a", extra={})
    return [Sample(prompt=prompt, response=text, finish_reason="stop", response_tokens=1) for text in responses]


def test_the_score_is_the_weighted_sum_and_each_part_keeps_its_name(tmp_path: Path) -> None:
    reward = section(tmp_path, {"function": "length", "weight": 2}, {"function": "half", "weight": -1.0, "name": "h"})
    rewards = load_rewards(reward)
    assert rewards.batched
    (graded,) = rewards.grade(samples("ab c"))
    assert graded == Graded({"score": 2 * 4 - 0.5, "length": 4.0, "length/words": 2.0, "h": 0.5}, None)


def test_one_reward_names_its_components_itself(tmp_path: Path) -> None:
    section(tmp_path)
    rewards = load_rewards(RewardSection(function=f"{tmp_path}/rewards.py:length"))  # pyright: ignore[reportCallIssue]
    assert not rewards.batched
    assert rewards.grade(samples("ab c"))[0].components == {"score": 4.0, "words": 2.0}
    assert rewards.grade([]) == []


def test_one_rewards_error_is_the_samples_and_leaves_the_others(tmp_path: Path) -> None:
    rewards = load_rewards(section(tmp_path, {"function": "half"}, {"function": "picky"}))
    good, bad, also = rewards.grade(samples("a", "bad", "c"))
    assert good == also == Graded({"score": 1.5, "half": 0.5, "picky": 1.0}, None)
    assert bad.components is None and "rewards.py:picky raised ValueError on a:0: no" in str(bad.error)


@pytest.mark.case("R08")
def test_a_reward_that_does_not_apply_is_left_out(tmp_path: Path) -> None:
    rewards = load_rewards(section(tmp_path, {"function": "sums"}, {"function": "others", "weight": 3.0}))
    assert [each.components for each in rewards.grade(samples("1+1", "x"))] == [
        {"score": 1.0, "sums": 1.0},
        {"score": 6.0, "others": 2.0},
    ]
    neither = load_rewards(section(tmp_path, {"function": "sums"}, {"function": "nothing"}))
    assert "all returned None" in str(neither.grade(samples("x"))[0].error)
    plain = load_rewards(section(tmp_path, {"function": "half"}, {"function": "none"}))
    assert "returned None (NoneType)" in str(plain.grade(samples("x"))[0].error)


def test_a_sum_past_all_numbers_is_an_error(tmp_path: Path) -> None:
    rewards = load_rewards(section(tmp_path, {"function": "huge", "weight": 10.0}))
    assert "is not finite" in str(rewards.grade(samples("x"))[0].error)


def test_names_must_differ_and_the_single_reward_must_not_be_given_too(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"reward\.functions\[1\]: its metric would be called 'half', which is taken"):
        load_rewards(section(tmp_path, {"function": "half"}, {"function": "half", "weight": 2.0}))
    with pytest.raises(RewardError, match=r"reward\.kwargs and reward\.functions are both given"):
        load_rewards(section(tmp_path, {"function": "half"}, kwargs={"a": 1}))
    with pytest.raises(RewardError, match=r"reward\.functions\[0\]: .*has no 'hlf'; did you mean 'half'"):
        load_rewards(section(tmp_path, {"function": "hlf"}))


MINIMAL = "data: {train_files: a.jsonl}\nactor_rollout_ref: {model: {path: m}}\nreward:\n  functions:\n"


def test_the_list_is_read_from_a_file_with_paths_from_its_folder(tmp_path: Path) -> None:
    section(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + "  - {function: rewards.py:half, weight: 2}\n  - {function: 'm.n:f', kwargs: {a: 1}}\n")
    config = load_config(file, environ={}).config
    first, second = config.reward.functions
    assert (first.function, first.weight, first.name) == (f"{tmp_path}/rewards.py:half", 2.0, None)
    assert (second.function, second.kwargs) == ("m.n:f", {"a": 1})
    assert config_from_json(to_json(config)) == config
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config, masked=False))
    assert load_config(again, environ={}).config == config


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("{function: a, wieght: 2}", "reward.functions: item 1, wieght: Extra inputs are not permitted"),
        ("{function: a, weight: x}", "reward.functions: item 1, weight: Input should be a valid number"),
        ("{weight: 1}", "reward.functions: item 1, function: Field required"),
        ("{function: a, kwargs: {x: .nan}}", "reward.functions: is not finite"),
        ("7", "reward.functions: is 7 (item 1); write a list of mappings"),
    ],
)
def test_a_wrong_item_is_named(tmp_path: Path, item: str, reason: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + f"  - {item}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, environ={})
    assert reason in str(raised.value)
