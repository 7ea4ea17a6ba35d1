"""A fork makes the very steps that its parent made; with another config it goes its own way and harms nobody."""

import hashlib
import json
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moonshift.infra.ledger import Ledger
from moonshift.infra.verification import scope, verify

from .conftest import MEASURED_BY_THE_CLOCK, command, environment_of, rows, train, wait_for_stage
from .test_algorithms import DAPO, PPO

pytestmark = pytest.mark.slow
PARENT = "quickstart-0001"
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def home(unbroken: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unbroken run, in a home where others may be made; MLflow's database names its folders, so it stays."""
    copy = tmp_path_factory.mktemp("fork") / "home"
    ignored = shutil.ignore_patterns("prefect", "ray*", "mlflow.db", "mlartifacts")
    shutil.copytree(unbroken[0], copy, ignore=ignored)
    return copy


def moonshift(home: Path, server: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment_of(home, server), capture_output=True, text=True, timeout=500
    )


def step_of(home: Path, run_id: str, step: int) -> list[list[tuple[Any, ...]]]:
    """All that the ledger says of a step of a run, without what the clock measured and without its checkpoint.

    A checkpoint's config.yaml names the run that is resumed: `checkpoint_of` compares the other files.
    """
    of_run = f"where run_id = '{run_id}' and step = {step}"
    measured = f"({MEASURED_BY_THE_CLOCK} or key = 'checkpoint/bytes')"
    return [
        rows(home, f"select name, input_digest, digest, path from stages {of_run} and name != 'checkpoint' order by 1"),
        rows(home, f"select key, value, value_text from metrics_outbox {of_run} and not {measured} order by key"),
        rows(home, f"select uid, epoch, sample_index, reward, response_tokens from samples {of_run} order by 1, 2, 3"),
    ]


def checkpoint_of(home: Path, run_id: str, step: int) -> dict[str, Any]:
    """SHA-256 of each file of a checkpoint but its config."""
    manifest = home / "runs" / run_id / "checkpoints" / f"step-{step:06d}" / "manifest.json"
    return {name: known for name, known in json.loads(manifest.read_text())["files"].items() if name != "config.yaml"}


def everything_of(home: Path, run_id: str) -> tuple[dict[str, str], list[list[tuple[Any, ...]]]]:
    """Every byte of a run's folder, and every row of the ledger that is the run's."""
    folder = home / "runs" / run_id
    files = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    tables = ("attempts", "steps", "stages", "samples", "checkpoints", "metrics_outbox", "events", "leases")
    found = [rows(home, f"select * from {table} where run_id = '{run_id}'") for table in tables]
    return files, [*found, rows(home, f"select * from runs where id = '{run_id}'")]


def weights(home: Path, run_id: str) -> list[tuple[Any, ...]]:
    return rows(
        home, f"select json_extract(detail, '$.sha256') from events where run_id = '{run_id}' and kind = 'weights'"
    )


def assert_whole(home: Path, run_id: str, what: str) -> None:
    with Ledger.open(f"sqlite:///{home / 'ledger.db'}") as ledger:
        assert verify(ledger, run_id, home) == []
        assert what in scope(ledger, run_id)


def test_a_fork_without_a_change_makes_the_step_that_its_parent_made(home: Path, server_home: dict[str, str]) -> None:
    before = everything_of(home, PARENT)
    done = moonshift(home, server_home, "fork", PARENT, "--at-step", "4", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    fork = "quickstart-0002"
    assert f"{fork} is forked from {PARENT}@4" in done.stdout
    assert weights(home, fork) == weights(home, PARENT) != []
    assert step_of(home, fork, 5) == step_of(home, PARENT, 5)
    assert checkpoint_of(home, fork, 5) == checkpoint_of(home, PARENT, 5) != {}
    assert rows(home, f"select step from steps where run_id = '{fork}'") == [(5,)]
    assert rows(home, f"select step, name from stages where run_id = '{fork}' and step < 5") == [(4, "validate")]
    assert rows(home, f"select parent_run_id, base_step, state from runs where id = '{fork}'") == [
        (PARENT, 4, "COMPLETED")
    ]
    assert_whole(home, fork, "1 steps, ")
    assert everything_of(home, PARENT) == before
    assert_whole(home, PARENT, "5 steps, ")
    shown = moonshift(home, server_home, "runs")
    assert f"{PARENT}@4" in shown.stdout and "5/5" in shown.stdout


def test_a_killed_fork_with_another_learning_rate_resumes_by_its_own_config(
    home: Path, server_home: dict[str, str]
) -> None:
    before = everything_of(home, PARENT)
    made = moonshift(
        home, server_home, "fork", PARENT, "--at-step", "4", "--no-start",
        f"{LR}=1e-3", "run.name=higher", "trainer.total_training_steps=7",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    fork = "higher-0001"
    process = subprocess.Popen(
        command("resume", fork, "--plain"),
        env=environment_of(home, server_home), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_stage(home, "step-0006/rollout", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    refused = moonshift(home, server_home, "resume", fork, f"{LR}=2e-3", "--plain")
    assert refused.returncode == 2
    assert f"{LR}: 0.001 → 0.002" in refused.stderr and f"moonshift fork {fork} --at-step" in refused.stderr
    done = moonshift(home, server_home, "resume", fork, "--plain")
    assert done.returncode == 0, done.stderr
    assert rows(home, f"select step from steps where run_id = '{fork}' order by step") == [(5,), (6,), (7,)]
    assert rows(home, f"select state from attempts where run_id = '{fork}'") == [("CRASHED",), ("COMPLETED",)]
    assert step_of(home, fork, 5)[2] == step_of(home, PARENT, 5)[2], "the weights were the parent's"
    assert weights(home, fork) != weights(home, PARENT)
    with sqlite3.connect(home / "mlflow.db") as connection:
        tags = "select key, value from tags where run_uuid in (select run_uuid from tags where value = ?)"
        shown = dict(connection.execute(tags, (fork,)).fetchall())
    assert (shown["moonshift.parent_run_id"], shown["moonshift.base_step"]) == (PARENT, "4")
    assert_whole(home, fork, f"after {PARENT}@4")
    assert everything_of(home, PARENT) == before


def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(home: Path, server_home: dict[str, str]) -> None:
    before = (rows(home, "select id from runs"), sorted(path.name for path in (home / "runs").iterdir()))
    lost = moonshift(home, server_home, "fork", PARENT, "--at-step", "2")
    assert lost.returncode == 1 and "Steps that it can be forked at: 4, 5." in lost.stderr, lost.stderr
    for override, words in (
        ("actor_rollout_ref.model.override_config.hidden_size=64", "hidden_size: 128 → 64"),
        ("warm_start.steps=30", "warm_start.steps: 20 → 30"),
        ("trainer.total_training_steps=4", "trainer.total_training_steps to more than 4"),
        ("algorithm.adv_estimator=gae", "needs a critic"),
    ):
        refused = moonshift(home, server_home, "fork", PARENT, "--at-step", "4", override)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
    after = (rows(home, "select id from runs"), sorted(path.name for path in (home / "runs").iterdir()))
    assert (after[0], [name for name in after[1] if name != ".forks.lock"]) == (
        before[0],
        [name for name in before[1] if name != ".forks.lock"],
    )


def forked_again(home: Path, server: dict[str, str], step: int) -> str:
    """Fork the first run at a step without a change; the steps after it come out as those of the parent."""
    done = moonshift(home, server, "fork", PARENT, "--at-step", str(step), "--plain", "trainer.val_before_train=false")
    assert done.returncode == 0, done.stderr
    fork = "quickstart-0002"
    for later in range(step + 1, 6):
        assert step_of(home, fork, later) == step_of(home, PARENT, later), later
    assert checkpoint_of(home, fork, 5) == checkpoint_of(home, PARENT, 5)
    assert weights(home, fork) == weights(home, PARENT) != []
    assert_whole(home, fork, f"{5 - step} steps, ")
    return fork


def test_a_fork_takes_over_the_critic_and_the_adapted_kl_weight(server_home: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    done, _ = train(home, server_home, *PPO)
    assert done.returncode == 0, done.stderr
    fork = forked_again(home, server_home, 4)
    key = "actor/reward_kl_penalty_coeff"
    [(weight,)] = rows(home, f"select value from metrics_outbox where run_id = '{fork}' and key = '{key}'")
    assert weight != 0.001


def test_a_fork_takes_over_the_groups_that_were_carried_over(server_home: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    every = ("trainer.save_freq=1", "checkpoint.keep=5", "warm_start.steps=100")
    done, _ = train(home, server_home, *DAPO, *every)
    assert done.returncode == 0, done.stderr
    key = "training/filter_groups/carried_out"
    carrying = rows(home, f"select step from metrics_outbox where key = '{key}' and value > 0 and step < 5 order by 1")
    assert carrying, "no step carried groups over: the run shows nothing"
    fork = forked_again(home, server_home, carrying[-1][0])
    assert [path.name for path in sorted((home / "runs" / fork / "carried").iterdir())] == ["rollout", "score"]
