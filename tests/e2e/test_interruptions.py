"""A run that is killed, preempted or out of disk space goes on to the weights of the run that was not."""

import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonshift.infra.files import files_below, sha256_file

from .conftest import (
    command,
    environment_of,
    resume_and_compare,
    rows,
    start,
    still_running,
    train,
    wait_for_stage,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", ["step-0003/rollout", "step-0004/update"])
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path, stage: str
) -> None:
    home = tmp_path / "home"
    process = start(home, server_home)
    wait_for_stage(home, stage, process)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resume_and_compare(home, server_home, unbroken)
    assert still_running(below, 1) == [], "processes outlived their driver and the next attempt"


def test_a_run_that_was_stopped_and_overtaken_changes_nothing_when_it_wakes(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    """As a machine that was suspended: its lease runs out, another attempt ends the run, and then it goes on."""
    home = tmp_path / "home"
    lease = "recovery.lease_s=15"
    stopped = start(home, server_home, lease)
    wait_for_stage(home, "step-0003/rollout", stopped)
    stop_between_transactions(home, stopped)
    time.sleep(16)
    resume_and_compare(home, server_home, unbroken, lease)
    ended = rows(home, "select * from stages order by step, name"), digests(home)
    stopped.send_signal(signal.SIGCONT)
    _, shown = stopped.communicate(timeout=120)
    assert stopped.returncode == 1 and "lost its lease" in shown and "Traceback" not in shown, shown
    assert (rows(home, "select * from stages order by step, name"), digests(home)) == ended
    assert rows(home, "select state from runs") == [("COMPLETED",)]
    verified = subprocess.run(
        command("verify", "quickstart-0001"), env=environment_of(home, server_home), capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


def stop_between_transactions(home: Path, process: "subprocess.Popen[str]") -> None:
    """SIGSTOP; where that leaves the ledger locked, another one a moment later."""
    while True:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        try:
            with closing(sqlite3.connect(home / "ledger.db", timeout=0)) as connection:
                connection.execute("begin immediate")
                return
        except sqlite3.OperationalError:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)


def digests(home: Path) -> dict[str, str]:
    """Of all that the run's folder holds, whatever its name."""
    return {path.relative_to(home).as_posix(): sha256_file(path) for path in files_below(home / "runs")}


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_preempted_run_and_no_process(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    home = tmp_path / "home"
    process = start(home, server_home)
    wait_for_stage(home, "step-0005/rollout", process)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sent)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == code, shown
    assert "--resume" in shown and "Traceback" not in shown
    assert rows(home, "select state from runs") == [("PREEMPTED",)]
    assert still_running(below, 60) == [], "processes outlived their driver"
    if sent is signal.SIGTERM:
        # and the newest checkpoint turns out to be damaged: the one before and two redo logs bring back the weights
        damaged = home / "runs" / "quickstart-0001" / "checkpoints" / "step-000004" / "optimizer.safetensors"
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        resume_and_compare(home, server_home, unbroken)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has no room for the first checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_pauses_the_run_and_it_goes_on_when_mended(
    unbroken: tuple[Path, Any], server_home: dict[str, str], small_disk: Path
) -> None:
    home = small_disk / "home"
    done, _ = train(home, server_home)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr and str(small_disk) in done.stderr and "Traceback" not in done.stderr
    assert rows(home, "select state from runs") == [("PAUSED",)]
    assert not list((home / "runs").rglob("*.tmp")), "half-written files stayed"
    subprocess.run(["mount", "-o", "remount,size=300m", str(small_disk)], check=True)
    resume_and_compare(home, server_home, unbroken)
