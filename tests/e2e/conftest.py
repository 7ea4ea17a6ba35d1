"""One small run of the quickstart, and one Prefect server, shared by the tests of the whole job."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..chaos.runs import QUICKSTART, is_running, overrides

SMALL = overrides(5)


MEASURED_BY_THE_CLOCK = "key like 'timing_s/%' or key like 'rollout/%' or key like 'perf/%' or key like 'memory/%'"


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def unbroken(server_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    home = tmp_path_factory.mktemp("unbroken") / "home"
    done, summary = train(home, server_home)
    assert done.returncode == 0, done.stdout + done.stderr
    return home, summary


def start(home: Path, server: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", str(QUICKSTART), *SMALL, "--plain", *arguments),
        env=environment_of(home, server), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def resume_and_compare(home: Path, server: dict[str, str], unbroken: tuple[Path, Any], *arguments: str) -> None:
    """Go on with the run; weights, metrics and samples come out as those of the run that was not interrupted."""
    done, summary = train(home, server, "--resume", *arguments)
    assert done.returncode == 0, done.stderr
    assert summary["attempts"] == 2 and summary["run_id"] == "quickstart-0001"
    assert summary["weights_sha256"] == unbroken[1]["weights_sha256"]
    series = f"select key, step, value from metrics_outbox where not ({MEASURED_BY_THE_CLOCK}) order by key, step"
    assert rows(home, series) == rows(unbroken[0], series)
    trained = "select epoch, uid, sample_index, step, reward from samples order by step, uid, epoch, sample_index"
    assert rows(home, trained) == rows(unbroken[0], trained)


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that run after the deadline; Ray's agents notice only after a while that their node is gone."""
    deadline = time.monotonic() + timeout_s
    running = processes
    while time.monotonic() < deadline:
        running = [process for process in processes if is_running(process)]
        if not running:
            return []
        time.sleep(0.2)
    return running


def wait_for_stage(home: Path, stage: str, process: "subprocess.Popen[str]") -> None:
    """Until the ledger of a living run holds the stage, given as `step-0003/rollout`."""
    step, name = int(stage[5:9]), stage[10:]
    wanted = f"select count(*) from stages where step = {step} and name = '{name}'"
    deadline = time.monotonic() + 240
    while not ((home / "ledger.db").exists() and _committed(home, wanted)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def _committed(home: Path, query: str) -> bool:
    try:
        return rows(home, query) == [(1,)]
    except sqlite3.OperationalError:  # the tables are not there yet
        return False
