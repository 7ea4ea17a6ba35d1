"""A run whose model is spread over two processes, whole, killed, and resumed by one."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import MEASURED_BY_THE_CLOCK, rows, start, train, wait_for_stage

pytestmark = pytest.mark.slow
TWO = ("trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", "trainer.device=cpu")
ONE = ("trainer.n_gpus_per_node=1", "trainer.total_training_steps=3", "trainer.device=cpu")
SERIES = "select key, step, value from metrics_outbox where not ({}) order by key, step"


@pytest.fixture(scope="module")
def whole(server_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two processes that nobody disturbs."""
    home = tmp_path_factory.mktemp("two") / "home"
    done, summary = train(home, server_home, *TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    return home, summary


def test_a_rank_killed_in_mid_step_is_replaced_with_its_group_and_the_numbers_stay(
    whole: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    process = start(home, server_home, *TWO)
    wait_for_stage(home, "step-0002/score", process)
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ModelWorker" in "".join(child.cmdline())
    ]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert rows(home, "select count(*) from attempts") == [(1,)]
    series = SERIES.format(f"{MEASURED_BY_THE_CLOCK} or key = 'checkpoint/bytes'")
    assert rows(home, series) == rows(whole[0], series)
    weights = "select detail from events where kind = 'weights'"
    assert rows(home, weights) == rows(whole[0], weights)
    ((lost,),) = rows(home, "select detail from events where kind = 'worker_lost'")
    assert "of 2 ended because its worker process died" in json.loads(lost)["error"]


def test_a_run_of_two_processes_is_resumed_by_one(
    whole: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    """R12: another world size is no other run; samples are the same, and losses within rounding."""
    home = tmp_path / "home"
    process = start(home, server_home, *TWO)
    wait_for_stage(home, "step-0002/rollout", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    done, summary = train(home, server_home, "--resume", *ONE)
    assert done.returncode == 0, done.stderr
    assert summary["state"] == "COMPLETED" and summary["attempts"] == 2
    trained = (
        "select epoch, uid, sample_index, step, reward from samples where step < 3 order by step, uid, sample_index"
    )
    assert rows(home, trained) == rows(whole[0], trained)
    losses = "select step, value from metrics_outbox where key = 'actor/grad_norm' and step < 3 order by step"
    assert [value for _, value in rows(home, losses)] == pytest.approx(
        [value for _, value in rows(whole[0], losses)], rel=1e-4
    )
