"""The main job on real parts: Prefect, Ray, MLflow and SQLite, a model, a kill, bad input."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SMALL = (
    "warm_start.steps=20",
    "trainer.total_training_steps=5",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "data.val_max_samples=32",
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One standing Prefect server for this file, as a team would have it."""
    folder = tmp_path_factory.mktemp("server")
    environment = {**os.environ, "MOONSHIFT_HOME": str(folder)}
    environment.pop("PREFECT_API_URL", None)
    started = subprocess.run(
        [sys.executable, "-m", "moonshift.flows.cli", "server", "start"],
        env=environment, check=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    address = re.search(r"http://127\.0\.0\.1:\d+", started.stdout)
    assert address, started.stdout
    yield {"PREFECT_API_URL": f"{address.group()}/api"}
    subprocess.run([sys.executable, "-m", "moonshift.flows.cli", "server", "stop"], env=environment, check=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moonshift.flows.cli", *arguments]


def environment_of(home: Path, server: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "MOONSHIFT_HOME": str(home), **server}


def train(home: Path, server: dict[str, str], *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    summary = home.with_suffix(".json")
    done = subprocess.run(
        command("train", str(QUICKSTART), *SMALL, "--plain", "--summary", str(summary), *arguments),
        env=environment_of(home, server), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return done, json.loads(summary.read_text()) if summary.exists() else None


def rows(home: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(home / "ledger.db") as connection:
        return connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def unbroken(server_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    home = tmp_path_factory.mktemp("unbroken") / "home"
    done, summary = train(home, server_home)
    assert done.returncode == 0, done.stdout + done.stderr
    return home, summary


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
    for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "response_length/mean", "timing_s/gen"):
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


@pytest.mark.parametrize("stage", ["step-0003/rollout", "step-0004/update"])
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path, stage: str
) -> None:
    home = tmp_path / "home"
    process = subprocess.Popen(
        command("train", str(QUICKSTART), *SMALL, "--plain"),
        env=environment_of(home, server_home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    step, name = int(stage[5:9]), stage[10:]
    wanted = f"select count(*) from stages where step = {step} and name = '{name}'"
    deadline = time.monotonic() + 240
    while not ((home / "ledger.db").exists() and _committed(home, wanted)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert still_running(below, 120) == [], "processes outlived their driver"

    done, summary = train(home, server_home, "--resume")
    assert done.returncode == 0, done.stderr
    assert summary["attempts"] == 2 and summary["run_id"] == "quickstart-0001"
    assert summary["weights_sha256"] == unbroken[1]["weights_sha256"]
    clocked = "key like 'timing_s/%' or key like 'rollout/%' or key like 'perf/%'"
    series = f"select key, step, value from metrics_outbox where not ({clocked}) order by key, step"
    assert rows(home, series) == rows(unbroken[0], series)
    trained = "select epoch, uid, sample_index, step, reward from samples order by step, uid, epoch, sample_index"
    assert rows(home, trained) == rows(unbroken[0], trained)


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that run after the deadline; Ray's agents notice only after a while that their node is gone.

    A process that ended but was not reaped by the container's first process does not run.
    """
    deadline = time.monotonic() + timeout_s
    running = processes
    while time.monotonic() < deadline:
        running = [process for process in processes if _runs(process)]
        if not running:
            return []
        time.sleep(0.2)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _committed(home: Path, query: str) -> bool:
    try:
        return rows(home, query) == [(1,)]
    except sqlite3.OperationalError:  # the tables are not there yet
        return False
