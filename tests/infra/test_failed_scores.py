"""Samples without a reward on their way: worker, files, ledger rows, dynamic sampling."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.config import load_config, to_json
from moonshift.core.config.schema import Config
from moonshift.core.errors import ConfigError
from moonshift.core.rewards.graded import Graded
from moonshift.core.types import Prompt
from moonshift.infra.draws import Draws, Run
from moonshift.infra.origin import Origin
from moonshift.infra.preflight import refuse_contradictions
from moonshift.infra.sample_rows import sample_rows
from moonshift.infra.workers.reward import RewardWorker, alike, write_graded

REWARD = """
import os
def score(sample):
    if sample.response == 'crash': os.abort()
    if sample.response == 'raise': raise KeyError('answer')
    if sample.response == 'nan': return float('nan')
    return {'score': float(sample.response), 'form': 1}
"""


def config(**changes: Any) -> Config:
    settings = {"data.train_files": "sums:?max=9", "actor_rollout_ref.model.path": "builtin:char-llama"}
    return load_config(
        None, (), environ={}, code=settings | {k.replace("__", "."): v for k, v in changes.items()}
    ).config


def rollouts(folder: Path, responses: list[str], per_group: int) -> Path:
    count = len(responses)
    groups = [number // per_group for number in range(count)]
    Batch(
        {
            "group": torch.tensor(groups),
            "uid": [f"u{group}" for group in groups],
            "epoch": torch.zeros(count, dtype=torch.int64),
            "sample_index": torch.arange(count) % per_group,
            "response": responses,
            "finish_reason": ["stop"] * count,
            "response_ids": Ragged.from_list([[1]] * count, torch.int64),
        }
    ).save(folder / "r")
    return folder / "r"


@pytest.mark.case("R07")
def test_an_error_is_kept_with_its_reason_from_the_function_to_the_ledger_row(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    responses = ["1", "crash", "0", "raise", "nan", "0.5"]
    place = rollouts(tmp_path, responses, 3)
    prompts = [Prompt(uid=f"u{n}", messages=(), text="", answer=None, source="t", extra={}) for n in range(2)]
    worker = RewardWorker(to_json(config(reward__function=f"{tmp_path}/reward.py:score")))
    with worker.pool:
        found = worker.grade(prompts, str(place), range(6))[0]
    graded = alike([Graded(components=numbers, error=error) for numbers, error in found])  # pyright: ignore
    write_graded(graded, tmp_path / "s")
    written = Batch.load(tmp_path / "s")
    assert written.dense("score").isnan().tolist() == [False, True, False, True, True, False]
    assert written.dense("score/form").isnan().tolist() == [False, True, False, True, True, False]
    reasons = list(written.rows("reward_error"))
    assert [bool(reason) for reason in reasons] == [False, True, False, True, True, False]
    assert "SIGABRT" in reasons[1] and "KeyError" in reasons[3] and "in score" in reasons[3] and "nan" in reasons[4]
    rewards = [each.components["score"] if each.components else None for each in graded]
    rows = sample_rows(place, rewards)
    assert [row.reward for row in rows] == [1.0, None, 0.0, None, None, 0.5]
    assert [(row.uid, row.sample_index) for row in rows][2:4] == [("u0", 2), ("u1", 0)]


def test_other_components_than_the_first_sample_are_an_error() -> None:
    graded = alike(
        [
            Graded(components=None, error="x"),
            Graded(components={"score": 1.0, "a": 2.0}, error=None),
            Graded(components={"score": 1.0}, error=None),
        ]
    )
    assert [each.error is None for each in graded] == [False, True, False]
    assert "['score'], and ['a', 'score']" in str(graded[2].error)


@pytest.mark.parametrize("metric", ["score", "form"])
def test_dynamic_sampling_does_not_see_samples_without_a_reward(tmp_path: Path, metric: str) -> None:
    place = rollouts(tmp_path, ["x"] * 12, 3)
    values = [1.0, None, 1.0] + [1.0, None, 0.0] + [0.0, None, None] + [None] * 3
    graded = [
        Graded(components=None, error="x")
        if value is None
        else Graded(components={"score": value, "form": value}, error=None)
        for value in values
    ]
    write_graded(graded, tmp_path / "s")
    settings = config(algorithm__filter_groups__enable=True, algorithm__filter_groups__metric=metric)
    run = Run(run_id="run", folder=tmp_path, origin=Origin())
    draws = Draws(None, run, settings, None)  # pyright: ignore[reportArgumentType]
    assert draws.signal(place, tmp_path / "s") == [False, True, False, False]
    write_graded([Graded(components=None, error="x")] * 12, tmp_path / "none")
    assert draws.signal(place, tmp_path / "none") == [False] * 4


def test_a_timeout_that_a_stage_has_no_time_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.timeout_s is 200, .*300 s"):
        refuse_contradictions(config(reward__timeout_s=200))
    refuse_contradictions(config(reward__timeout_s=200, recovery__stage_patience_s=600))
