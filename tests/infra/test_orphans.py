"""What a killed attempt left running is ended by the next one of that run, and nothing else is."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonshift.infra.orphans import end_orphans, note_of, noted_processes
from moonshift.infra.server_process import lives

# a driver whose child, marked `ours-to-end`, has a child of its own; both ignore its death, the second is stopped
DRIVER = """
import subprocess, sys, time
from moonshift.infra.orphans import noted_processes
grandchild = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
child = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(600)"
with noted_processes("run-0001", "ours-to-end"):
    subprocess.Popen([sys.executable, "-c", child, "ours-to-end"])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "somebody else's"])
    print("started", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONSHIFT_HOME", str(tmp_path))


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[[float], tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """Start the driver; returns it and its family once that is noted: child, grandchild, and the other child."""

    def started(seconds: float) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(seconds)], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None and driver.stdout.readline() == "started\n"
        end = time.monotonic() + 20
        while len(noted()) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        family = sorted(psutil.Process(driver.pid).children(recursive=True), key=lambda each: each.pid)
        assert len(family) == 3

        def clean() -> None:
            for process in [driver, *family]:
                if psutil.pid_exists(process.pid):
                    process.kill()
            driver.wait()

        request.addfinalizer(clean)
        return driver, family

    return started


def noted() -> list[dict[str, Any]]:
    path = note_of("run-0001")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def running(family: list[psutil.Process]) -> list[bool]:
    """Child, other child and grandchild, in the order in which they were started."""
    return [lives(process) for process in family]


def test_what_a_killed_driver_left_is_ended_and_nothing_else(start: Any) -> None:
    driver, family = start(600)
    assert end_orphans("run-0001") == [] and all(running(family)), "the driver lives"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert all(running(family)), "nothing ends by itself"
    assert end_orphans("run-0002") == [] and all(running(family)), "another run"
    assert len(end_orphans("run-0001")) == 2
    other = [process for process in family if lives(process)]
    assert [process.cmdline()[-1] for process in other] == ["somebody else's"]
    assert end_orphans("run-0001") == []


def test_what_outlives_an_orderly_end_is_ended_by_the_driver_itself(start: Any) -> None:
    driver, family = start(3)
    assert driver.wait(30) == 0
    assert [process.cmdline()[-1] for process in family if lives(process)] == ["somebody else's"]
    assert not note_of("run-0001").exists()


@pytest.mark.parametrize("spoilt", ["the start time", "the machine", "a torn line"])
def test_only_what_is_proven_is_ended(start: Any, spoilt: str) -> None:
    driver, family = start(600)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    lines = noted()
    if spoilt == "the start time":  # the numbers were given to others
        lines[1:] = [{**line, "started": line["started"] - 60.0} for line in lines[1:]]
    if spoilt == "the machine":
        lines[0]["place"] = ["another", *lines[0]["place"][1:]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    note_of("run-0001").write_text(text[:-8] if spoilt == "a torn line" else text)
    ended = end_orphans("run-0001")
    assert len(ended) == (2 if spoilt == "a torn line" else 0), "a child of the process that is proven goes with it"
    assert sum(running(family)) == 3 - len(ended)


def test_a_folder_that_cannot_be_written_costs_only_the_note(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("in the way")
    with noted_processes("run-0001"):
        pass
    assert end_orphans("run-0001") == []
