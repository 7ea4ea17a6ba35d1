"""The main job on real parts: Prefect, Ray, MLflow and SQLite, and everything a run leaves behind."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import rows, train

pytestmark = pytest.mark.slow


def test_a_run_ends_with_everything_a_person_needs(unbroken: tuple[Path, Any]) -> None:
    home, summary = unbroken
    assert summary["state"] == "COMPLETED"
    assert (summary["steps"], summary["optimizer_steps"], summary["attempts"]) == (5, 10, 1)
    assert 0 <= summary["eval_before"] <= 1 and 0 <= summary["eval_after"] <= 1
    assert 0 < summary["first_reward_s"] < summary["wall_s"]
    assert re.fullmatch(r"[0-9a-f]{64}", summary["weights_sha256"])
    checkpoint = Path(summary["checkpoint"])
    assert checkpoint.name == "step-000005"
    assert {"model", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    assert (home / "runs" / summary["run_id"] / "reward.png").stat().st_size > 10_000
    assert [path.name for path in checkpoint.parent.iterdir()] != []
    assert not list((home / "runs").rglob(".*")), "half-written files stayed"


def test_the_checkpoint_loads_with_transformers_alone(unbroken: tuple[Path, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(unbroken[1]["checkpoint"]) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("12+34=", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert model(ids).logits.shape[1] == 6


def test_the_ledger_holds_every_stage_and_sample_once(unbroken: tuple[Path, Any]) -> None:
    home, summary = unbroken
    stages = rows(home, "select step, name, count(*) from stages group by step, name")
    assert {(step, name) for step, name, _ in stages} >= {
        (step, name) for step in range(1, 6) for name in ("rollout", "score", "log_probs", "advantage", "update")
    }
    assert all(count == 1 for _, _, count in stages)
    assert {name for step, name, _ in stages if step == 0} == {"warm_start", "validate"}
    assert rows(home, "select count(*) from samples") == [(5 * 8 * 16,)]
    assert rows(home, "select state from runs") == [("COMPLETED",)]
    assert summary["run_id"] == "quickstart-0001"


def test_mlflow_holds_config_metrics_and_artifacts_of_one_run(unbroken: tuple[Path, Any]) -> None:
    from mlflow import MlflowClient

    home, summary = unbroken
    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
    run = client.get_run(summary["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["actor_rollout_ref.rollout.n"] == "16"
    for key, steps in (("critic/score/mean", [1, 2, 3, 4, 5]), ("val/score/mean", [0, 3, 5])):
        history = client.get_metric_history(run.info.run_id, key)
        assert sorted(point.step for point in history) == steps
    for key in (
        "actor/pg_loss",
        "actor/kl_loss",
        "actor/entropy",
        "response_length/mean",
        "timing_s/gen",
        "perf/throughput",
        "perf/time_per_step",
    ):
        assert key in run.data.metrics
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "reward.png", "checkpoints"} <= names


@pytest.mark.case("A09")
def test_the_first_update_is_exactly_on_policy(unbroken: tuple[Path, Any]) -> None:
    home, _ = unbroken
    metrics = json.loads(rows(home, "select metrics from stages where step = 1 and name = 'log_probs'")[0][0])
    assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_prefect_names_each_stage_after_its_step(unbroken: tuple[Path, Any], server_home: dict[str, str]) -> None:
    import httpx

    body = {"limit": 200, "sort": "EXPECTED_START_TIME_DESC"}
    names: set[str] = set()
    deadline = time.monotonic() + 30  # the server records task runs a moment later
    while time.monotonic() < deadline:
        found = httpx.post(f"{server_home['PREFECT_API_URL']}/task_runs/filter", json=body, timeout=30).json()
        names = {run["name"] for run in found if run["state_type"] == "COMPLETED"}
        if {"step-0005/update", "step-0005/checkpoint"} <= names:
            break
        time.sleep(1)
    assert {
        f"step-0003/{name}" for name in ("rollout", "score", "log_probs", "advantage", "update", "validate")
    } <= names


def test_two_runs_of_one_seed_end_with_the_same_weights(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    done, summary = train(tmp_path / "home", server_home)
    assert done.returncode == 0, done.stderr
    assert summary["weights_sha256"] == unbroken[1]["weights_sha256"]
    assert summary["reward_last"] == unbroken[1]["reward_last"]
