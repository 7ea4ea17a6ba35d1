"""A run whose MLflow is away from its first step to its last comes out as any other; `sync` delivers every point."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonshift.infra.tracking import metric_name

from ..infra.faulty_http import FaultyServer, faulty_server
from .conftest import command, environment_of, rows, train

pytestmark = [pytest.mark.slow, pytest.mark.case("L01")]
RUN = "quickstart-0001"
FLUSH_S = 2


@pytest.fixture
def faulty(mlflow_server: str) -> Iterator[FaultyServer]:
    with faulty_server(mlflow_server) as server:
        yield server


def sync(home: Path, server: dict[str, str]) -> str:
    done = subprocess.run(
        command("sync", RUN), env=environment_of(home, server), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def delivered(uri: str, experiment: str) -> list[tuple[str, int, float]]:
    """(key, step, value) of every point of the one MLflow run."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    [shown] = client.search_runs([found.experiment_id])
    assert shown.info.status == "FINISHED"
    return sorted(
        (point.key, point.step, point.value)
        for key in shown.data.metrics
        for point in client.get_metric_history(shown.info.run_id, key)
    )


def kept(home: Path) -> list[tuple[str, int, float]]:
    """The same as the ledger has it; a point that is not finite is a count."""
    query = "select key, step, value from metrics_outbox"
    return sorted(
        (metric_name(f"nonfinite/{key}"), step, 1.0) if value is None else (metric_name(key), step, value)
        for key, step, value in rows(home, query)
    )


@pytest.mark.parametrize("outage", ["refuse", "error", "hang"])
def test_mlflow_may_be_away_for_the_whole_run(
    unbroken: tuple[Path, Any], server_home: dict[str, str], faulty: FaultyServer, tmp_path: Path, outage: str
) -> None:
    home, experiment = tmp_path / "home", f"whole run: {outage}"
    faulty.fail(outage)
    done, summary = train(
        home,
        server_home,
        f"tracking.mlflow_uri={faulty.uri}",
        f"tracking.flush_timeout_s={FLUSH_S}",
        f"tracking.experiment={experiment}",
    )
    left = time.time() - rows(home, "select ended_at from attempts")[0][0]
    assert done.returncode == 0, done.stderr
    assert (summary["state"], summary["attempts"]) == ("COMPLETED", 1)
    assert summary["weights_sha256"] == unbroken[1]["weights_sha256"]
    assert left < 30, "the process stayed on for MLflow"
    [(points,)] = rows(home, "select count(*) from metrics_outbox where not sent")
    assert rows(home, "select count(*) from metrics_outbox") == [(points,)] and points > 100
    assert outage == "refuse" or faulty.asked > 0
    faulty.heal()
    assert re.search(rf"{points} points sent, 0 left", sync(home, server_home))
    assert re.search(r"\b0 points sent, 0 left", sync(home, server_home))
    found = delivered(faulty.uri, experiment)
    assert found == kept(home) and len(found) == points
    assert len({(key, step) for key, step, _ in found}) == points, "a key has two points of one step"
