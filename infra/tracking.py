"""MLflow as a view of the ledger: a sender thread empties the outbox, and training never waits for it.

Invariant: each (key, step) is sent with a timestamp computed from the run's start and the step, so that sending a point
again after a crash changes nothing. One MLflow run serves all attempts of a run.
"""

import hashlib
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonshift.core.config import flatten, mask, to_yaml
from moonshift.core.config.schema import Config

from .ledger import Lease, Ledger, MetricPoint, RunRecord

log = logging.getLogger(__name__)
RUN_TAG = "moonshift.run_id"
LONGEST_PARAMETER = 6000  # characters; MLflow cuts longer ones without a word
LONGEST_NAME = 250  # characters of a metric
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file or folder to copy into MLflow's artifacts."""

    path: Path
    folder: str


class Tracker:
    """Sends one run's metrics, parameters and artifacts to MLflow from a thread of its own."""

    def __init__(self, ledger: Ledger, lease: Lease, config: Config, home: Path) -> None:
        self._ledger, self._lease, self._config = ledger, lease, config
        self._run = ledger.run(lease.run_id)
        self.uri = tracking_uri(config, home)
        self._artifact_root = home / "mlartifacts"
        self._wake = threading.Event()
        self._closing = threading.Event()
        self.artifacts: list[Artifact] = []
        self._status = "FINISHED"
        self.mlflow_run_id: str | None = self._run.mlflow_run_id
        self.error: str | None = None
        self._opened = False
        self._thread = threading.Thread(target=self._work, name="mlflow-sender", daemon=True)

    def start(self) -> None:
        """Begin sending; returns at once."""
        if self._config.tracking.enabled:
            self._thread.start()

    def notify(self) -> None:
        """New points are in the outbox."""
        self._wake.set()

    def close(self, status: str) -> bool:
        """Send what is left, then `artifacts`, and end the MLflow run as FINISHED, FAILED or KILLED.

        Waits for the flush deadline at most. Returns whether everything was delivered; what was not stays in the
        ledger's outbox.
        """
        if not self._config.tracking.enabled:
            return True
        self._status = status
        self._closing.set()
        self._wake.set()
        self._thread.join(self._config.tracking.flush_timeout_s)
        return not self._thread.is_alive() and self.error is None

    def _work(self) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        delay = POLL_S
        while True:
            self._wake.wait(delay)
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._send(closing)
                self.error, delay = None, POLL_S
            except (MlflowException, SQLAlchemyError, OSError) as error:
                self.error, delay = f"{type(error).__name__}: {error}", min(60.0, delay * 2)
                log.warning("MLflow at %s is not reachable, points stay in the ledger: %s", self.uri, self.error)
            if closing:
                return

    def _send(self, closing: bool) -> None:
        client = _client(self.uri)
        if not self._opened:
            self._open(client)
        while points := self._ledger.pending_metrics(self._lease.run_id, limit=1000):
            client.log_batch(self.mlflow_run_id, metrics=[self._metric(point) for point in points])
            self._ledger.mark_sent([point.id for point in points])
        if closing:
            for artifact in self.artifacts:
                if artifact.path.is_dir():
                    client.log_artifacts(self.mlflow_run_id, str(artifact.path), artifact.folder)
                else:
                    client.log_artifact(self.mlflow_run_id, str(artifact.path), artifact.folder)
            client.set_terminated(self.mlflow_run_id, self._status)

    def _open(self, client: Any) -> None:
        """Find or make the MLflow run of this run; a crash between making it and noting it in the ledger is mended."""
        experiment = _experiment(client, self._config.tracking.experiment, self._artifact_root, self.uri)
        found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._run.run_id}'", max_results=1)
        if found:
            run_id: str = found[0].info.run_id
            client.update_run(run_id, status="RUNNING")
        else:
            tags = {RUN_TAG: self._run.run_id, "mlflow.source.name": "moonshift"}
            run = client.create_run(experiment, start_time=self._run.t0_ms, tags=tags, run_name=self._run.run_id)
            run_id = run.info.run_id
        self._ledger.set_mlflow_run_id(self._lease, run_id)
        self.mlflow_run_id = run_id
        if not found:
            self._describe(client)
        self._opened = True

    def _describe(self, client: Any) -> None:
        from mlflow.entities import Param

        values = [(key, mask(key, value)) for key, value in flatten(self._config).items()]
        parameters = [Param(key, _cut(str(value))) for key, value in values]
        for start in range(0, len(parameters), 100):
            client.log_batch(self.mlflow_run_id, params=parameters[start : start + 100])
        client.log_text(self.mlflow_run_id, to_yaml(self._config), "config.yaml")

    def _metric(self, point: MetricPoint) -> Any:
        from mlflow.entities import Metric

        return Metric(metric_name(point.key), point.value, timestamp(self._run, point.step), point.step)


def metric_name(key: str) -> str:
    """A name that MLflow takes, different for different keys; names it takes already are unchanged.

    `@` becomes `_at_`, as verl writes it; any other character that is refused becomes its code as `:25:`. What looks
    like such a mark already gets its first character marked itself. An empty, dotted or absolute path part is marked
    too, and a name over 250 characters ends in a hash of the whole.
    """
    marked = re.sub(r"_(?=at_)|:(?=[0-9a-f]+:)", lambda match: f":{ord(match.group()):x}:", key)
    marked = re.sub(r"[^\w\-. :/@]", lambda match: f":{ord(match.group()):x}:", marked, flags=re.ASCII)
    marked = marked.replace("@", "_at_")
    marked = "/".join(_part(part) for part in marked.split("/"))
    if len(marked) <= LONGEST_NAME:
        return marked
    return f"{marked[: LONGEST_NAME - 17]}:{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _part(part: str) -> str:
    """A path part that names a folder of its own."""
    return part.replace(".", ":2e:") if part.strip(".") == "" and part else part or ":2f:"


def timestamp(run: RunRecord, step: int) -> int:
    """Milliseconds: computed from the run's start and the step, never read from a clock."""
    return run.t0_ms + step * 1000


def tracking_uri(config: Config, home: Path) -> str:
    """Where MLflow's data lie."""
    return config.tracking.mlflow_uri or f"sqlite:///{home.absolute() / 'mlflow.db'}"


def _client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _experiment(client: Any, name: str, artifact_root: Path, uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found:
        return found.experiment_id
    # a database of our own has no server that says where artifacts go
    place = artifact_root.absolute().as_uri() if uri.startswith("sqlite") else None
    return client.create_experiment(name, artifact_location=place)


def _cut(text: str) -> str:
    if len(text) <= LONGEST_PARAMETER:
        return text
    mark = f"… [cut, {len(text)} characters: see config.yaml]"
    return text[: LONGEST_PARAMETER - len(mark)] + mark
