"""A run whose Prefect server dies, hangs or never comes trains on, and the server shows the truth once it is back."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonshift.infra.server_process import free_port

from .conftest import QUICKSTART, SMALL, command, rows, train, wait_for_stage

pytestmark = [pytest.mark.slow, pytest.mark.case("O04")]
QUICK = ("recovery.prefect_flush_timeout_s=3",)


@dataclass
class Server:
    """A team's server, in a home of its own at a fixed port, that can be killed and stopped."""

    home: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        return {**given, "MOONSHIFT_HOME": str(self.home)}

    @property
    def address(self) -> dict[str, str]:
        return {"PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api"}

    def start(self, home: Path | None = None) -> None:
        """`home`: whose ledger the command reads; the server's own has no runs."""
        ledger = {"MOONSHIFT_LEDGER_URL": f"sqlite:///{home / 'ledger.db'}"} if home else {}
        start = command("server", "start", "--port", str(self.port))
        subprocess.run(start, env={**self.environment, **ledger}, check=True, capture_output=True, timeout=240)

    def stop(self) -> None:
        subprocess.run(command("server", "stop"), env=self.environment, check=True, capture_output=True)

    def signal(self, number: int) -> None:
        """To the server and all its children, at once."""
        leader = psutil.Process(json.loads((self.home / "services" / "prefect.json").read_text())["pid"])
        for process in [leader, *leader.children(recursive=True)]:
            process.send_signal(number)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("team"), free_port())
    server.start()
    yield server
    server.stop()


def flow_states(home: Path) -> list[str]:
    """States of all flow runs in a server's database, oldest first."""
    with sqlite3.connect(f"file:{home / 'prefect' / 'prefect.db'}?mode=ro", uri=True) as connection:
        return [state for (state,) in connection.execute("select state_type from flow_run order by created")]


def started(home: Path, address: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "MOONSHIFT_HOME": str(home), **address}
    if not address:
        environment.pop("PREFECT_API_URL", None)
    return subprocess.Popen(
        command("train", str(QUICKSTART), *SMALL, "--plain", "--summary", str(home.with_suffix(".json")), *arguments),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process: "subprocess.Popen[str]", home: Path, unbroken: tuple[Path, Any]) -> str:
    """Wait for the run; it came out as the one whose server stayed. Returns what it printed."""
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    summary = json.loads(home.with_suffix(".json").read_text())
    assert summary["state"] == "COMPLETED" and summary["attempts"] == 1
    assert summary["weights_sha256"] == unbroken[1]["weights_sha256"]
    return printed


def seconds_after_training(home: Path) -> float:
    [(ended_at,)] = rows(home, "select ended_at from attempts")
    return time.time() - ended_at


def test_a_server_that_dies_in_the_middle_and_stays_away_is_told_when_it_is_back(
    server: Server, unbroken: tuple[Path, Any], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    before = len(flow_states(server.home))
    process = started(home, server.address, *QUICK)
    wait_for_stage(home, "step-0002/rollout", process)
    server.signal(signal.SIGKILL)
    printed = ended(process, home, unbroken)
    assert seconds_after_training(home) < 60
    assert "does not answer" in printed
    assert flow_states(server.home)[before:] == ["RUNNING"]
    server.start(home)
    assert flow_states(server.home)[before:] == ["COMPLETED"]


def test_a_server_that_hangs_at_the_start_and_at_the_end_is_told_by_the_run_itself(
    server: Server, unbroken: tuple[Path, Any], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    before = len(flow_states(server.home))
    server.signal(signal.SIGSTOP)
    timeouts = {"PREFECT_API_REQUEST_TIMEOUT": "5"}
    process = started(home, server.address | timeouts, "recovery.prefect_flush_timeout_s=120")
    time.sleep(10)
    server.signal(signal.SIGCONT)
    wait_for_stage(home, "step-0005/rollout", process)
    server.signal(signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while rows(home, "select state from runs") != [("COMPLETED",)]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(10)
    assert process.poll() is None
    server.signal(signal.SIGCONT)
    ended(process, home, unbroken)
    assert flow_states(server.home)[before:] == ["COMPLETED"]


def test_a_local_server_that_dies_is_started_again_to_be_told(unbroken: tuple[Path, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = started(home, {})
    wait_for_stage(home, "step-0002/rollout", process)
    Server(home, 0).signal(signal.SIGKILL)
    printed = ended(process, home, unbroken)
    assert "does not answer" not in printed
    assert flow_states(home) == ["COMPLETED"]


def test_a_server_that_never_comes_is_waited_for_then_named_or_done_without(
    unbroken: tuple[Path, Any], tmp_path: Path
) -> None:
    nobody = {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"}
    home = tmp_path / "home"
    done, _ = train(home, nobody, "recovery.prefect_wait_s=2")
    assert done.returncode == 1 and not (home / "ledger.db").exists()
    assert re.search(r"error: PREFECT_API_URL=\S+ did not answer within 2 s.*\n.*recovery.without_prefect", done.stderr)
    done, summary = train(home, nobody, "recovery.prefect_wait_s=2", "recovery.without_prefect=true")
    assert done.returncode == 0, done.stderr
    assert "goes on without it" in done.stderr
    assert summary["weights_sha256"] == unbroken[1]["weights_sha256"]
    assert rows(home, "select count(*) from stages") == rows(unbroken[0], "select count(*) from stages")
    assert rows(home, "select flow_run_id from attempts") == [(None,)]
