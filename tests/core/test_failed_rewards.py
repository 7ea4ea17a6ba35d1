"""A sample whose reward failed: never a 0, in no statistic, and no token of it is trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.config import load_config
from moonshift.core.config.schema import Config
from moonshift.core.errors import RewardError
from moonshift.core.rewards.graded import Graded
from moonshift.core.rewards.summary import check_error_rate, error_rate, means
from moonshift.core.training.advantages import Stages, compute_advantages

NAN = float("nan")


def config(**changes: Any) -> Config:
    settings = {
        "data.train_files": "sums:?max=9",
        "data.max_response_length": 4,
        "actor_rollout_ref.model.path": "builtin:char-llama",
    }
    return load_config(
        None, (), environ={}, code=settings | {k.replace("__", "."): v for k, v in changes.items()}
    ).config


def stages(folder: Path, scores: dict[str, list[float]], per_group: int, baseline: list[float] | None = None) -> Stages:
    count = len(scores["score"])
    Batch(
        {
            "prompt_ids": Ragged.from_list([[3]] * count, torch.int64),
            "response_ids": Ragged.from_list([[5, 6]] * count, torch.int64),
            "rollout_log_probs": Ragged.from_list([[-0.5, -0.5]] * count, torch.float32),
            "finish_reason": ["stop"] * count,
            "group": torch.arange(count) // per_group,
        }
    ).save(folder / "r")
    Batch({name: torch.tensor(values, dtype=torch.float32) for name, values in scores.items()}).save(folder / "s")
    if baseline is not None:
        Batch({"score": torch.tensor(baseline, dtype=torch.float32)}).save(folder / "s" / "baseline")
    zeros = Ragged.from_list([[-0.5, -0.5]] * count, torch.float32)
    values = Ragged.from_list([[0.25, 0.5]] * count, torch.float32)
    Batch({"old_log_probs": zeros, "ref_log_probs": zeros, "values": values}).save(folder / "l")
    return Stages(rollout=str(folder / "r"), score=str(folder / "s"), log_probs=str(folder / "l"))


def first_tokens(batch: Batch, name: str) -> list[float]:
    return [row.tolist()[0] for row in batch.rows(name)]


@pytest.mark.case("R02")
@pytest.mark.parametrize("missing", [NAN, float("inf"), float("-inf")])
def test_a_missing_score_is_left_out_of_its_group_and_of_the_loss(tmp_path: Path, missing: float) -> None:
    given = stages(tmp_path, {"score": [1.0, missing, 0.0, 1.0]}, 4)
    redo, metrics = compute_advantages(given, config())
    assert first_tokens(redo, "advantages") == pytest.approx([0.57735, 0, -1.154701, 0.57735], abs=1e-5)
    assert [row.tolist() for row in redo.rows("loss_mask")] == [[True] * 2, [False] * 2, [True] * 2, [True] * 2]
    assert metrics["training/masked_samples"] == 1
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3) and metrics["critic/score/min"] == 0
    assert metrics["critic/rewards/mean"] == pytest.approx(2 / 3)
    assert all(value == value for value in metrics.values())


def test_a_missing_score_changes_no_other_group(tmp_path: Path) -> None:
    whole = compute_advantages(stages(tmp_path / "a", {"score": [1, 0, 0, 1, 0, 1]}, 3), config())[0]
    torn = compute_advantages(stages(tmp_path / "b", {"score": [1, 0, 0, 1, NAN, 1]}, 3), config())[0]
    assert first_tokens(torn, "advantages")[:3] == first_tokens(whole, "advantages")[:3]


@pytest.mark.parametrize("left", [[1.0, NAN, NAN], [NAN, NAN, NAN]])
def test_a_group_with_fewer_than_two_scores_has_the_advantage_zero(tmp_path: Path, left: list[float]) -> None:
    redo, metrics = compute_advantages(stages(tmp_path, {"score": [*left, 1.0, 0.0, 0.0]}, 3), config())
    assert first_tokens(redo, "advantages")[:3] == [0.0] * 3
    assert metrics["training/groups_without_signal"] == 0.5
    assert [any(row.tolist()) for row in redo.rows("loss_mask")][:3] == [value == value for value in left]


ESTIMATORS = ["gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "reinforce_plus_plus_baseline", "rloo"]


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce_plus_plus", "remax"])
def test_every_estimator_gives_the_others_what_they_have_without_it(tmp_path: Path, estimator: str) -> None:
    """The batch with the failed sample, and the batch in which it never was."""
    settings = config(algorithm__adv_estimator=estimator)
    scores, lacking = [1.0, NAN, 0.0, 0.5], [1.0, 0.0, 0.5]
    greedy = [0.25]
    torn = stages(tmp_path / "a", {"score": scores, "score/form": scores}, 4, greedy)
    without = stages(tmp_path / "b", {"score": lacking, "score/form": lacking}, 4, greedy)
    redo, metrics = compute_advantages(torn, settings)
    expected, _ = compute_advantages(without, settings)
    found = [row for row, score in zip(redo.rows("advantages"), scores, strict=True) if score == score]
    torch.testing.assert_close(torch.stack(found), torch.stack(list(expected.rows("advantages"))))
    assert redo.rows("advantages")[1].tolist() == [0.0, 0.0]
    assert redo.rows("loss_mask")[1].tolist() == [False, False]
    assert all(value == value for value in metrics.values())


def test_a_missing_baseline_leaves_its_prompt_out(tmp_path: Path) -> None:
    given = stages(tmp_path, {"score": [1.0, 0.0, 1.0, 0.0]}, 2, [NAN, 0.5])
    redo, _ = compute_advantages(given, config(algorithm__adv_estimator="remax"))
    assert [any(row.tolist()) for row in redo.rows("loss_mask")] == [False, False, True, True]
    assert first_tokens(redo, "advantages") == [0.0, 0.0, 0.5, -0.5]


def test_a_kl_in_the_reward_makes_no_score_of_a_missing_one(tmp_path: Path) -> None:
    settings = config(algorithm__use_kl_in_reward=True)
    redo, metrics = compute_advantages(stages(tmp_path, {"score": [1.0, NAN, 0.0, 1.0]}, 4), settings)
    assert first_tokens(redo, "advantages")[1] == 0.0 and not any(redo.rows("loss_mask")[1].tolist())
    assert metrics["critic/rewards/mean"] == pytest.approx(2 / 3)


def good(score: float, **more: float) -> Graded:
    return Graded(components={"score": score, **more}, error=None)


def bad(reason: str) -> Graded:
    return Graded(components=None, error=reason)


@pytest.mark.case("R08")
def test_means_are_over_the_samples_that_have_a_reward() -> None:
    values = [0.5, None, None, 0.8, 0.6, 0.7]
    graded = [bad("x") if value is None else good(value, form=value) for value in values]
    assert means(graded) == pytest.approx({"reward/form/mean": 0.65, "reward/error_rate": 2 / 6})
    assert means([bad("x")]) == {"reward/error_rate": 1.0} and error_rate([]) == 0.0


def test_past_the_error_rate_the_first_five_are_named() -> None:
    graded = [good(1.0), *(bad(f"reason {n}\n" + "x" * 5000) for n in range(7))]
    uids, places = [f"row:{n // 2}" for n in range(8)], [0, 1] * 4
    with pytest.raises(RewardError) as caught:
        check_error_rate(graded, uids, places, 0.5)
    text = str(caught.value)
    assert "7 of 8 samples" in text and "reward.max_error_rate=0.5" in text and "and 2 more" in text
    assert "row:0, sample 1: reason 0" in text and "row:2, sample 1: reason 4" in text and "reason 5" not in text
    assert len(text) < 5 * 700 + 600
    check_error_rate(graded, uids, places, 7 / 8)
    check_error_rate([good(1.0)], ["u"], [0], 0.0)
    with pytest.raises(RewardError, match="1 of 1000 samples"):
        check_error_rate([*[good(1.0)] * 999, bad("one")], ["u"] * 1000, [0] * 1000, 0.0)
