"""A real run is found whole; one byte of it changed is named; sending it all to MLflow again changes nothing there."""

import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moonshift.infra.ledger import Ledger
from moonshift.infra.tracking import sync
from moonshift.infra.verification import Kind, findings, scope, verify

from .conftest import command, environment_of, rows

pytestmark = pytest.mark.slow


def test_a_real_run_is_whole_and_a_changed_byte_is_named(unbroken: tuple[Path, Any], tmp_path: Path) -> None:
    home, run_id = tmp_path / "home", unbroken[1]["run_id"]
    shutil.copytree(unbroken[0], home, ignore=shutil.ignore_patterns("prefect", "models", "ray*"))
    with Ledger.open(f"sqlite:///{home / 'ledger.db'}") as ledger:
        assert verify(ledger, run_id, home) == []
        assert scope(ledger, run_id).startswith("5 steps, 32 stages, 640 samples, ")
        for place in (home / "runs" / run_id).rglob("*.safetensors"):
            content = place.read_bytes()
            place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            first = next(findings(ledger, run_id, home))
            kind = Kind.CHECKPOINT if "checkpoints" in place.parts else Kind.STAGE
            assert first.kind is kind and first.where in str(place), first
            place.write_bytes(content)
        assert verify(ledger, run_id, home) == []


def test_the_command_names_what_is_wrong_and_says_what_is_whole(unbroken: tuple[Path, Any], tmp_path: Path) -> None:
    home, run_id = tmp_path / "home", unbroken[1]["run_id"]
    shutil.copytree(unbroken[0], home, ignore=shutil.ignore_patterns("prefect", "models", "ray*"))

    def verified(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("verify", run_id, *options), env=environment_of(home, {}), capture_output=True, text=True
        )

    whole = verified()
    assert whole.returncode == 0 and whole.stdout.startswith(f"{run_id} is whole: 5 steps, 32 stages")
    (home / "runs" / run_id / "checkpoints" / "step-000005" / "state.json").write_text("{}")
    with sqlite3.connect(home / "ledger.db") as connection:
        connection.execute("delete from samples where step = 2 and sample_index = 0")
    first, every = verified(), verified("--all")
    assert first.returncode == every.returncode == 1
    assert len(first.stdout.splitlines()) == 1 and first.stdout.startswith("wrong: samples:")
    assert "state.json" in every.stdout and len(every.stdout.splitlines()) > 1
    unknown = subprocess.run(command("verify", "nobody"), env=environment_of(home, {}), capture_output=True, text=True)
    assert unknown.returncode == 1 and "nobody" in unknown.stderr and "Traceback" not in unknown.stderr


def test_points_that_mlflow_has_already_are_not_doubled(unbroken: tuple[Path, Any], tmp_path: Path) -> None:
    home, run_id = tmp_path / "home", unbroken[1]["run_id"]
    shutil.copytree(unbroken[0], home, ignore=shutil.ignore_patterns("prefect", "models", "ray*", "runs"))

    def points() -> list[tuple[Any, ...]]:
        with sqlite3.connect(home / "mlflow.db") as connection:
            return connection.execute("select key, step, value, timestamp from metrics order by key, step").fetchall()

    before = points()
    with Ledger.open(f"sqlite:///{home / 'ledger.db'}") as ledger:
        assert sync(ledger, run_id, home) == 0
        with sqlite3.connect(home / "ledger.db") as connection:
            connection.execute("update metrics_outbox set sent = 0")
        assert sync(ledger, run_id, home) == len(before)
    assert points() == before
    assert rows(home, "select count(*), count(distinct key || '@' || step) from metrics_outbox where sent") == [
        (len(before), len(before))
    ]
