"""A worker that dies or hangs is replaced within the attempt, and the numbers are those of the run that lost none."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import MEASURED_BY_THE_CLOCK, command, environment_of, rows, start, still_running, train, wait_for_stage

pytestmark = pytest.mark.slow


def same_numbers(home: Path, unbroken: tuple[Path, Any]) -> bool:
    # a checkpoint holds the config's text, which some tests change
    left_out = f"{MEASURED_BY_THE_CLOCK} or key = 'checkpoint/bytes'"
    series = f"select key, step, value from metrics_outbox where not ({left_out}) order by key, step"
    weights = "select detail from events where kind = 'weights'"
    return all(rows(home, query) == rows(unbroken[0], query) for query in (series, weights))


def events(home: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(detail) for (detail,) in rows(home, f"select detail from events where kind = '{kind}'")]


@pytest.mark.case("X02")
def test_a_killed_model_worker_is_replaced_and_the_numbers_stay(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    process = start(home, server_home)
    wait_for_stage(home, "step-0003/score", process)
    worker = next(
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ModelWorker" in "".join(child.cmdline())
    )
    worker.send_signal(signal.SIGKILL)
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert rows(home, "select count(*) from attempts") == [(1,)]
    assert same_numbers(home, unbroken)
    (lost,) = events(home, "worker_lost")
    assert "actor_rollout_ref" in lost["call"] and "died" in lost["error"]


@pytest.mark.case("X04")
def test_what_a_killed_worker_had_drawn_is_kept_and_only_the_rest_drawn_again(
    server_home: dict[str, str], tmp_path: Path
) -> None:
    """Eight waves of one prompt's sixteen samples; the worker is killed when four of them are whole."""
    arguments = ("trainer.total_training_steps=2", "actor_rollout_ref.rollout.max_num_seqs=1")
    undisturbed = tmp_path / "undisturbed"
    done, summary = train(undisturbed, server_home, *arguments)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "home"
    process = start(home, server_home, *arguments)
    wait_for_stage(home, "step-0001/score", process)
    worker = next(
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ModelWorker" in "".join(child.cmdline())
    )
    deadline = time.monotonic() + 60
    while len(list(home.glob("runs/*/stages/step-0002/.rollout.*.waves.tmp/0*"))) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    worker.send_signal(signal.SIGKILL)
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    (lost,) = events(home, "worker_lost")
    assert lost["call"].startswith("rollout")
    [(step, kept)] = rows(home, "select step, value from metrics_outbox where key = 'rollout/kept_samples'")
    assert step == 2 and 4 * 16 <= kept < 8 * 16
    assert rows(home, "select count(*) from samples where step = 2") == [(8 * 16,)]
    assert rows(home, "select count(*) from attempts") == [(1,)]
    assert same_numbers(home, (undisturbed, summary))
    drawn = "select digest from stages where name = 'rollout' order by step"
    assert rows(home, drawn) == rows(undisturbed, drawn)
    assert not list(home.glob("runs/*/stages/*/.*"))


def test_a_model_worker_that_hangs_is_replaced_and_leaves_no_process(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    """A stopped process answers to nothing, neither to the call nor to Ray's wish that it end."""
    home = tmp_path / "home"
    process = start(home, server_home, "recovery.stage_patience_s=8", "reward.timeout_s=2")
    wait_for_stage(home, "step-0003/score", process)  # later stages have a history, and so a deadline
    worker = next(
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ModelWorker" in "".join(child.cmdline())
    )
    worker.send_signal(signal.SIGSTOP)
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert still_running([worker], 5) == []
    assert same_numbers(home, unbroken)
    (lost,) = events(home, "worker_lost")
    assert "did not answer within" in lost["error"] and "GiB free" in lost["memory"]


def test_samples_whose_reward_hangs_or_crashes_cost_nothing_but_themselves(
    server_home: dict[str, str], tmp_path: Path
) -> None:
    """Every eleventh answer hangs, crashes or raises: the run goes on without them, and says how many there were."""
    reward = tmp_path / "fails.py"
    reward.write_text(
        "import os\n"
        "def score(sample):\n"
        "    kind = sum(map(ord, sample.prompt.text + sample.response)) % 33\n"
        "    while kind == 0: pass\n"
        "    if kind == 11: os.abort()\n"
        "    if kind == 22: raise KeyError(sample.response)\n"
        "    return float(sample.response == str(sample.prompt.answer))\n"
    )
    home = tmp_path / "home"
    arguments = (f"reward.function={reward}:score", "reward.timeout_s=1", "trainer.total_training_steps=2")
    done, summary = train(home, server_home, *arguments, "reward.max_error_rate=0.4")
    assert done.returncode == 0, done.stderr
    assert summary["state"] == "COMPLETED" and summary["attempts"] == 1 and not events(home, "worker_lost")
    ((failed, whole),) = rows(home, "select sum(reward is null), count(*) from samples where step > 0")
    assert 0 < failed < whole
    rates = rows(home, "select value from metrics_outbox where key = 'reward/error_rate' order by step")
    assert len(rates) == 2 and sum(rate for (rate,) in rates) / 2 == pytest.approx(failed / whole)
    masked = rows(home, "select sum(value) from metrics_outbox where key = 'training/masked_samples'")
    assert masked == [(failed,)]

    refused, _ = train(tmp_path / "strict", server_home, *arguments)
    assert refused.returncode != 0
    assert "more than reward.max_error_rate=0 allows" in refused.stderr and ", sample " in refused.stderr


def test_resume_by_the_runs_name_needs_no_config(server_home: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = start(home, server_home)
    wait_for_stage(home, "step-0002/rollout", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    environment = environment_of(home, server_home)
    done = subprocess.run(
        command("resume", "quickstart-0001", "--plain"), env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert rows(home, "select state from runs") == [("COMPLETED",)]
    again = subprocess.run(
        command("resume", "quickstart-0001", "--plain"), env=environment, capture_output=True, text=True, timeout=120
    )
    assert again.returncode != 0 and "COMPLETED" in again.stderr and "Traceback" not in again.stderr
    unknown = subprocess.run(
        command("resume", "nobody", "--plain"), env=environment, capture_output=True, text=True, timeout=120
    )
    assert unknown.returncode != 0 and "nobody" in unknown.stderr and "Traceback" not in unknown.stderr
