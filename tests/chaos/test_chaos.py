"""The injector strikes the very call it was told to, the comparison is not blind, and a killed run ends the same."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from .comparison import Home, differences, metric_gap, unsound
from .injector import ACTED, CALLS, Plan, write_plan

ROOT = Path(__file__).parent.parent.parent
INJECT = Path(__file__).parent / "inject"
# the four storage kinds, twice each; it says what has happened, for a kill leaves no other trace
PROGRAM = """
import os, sqlite3, sys
from pathlib import Path
home = Path(os.environ["MOONSHIFT_HOME"])
(home / "runs").mkdir(parents=True, exist_ok=True)
connection = sqlite3.connect(home / "ledger.db")
connection.execute("create table if not exists done (number)")
for number in (1, 2):
    place = home / "runs" / f"file-{number}"
    part = place.with_suffix(".part")
    part.write_text("0123456789")
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(place)
    connection.execute("insert into done values (?)", (number,))
    connection.commit()
    connection.execute("select * from done").fetchall()
    connection.commit()
print(type(open).__name__, type(os.replace).__name__, type(sqlite3.connect).__name__)
"""


def run(home: Path, plan: Plan | None) -> subprocess.CompletedProcess[str]:
    """The program above, with the command line of a run's driver."""
    environment = {**os.environ, "MOONSHIFT_HOME": str(home), "PYTHONPATH": str(INJECT)}
    environment.pop("MOONSHIFT_CHAOS", None)
    if plan is not None:
        chaos = home.with_name("chaos")
        if not chaos.exists():
            write_plan(str(chaos), plan)
        environment["MOONSHIFT_CHAOS"] = str(chaos)
    command = [sys.executable, "-c", PROGRAM, "moonshift.flows.cli"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def committed(home: Path) -> int:
    with closing(sqlite3.connect(home / "ledger.db")) as connection:
        return connection.execute("select count(*) from done").fetchone()[0]


def files(home: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((home / "runs").iterdir())}


def test_without_the_variable_nothing_is_patched(tmp_path: Path) -> None:
    done = run(tmp_path / "home", None)
    assert done.stdout.split() == ["builtin_function_or_method"] * 3, done.stderr


def test_a_process_that_is_no_part_of_a_run_is_left_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(type(open).__name__, 'moonshift_chaos_injector' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(INJECT), "MOONSHIFT_CHAOS": str(tmp_path / "not there")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["builtin_function_or_method", "False"], done.stderr


def test_every_call_is_counted_once_and_reads_are_not(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run(home, Plan(home=str(home))).returncode == 0
    lines = (tmp_path / "chaos" / CALLS).read_text().splitlines()
    kinds = [line.split('"')[1] for line in lines]
    assert kinds == ["write", "fsync", "rename", "commit"] * 2


@pytest.mark.parametrize(("keep", "left"), [("0", ""), ("1", "0"), ("half", "01234"), ("last", "012345678")])
def test_a_kill_in_a_write_leaves_a_part_of_the_second_file(tmp_path: Path, keep: str, left: str) -> None:
    home = tmp_path / "home"
    done = run(home, Plan(home=str(home), kind="write", at=2, keep=keep))
    assert done.returncode == -signal.SIGKILL
    assert files(home) == {"file-1": "0123456789", "file-2.part": left}
    assert unsound(Home(home)) == ["left behind: runs/file-2.part"]


@pytest.mark.parametrize(
    ("kind", "moment", "names", "commits"),
    [
        ("fsync", "before", {"file-1", "file-2.part"}, 1),
        ("rename", "before", {"file-1", "file-2.part"}, 1),
        ("rename", "after", {"file-1", "file-2"}, 1),
        ("commit", "before", {"file-1", "file-2"}, 1),
        ("commit", "after", {"file-1", "file-2"}, 2),
    ],
)
def test_a_kill_falls_before_or_after_the_second_call(
    tmp_path: Path, kind: str, moment: str, names: set[str], commits: int
) -> None:
    home = tmp_path / "home"
    done = run(home, Plan(home=str(home), kind=kind, at=2, moment=moment))
    assert done.returncode == -signal.SIGKILL
    assert set(files(home)) == names and committed(home) == commits


@pytest.mark.parametrize(
    ("kind", "action", "words"),
    [
        ("write", "enospc", "No space left on device"),
        ("fsync", "eio", "Input/output error"),
        ("rename", "enospc", "No space left on device"),
        ("commit", "enospc", "database or disk is full"),
        ("commit", "eio", "disk I/O error"),
    ],
)
def test_a_call_is_refused_as_the_system_would(tmp_path: Path, kind: str, action: str, words: str) -> None:
    home = tmp_path / "home"
    done = run(home, Plan(home=str(home), kind=kind, at=2, action=action))
    assert done.returncode == 1 and words in done.stderr.splitlines()[-1]
    assert committed(home) == 1


def test_a_run_is_struck_once_unless_always(tmp_path: Path) -> None:
    home = tmp_path / "home"
    plan = Plan(home=str(home), kind="rename", at=2)
    assert run(home, plan).returncode == -signal.SIGKILL
    (tmp_path / "chaos" / "rename.count").unlink()
    assert run(home, plan).returncode == 0, "the marker holds the second strike back"
    shutil.rmtree(tmp_path / "chaos")
    always = Plan(home=str(home), kind="rename", at=1, always=True)
    assert [run(home, always).returncode for _ in range(2)] == [-signal.SIGKILL] * 2
    assert len((tmp_path / "chaos" / ACTED).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "read"},
        {"kind": "ray", "action": "enospc"},
        {"kind": "write", "action": "oom"},
        {"kind": "rename", "action": "eio", "moment": "after"},
        {"kind": "write", "keep": "most"},
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"allowed are|strikes|no moment after"):
        Plan(home="/home", **wrong)  # pyright: ignore[reportArgumentType]


def edited(statement: str, database: str = "ledger.db") -> Callable[[Path], None]:
    def edit(home: Path) -> None:
        with closing(sqlite3.connect(home / database)) as connection:
            assert connection.execute(statement).rowcount > 0, statement
            connection.commit()

    return edit


def flipped(home: Path) -> None:
    manifest = next((home / "runs").glob("*/checkpoints/*/manifest.json"))
    text = manifest.read_text()
    mark = '"sha256": "'
    at = text.index(mark) + len(mark)
    manifest.write_text(text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :])


def left_behind(home: Path) -> None:
    (home / "runs" / "x.tmp").touch()


FAULTS: dict[str, Callable[[Path], None]] = {
    "weights": edited("update events set detail = '{\"sha256\": \"0\"}' where kind = 'weights'"),
    "runs": edited("update runs set state = 'FAILED'"),
    "stages": edited("update stages set digest = '0' where step = 1 and name = 'update'"),
    "metrics": edited("update metrics_outbox set value = value + 1e-9 where key = 'actor/pg_loss' and step = 1"),
    "clock metrics": edited("delete from metrics_outbox where key like 'timing_s/%' and step = 2"),
    "metrics not sent": edited("update metrics_outbox set sent = 0 where step = 2"),
    "samples": edited("delete from samples where step = 1 and sample_index = 0"),
    "checkpoints": edited("update checkpoints set bytes = bytes + 1"),
    "checkpoint files": flipped,
    "MLflow": edited("delete from metrics where key = 'actor/pg_loss' and step = 1", "mlflow.db"),
    "left behind": left_behind,
    "left behind: runs/quickstart-0001/stages": edited("update stages set path = 'elsewhere' where step = 2"),
}


@pytest.mark.slow
def test_a_killed_run_is_identical_and_every_difference_would_show(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--steps", "2", "kill", "--count", "1", "--work", str(tmp_path / "work"),
         "--at", "rename:24:after", "--target", "any"],
        cwd=ROOT, capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 1 identical" and "at rename 24 (runs/" in done.stdout
    assert list((tmp_path / "work" / "runs").iterdir()) == []
    unbroken = next((tmp_path / "work").glob("unbroken-*/home"))
    assert differences(Home(unbroken), Home(unbroken)) == [] and metric_gap(Home(unbroken), Home(unbroken))[0] == 0
    for name, spoil in FAULTS.items():
        copy = tmp_path / "copy"
        shutil.copytree(unbroken, copy)
        spoil(copy)
        found = differences(Home(copy), Home(unbroken))
        assert any(fault.startswith(name) for fault in found), f"{name}: {found}"
        shutil.rmtree(copy)
