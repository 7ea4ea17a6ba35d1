"""Writers that are killed in the middle of their commits leave a sound ledger: nothing lost, nothing half."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from moonshift.infra.ledger import Ledger, NewRun

from ..postgres import programs
from .commits import RUN, Campaign, finish_step, stage_of

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(("options", "count"), [((), 60), (("--postgres",), 20)])
def test_writers_killed_in_their_commits_leave_whole_stages(
    options: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    if options and programs() is None:
        pytest.skip("no PostgreSQL server on this machine (initdb, pg_ctl): apt-get install postgresql")
    command = [sys.executable, "-m", "tests.chaos.commits", "--count", str(count), "--work", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} clean" in done.stdout and "in a COMMIT" in done.stdout


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("DELETE FROM metrics_outbox WHERE step = 2 AND key = 'update/metric-1'", "update of step 2: 5 metrics"),
        ("DELETE FROM samples WHERE step = 1 AND uid = 'prompt-3' AND sample_index = 2", "31 samples, 31 as expected"),
        ("UPDATE samples SET reward = 7 WHERE step = 1 AND uid = 'prompt-3'", "32 samples, 28 as expected"),
        ("DELETE FROM stages WHERE step = 2 AND name = 'update'", "3 stages, expected 4 to 4"),
        ("INSERT INTO steps VALUES ('commits-0001', 9, 'COMMITTED', 9)", "3 rows in steps"),
    ],
)
def test_the_check_names_what_is_half_or_lost(damage: str, words: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger.open(url) as ledger:
        ledger.create_run(NewRun(name="commits", run_id=RUN, config_json="{}", config_hash="", seed=0, steps_planned=9))
        lease = ledger.acquire(RUN, lease_s=60)
        for number in range(4):
            ledger.commit_stage(lease, stage_of(number))
            finish_step(ledger, lease, number + 1)
    assert Campaign(url).check(4, 4) == []
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(damage))
    engine.dispose()
    faults = Campaign(url).check(4, 4)
    assert any(words in fault for fault in faults), faults


def test_the_check_names_a_file_that_is_not_sound(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    Ledger.open(f"sqlite:///{file}").close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("UPDATE sqlite_master SET rootpage = 3 WHERE name = 'ix_runs_name'")
        connection.commit()
    assert any("integrity_check" in fault for fault in Campaign(f"sqlite:///{file}").check(0, 0))
