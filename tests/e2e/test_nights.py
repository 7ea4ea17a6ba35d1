"""A real schedule over the night of a clock change, by a real server and worker: one date, one run."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..chaos.runs import QUICKSTART, ROOT, overrides
from .conftest import environment_of, rows

pytestmark = pytest.mark.slow
# The change of the year before, as that of 2026-11-01: a worker takes what is late at once, what is to come later.
PREFECT_YAML = """
name: nights
pull: null
deployments:
  - name: nightly
    entrypoint: moonshift.flows.post_train:post_train
    parameters: {config: CONFIG, overrides: OVERRIDES, display: none}
    work_pool: {name: nights}
    concurrency_limit: {limit: 1, collision_strategy: ENQUEUE}
    schedules:
      - {cron: "30 1 * * *", timezone: America/New_York}
      - {cron: "30 1 * * *", timezone: Etc/GMT+5} # New York's winter clock: the same 01:30 once more, an hour later
"""


def prefect(environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def nightly(server_home: dict[str, str], tmp_path: Path) -> Iterator[tuple[httpx.Client, str, Path]]:
    """The server's API, the id of a deployment with a worker, and the home that the worker's runs have."""
    home = tmp_path / "home"
    environment = {**environment_of(home, server_home), "PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "2"}
    file = tmp_path / "prefect.yaml"
    file.write_text(
        PREFECT_YAML.replace("CONFIG", str(QUICKSTART)).replace("OVERRIDES", repr(list(overrides(1)))), encoding="utf-8"
    )
    prefect(environment, "work-pool", "create", "--type", "process", "nights")
    prefect(environment, "deploy", "--all", "--prefect-file", str(file))
    with httpx.Client(base_url=server_home["PREFECT_API_URL"], trust_env=False, timeout=30) as api:
        deployment = api.get("/deployments/name/post-train/nightly").raise_for_status().json()["id"]
        with (tmp_path / "worker.log").open("w") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "prefect", "worker", "start", "--pool", "nights"],
                env=environment, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
            yield api, deployment, home
            worker.terminate()
            worker.wait(60)
        api.delete(f"/deployments/{deployment}").raise_for_status()


def _runs(api: httpx.Client, deployment: str) -> list[dict[str, Any]]:
    wanted = {"deployments": {"id": {"any_": [deployment]}}}
    return api.post("/flow_runs/filter", json=wanted).raise_for_status().json()


def _ended(api: httpx.Client, ids: set[str], timeout_s: float) -> dict[str, str]:
    """State names by flow run, once all have ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        runs = [api.get(f"/flow_runs/{run}").raise_for_status().json() for run in ids]
        if all(run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") for run in runs):
            return {run["id"]: run["state_name"] for run in runs}
        assert time.monotonic() < deadline, [run["state_name"] for run in runs]
        time.sleep(0.5)


@pytest.mark.case("O06")
def test_the_night_with_an_hour_twice_is_run_once(nightly: tuple[httpx.Client, str, Path]) -> None:
    api, deployment, home = nightly
    night = {"start_time": "2025-11-02T05:15:00Z", "end_time": "2025-11-02T06:45:00Z", "max_runs": 1}
    api.post(f"/deployments/{deployment}/schedule", json=night).raise_for_status()
    made = {run["id"]: run["expected_start_time"] for run in _runs(api, deployment) if run["auto_scheduled"]}
    made = {run: moment for run, moment in made.items() if moment.startswith("2025-11-02")}
    assert {moment[11:16] for moment in made.values()} == {"05:30", "06:30"}  # 01:30 before and after the change
    states = _ended(api, set(made), 240)
    assert sorted(states.values()) == ["Completed", *["Skipped"] * (len(made) - 1)]
    [trained] = [run for run, state in states.items() if state == "Completed"]
    assert rows(home, "select flow_run_id from attempts") == [(trained,)]
    assert rows(home, "select deployment, local_date, flow_run_id from nights") == [
        ("post-train/nightly", "2025-11-02", trained)
    ]
    assert rows(home, "select count(*) from steps") == [(1,)]
