"""Flow runs whose processes die, with a real server, worker and deployment of one slot: they end, and go on again."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moonshift.flows.automations import AUTOMATIONS, CRASHED, CRASHING, SILENT, install
from moonshift.infra.ledger import Ledger, NewRun

from ..chaos.runs import QUICKSTART, ROOT
from .conftest import SMALL, command, environment_of, rows

pytestmark = pytest.mark.slow
NAMES = [automation["name"] for automation in AUTOMATIONS]
# named as the flow whose runs are healed; `began` has a line for each time that its body was entered
TINY_FLOW = """
import os, signal, time
from pathlib import Path
from prefect import flow
from prefect.runtime import flow_run
from moonshift.tasks import restarts

HERE = Path(__file__).parent
if (HERE / "broken").exists():
    raise ImportError("this worker lacks a package")

@flow(name="post-train")
@restarts.not_for_ever
def tiny(how: str) -> str:
    began = HERE / "began"
    again = began.exists() and flow_run.id in began.read_text()
    with began.open("a") as lines:
        lines.write(f"{flow_run.id} {os.getpid()}\\n")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "long" and not again:
        time.sleep(900)
    return "done"
"""
PREFECT_YAML = """
name: healing
pull: null
deployments:
  - name: healing
    entrypoint: tiny_flow:tiny
    parameters: {how: quick}
    work_pool: {name: healing, job_variables: {env: {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: "30"}}}
    concurrency_limit: {limit: 1, collision_strategy: ENQUEUE}
  - name: training
    entrypoint: moonshift.flows.post_train:post_train
    parameters: {config: CONFIG, overrides: OVERRIDES, display: none}
    work_pool: {name: healing, job_variables: {env: {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: "30"}}}
"""


@pytest.fixture(scope="module")
def server(server_home: dict[str, str]) -> Iterator[tuple[str, httpx.Client]]:
    """The server's URL and a client of its API; the automations are gone afterwards."""
    url = server_home["PREFECT_API_URL"]
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as api:
        yield url, api
        for automation in installed(api):
            api.delete(f"/automations/{automation['id']}").raise_for_status()


def installed(api: httpx.Client) -> list[dict[str, Any]]:
    wanted = {"automations": {"name": {"any_": NAMES}}}
    return api.post("/automations/filter", json=wanted).raise_for_status().json()


def test_automations_are_installed_once_mended_and_left_switched_off(server: tuple[str, httpx.Client]) -> None:
    url, api = server
    assert install(url, dry_run=True) == [(name, "created") for name in NAMES] and installed(api) == []
    assert install(url) == [(name, "created") for name in NAMES]
    first = {automation["name"]: automation for automation in installed(api)}
    unchanged = [(name, "unchanged") for name in NAMES]
    assert install(url) == unchanged
    assert {automation["name"]: automation for automation in installed(api)} == first
    slower, silent = (
        {**SILENT, "trigger": {**SILENT["trigger"], "within": 600}},
        f"/automations/{first[NAMES[0]]['id']}",
    )
    api.put(silent, json=slower).raise_for_status()
    api.patch(silent, json={"enabled": False}).raise_for_status()
    off = ", switched off on the server"
    assert install(url, dry_run=True) == [(NAMES[0], "updated" + off), *unchanged[1:]]
    assert api.get(silent).json()["trigger"]["within"] == 600
    assert install(url)[0] == (NAMES[0], "updated" + off)
    mended = api.get(silent).json()
    assert mended["trigger"]["within"] == 90 and not mended["enabled"]
    api.patch(silent, json={"enabled": True}).raise_for_status()
    assert install(url) == unchanged and len(installed(api)) == 3


def test_the_command_says_what_it_did_and_where_nobody_answers(server: tuple[str, httpx.Client]) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        given = command("automations", "install", *arguments)
        return subprocess.run(given, env=environment, capture_output=True, text=True, timeout=120)

    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    install(server[0])
    done = run("--prefect-url", server[0], "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}: would be unchanged" for name in NAMES]
    nobody = run("--prefect-url", "http://127.0.0.1:9/api")
    assert nobody.returncode == 1 and "http://127.0.0.1:9/api" in nobody.stderr and "Traceback" not in nobody.stderr


@dataclass
class Deployment:
    """One slot on a process worker that can be killed; each test has its own."""

    api: httpx.Client
    folder: Path
    environment: dict[str, str]

    def id(self, name: str) -> str:
        return self.api.get(f"/deployments/name/post-train/{name}").raise_for_status().json()["id"]

    def prefect(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0 or "already exists" in done.stderr + done.stdout, done.stdout + done.stderr

    @contextmanager
    def worker(self) -> "Iterator[subprocess.Popen[bytes]]":
        with (self.folder / "worker.log").open("a") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "prefect", "worker", "start", "--pool", "healing"],
                env=self.environment, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield worker
        finally:
            worker.terminate()
            worker.wait(60)

    def start(self, name: str = "healing", **parameters: str) -> str:
        """Schedule a run for now; returns its id."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return self.api.post(f"/deployments/{self.id(name)}/create_flow_run", json=body).raise_for_status().json()["id"]

    def run(self, run: str) -> dict[str, Any]:
        return self.api.get(f"/flow_runs/{run}").raise_for_status().json()

    def states(self, run: str) -> list[tuple[str, float]]:
        """Names, and moments in seconds since the epoch, oldest first."""
        found = self.api.get("/flow_run_states/", params={"flow_run_id": run}).raise_for_status().json()
        return sorted(
            ((state["name"], datetime.fromisoformat(state["timestamp"]).timestamp()) for state in found),
            key=lambda state: state[1],
        )

    def began(self, run: str) -> list[int]:
        """Ids of the processes that entered the flow's body."""
        lines = (self.folder / "began").read_text().splitlines() if (self.folder / "began").exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(run)]

    def await_state(self, run: str, name: str, timeout_s: float) -> None:
        until(lambda: self.run(run)["state_name"] == name, timeout_s, lambda: str(self.states(run)))


def until(condition: Callable[[], bool], timeout_s: float, shown: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.5)


@pytest.fixture
def deployment(server: tuple[str, httpx.Client], server_home: dict[str, str], tmp_path: Path) -> Iterator[Deployment]:
    url, api = server
    install(url)
    (tmp_path / "tiny_flow.py").write_text(TINY_FLOW)
    (tmp_path / "prefect.yaml").write_text(
        PREFECT_YAML.replace("CONFIG", str(QUICKSTART)).replace("OVERRIDES", repr(list(SMALL)))
    )
    environment = {
        **environment_of(tmp_path / "home", server_home),
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    made = Deployment(api, tmp_path, environment)
    made.prefect("work-pool", "create", "--type", "process", "healing")
    made.prefect("deploy", "--all", "--prefect-file", str(tmp_path / "prefect.yaml"))
    yield made
    for name in ("healing", "training"):
        api.delete(f"/deployments/{made.id(name)}").raise_for_status()


@pytest.mark.case("O01")
def test_a_run_whose_worker_was_killed_crashes_frees_its_slot_and_goes_on(deployment: Deployment) -> None:
    with deployment.worker() as worker:
        dead = deployment.start(how="long")
        until(lambda: len(deployment.began(dead)) == 1, 60)
        second = deployment.start(how="quick")
        deployment.await_state(second, "AwaitingConcurrencySlot", 60)
        killed_at = time.time()
        for process in (psutil.Process(worker.pid), psutil.Process(deployment.began(dead)[0])):
            process.send_signal(signal.SIGKILL)
        worker.wait(10)
    assert deployment.run(dead)["state_name"] == "Running"
    with deployment.worker():  # another machine's
        deployment.await_state(second, "Completed", 180)
        deployment.await_state(dead, "Completed", 120)
    crashed_at = dict(deployment.states(dead))["Crashed"]
    assert crashed_at - killed_at < 120
    began_at = dict(deployment.states(second))["Running"]
    assert crashed_at < began_at < killed_at + 180
    assert deployment.run(dead)["run_count"] == 2 and len(deployment.began(dead)) == 2
    limit = deployment.api.get(f"/deployments/{deployment.id('healing')}").json()["global_concurrency_limit"]
    assert limit["active_slots"] == 0


def test_training_that_was_killed_is_started_again_and_goes_on_with_its_run_to_the_same_weights(
    deployment: Deployment, unbroken: tuple[Path, Any]
) -> None:
    """Its parameters do not say `resume`, and a newer run of its name is there."""
    home = deployment.folder / "home"

    def committed() -> bool:
        with suppress(sqlite3.OperationalError):  # the tables are not there yet
            return (home / "ledger.db").exists() and rows(home, "select count(*) from stages where step = 3") > [(0,)]
        return False

    with deployment.worker():
        run = deployment.start("training")
        until(lambda: deployment.run(run)["state_name"] == "Running", 60)
        until(committed, 240)
        [(pid,)] = rows(home, "select pid from attempts")
        psutil.Process(pid).send_signal(signal.SIGKILL)
        deployment.await_state(run, "Crashed", 60)
        with Ledger.open(f"sqlite:///{home / 'ledger.db'}") as ledger:
            kept = ledger.run("quickstart-0001")
            newer = NewRun(
                name="quickstart", config_json=kept.config_json, config_hash=kept.config_hash, seed=0, steps_planned=5
            )
            assert ledger.create_run(newer).run_id == "quickstart-0002"
        deployment.await_state(run, "Completed", 240)
    tried = rows(home, "select run_id, state, flow_run_id from attempts order by number")
    assert tried == [("quickstart-0001", "CRASHED", run), ("quickstart-0001", "COMPLETED", run)]
    weights = "select detail from events where kind = 'weights'"
    assert rows(home, weights) == rows(unbroken[0], weights)
    assert [name for name, _ in deployment.states(run)].count("Crashed") == 1


def test_a_run_that_always_crashes_ends_as_failed_and_can_be_retried_by_hand(deployment: Deployment) -> None:
    with deployment.worker():
        run = deployment.start(how="dies")
        deployment.await_state(run, "Failed", 300)
        names = [name for name, _ in deployment.states(run)]
        assert names.count("Crashed") == len(deployment.began(run)) == 3, names
        assert "3 times in a row" in deployment.run(run)["state"]["message"]
        by_hand = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
        deployment.api.post(f"/flow_runs/{run}/set_state", json=by_hand).raise_for_status()
        until(lambda: len(deployment.began(run)) == 4, 60)
        deployment.await_state(run, "Crashed", 30)


def test_a_run_that_crashes_before_its_body_is_started_again_but_not_for_ever(deployment: Deployment) -> None:
    """As shipped, but two crashes are too many instead of twenty, and ten seconds a pause."""
    for automation, number in ((CRASHED, {"within": 10}), (CRASHING, {"threshold": 2})):
        changed = automation | {"trigger": automation["trigger"] | number}
        [found] = [each for each in installed(deployment.api) if each["name"] == automation["name"]]
        deployment.api.put(f"/automations/{found['id']}", json=changed).raise_for_status()
    (deployment.folder / "broken").touch()
    with deployment.worker():
        run = deployment.start(how="quick")
        deployment.await_state(run, "Failed", 120)
        time.sleep(20)
    names = [name for name, _ in deployment.states(run)]
    assert names.count("Crashed") == 2 and names[-1] == "Failed", names
