"""MLflow as a view of the ledger: a sender thread empties the outbox, and training never waits for it.

Invariant: each (key, step) is sent with a timestamp computed from the run's start and the step, so that sending a point
again after a crash changes nothing. One MLflow run serves all attempts of a run.
"""

import hashlib
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonshift.core.config import config_from_json, flatten, mask, to_yaml
from moonshift.core.config.masking import MASK
from moonshift.core.config.schema import Config
from moonshift.core.errors import ConfigError, MoonshiftError, ServiceError

from .ledger import Lease, Ledger, MetricPoint, RunRecord, RunState
from .preemption import LAST_WORD_S, seconds_left
from .run_config import config_changes

log = logging.getLogger(__name__)
RUN_TAG = "moonshift.run_id"
PARENT_TAG = "moonshift.parent_run_id"
BASE_STEP_TAG = "moonshift.base_step"
LONGEST_PARAMETER = 6000  # characters; MLflow cuts longer ones without a word
LONGEST_NAME = 250  # characters of a metric
POLL_S = 1.0
GATHER_S = 1.0
"""A new point waits so long for others, to be sent together."""
STATUS = {RunState.COMPLETED: "FINISHED", RunState.FAILED: "FAILED", RunState.RUNNING: "RUNNING"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file or folder to copy into MLflow's artifacts."""

    path: Path
    folder: str


class Sender:
    """Brings what a run's outbox holds to MLflow; whoever calls it says when. Needs no lease."""

    def __init__(self, ledger: Ledger, run: RunRecord, config: Config, home: Path, uri: str | None = None) -> None:
        self._ledger, self._run, self._config = ledger, run, config
        self._artifact_root = home / "mlartifacts"
        self.uri = uri or tracking_uri(config, home)
        self.mlflow_run_id = run.mlflow_run_id

    def open(self) -> str:
        """Find or make the MLflow run of this run, and describe it; returns its id.

        A crash between making it and noting it in the ledger, or before it was described, is mended. Run ids count up
        in each ledger, and several ledgers may share a server: the start time tells runs of one id apart.
        """
        client = _client(self.uri)
        experiment = _experiment(client, self._config.tracking.experiment, self._artifact_root, self.uri)
        same = f"tags.`{RUN_TAG}` = '{self._run.run_id}' and attributes.start_time = {self._run.t0_ms}"
        found = client.search_runs([experiment], same, max_results=1)
        if found:
            run = found[0]
        else:
            tags = {RUN_TAG: self._run.run_id, "mlflow.source.name": "moonshift", **lineage_tags(self._run)}
            run = client.create_run(experiment, start_time=self._run.t0_ms, tags=tags, run_name=self._run.run_id)
        run_id: str = run.info.run_id
        self.mlflow_run_id = run_id
        self._describe(client, set(run.data.params))
        self._tag_changes(client, run.data.tags)
        return run_id

    def send(self) -> int:
        """Send every point that MLflow does not have yet; returns how many."""
        client = _client(self.uri)
        count = 0
        while points := self._ledger.pending_metrics(self._run.run_id, limit=1000):
            client.log_batch(self.mlflow_run_id, metrics=[self._metric(point) for point in points])
            self._ledger.mark_sent([point.id for point in points])
            count += len(points)
        return count

    def send_artifacts(self, artifacts: list[Artifact]) -> None:
        """Copy files and folders into the MLflow run."""
        client = _client(self.uri)
        for artifact in artifacts:
            if artifact.path.is_dir():
                client.log_artifacts(self.mlflow_run_id, str(artifact.path), artifact.folder)
            else:
                client.log_artifact(self.mlflow_run_id, str(artifact.path), artifact.folder)

    def set_status(self, status: str, *, end_ms: int | None = None) -> None:
        """Show the MLflow run as RUNNING, or as ended: FINISHED, FAILED or KILLED. No change where it is shown so."""
        client = _client(self.uri)
        if client.get_run(self.mlflow_run_id).info.status == status:
            return
        if status == "RUNNING":
            client.update_run(self.mlflow_run_id, status=status)
        else:
            client.set_terminated(self.mlflow_run_id, status, end_ms)

    def _describe(self, client: Any, known: set[str]) -> None:
        """Send the parameters that the MLflow run lacks, and the config with them; a sent one cannot be changed."""
        from mlflow.entities import Param

        values = [(key, mask(key, value)) for key, value in flatten(self._config).items() if key not in known]
        parameters = [Param(key, _cut(str(value))) for key, value in values]
        for start in range(0, len(parameters), 100):
            client.log_batch(self.mlflow_run_id, params=parameters[start : start + 100])
        if parameters:
            client.log_text(self.mlflow_run_id, to_yaml(self._config), "config.yaml")

    def _tag_changes(self, client: Any, known: Mapping[str, str]) -> None:
        """A parameter that a later attempt changed keeps its first value in MLflow; a tag says what it became."""
        for name, change in config_changes(self._ledger, self._run).items():
            if known.get(name) != change:
                client.set_tag(self.mlflow_run_id, name, change)

    def _metric(self, point: MetricPoint) -> Any:
        from mlflow.entities import Metric

        return Metric(metric_name(point.key), point.value, timestamp(self._run, point.step), point.step)


class Tracker:
    """Sends one run's metrics, parameters and artifacts to MLflow from a thread of its own."""

    def __init__(self, ledger: Ledger, lease: Lease, config: Config, home: Path) -> None:
        self._ledger, self._lease = ledger, lease
        self._settings = config.tracking
        self._grace_s = config.recovery.grace_s
        self._sender = Sender(ledger, ledger.run(lease.run_id), config, home)
        self.uri = self._sender.uri
        self._wake = threading.Event()
        self._closing = threading.Event()
        self.artifacts: list[Artifact] = []
        self._status = "FINISHED"
        self.error: str | None = None
        self.opened = False
        """whether MLflow has its run and knows that it goes on"""
        self._thread = threading.Thread(target=self._work, name="mlflow-sender", daemon=True)

    def start(self) -> None:
        """Begin sending; returns at once."""
        if self._settings.enabled:
            self._thread.start()

    def notify(self) -> None:
        """New points are in the outbox."""
        self._wake.set()

    def close(self, state: RunState) -> bool:
        """Send what is left, then `artifacts`, and end the MLflow run as FINISHED, FAILED or KILLED.

        Waits for the flush deadline at most, and after a signal for what is left of the grace period. Returns whether
        everything was delivered; what was not stays in the ledger's outbox.
        """
        if not self._settings.enabled:
            return True
        self._status = shown_status(state)
        self._closing.set()
        self._wake.set()
        left_s = max(LAST_WORD_S, seconds_left(self._grace_s))
        self._thread.join(min(self._settings.flush_timeout_s, left_s))
        return not self._thread.is_alive() and self.error is None

    def _work(self) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        delay = POLL_S
        while True:
            if self.error is None:
                self._wake.wait(delay)
            # new points are no reason to ask a server sooner that does not answer
            self._closing.wait(GATHER_S if self.error is None else delay)
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._send(closing)
                self.error, delay = None, POLL_S
            # a ledger that is locked for long must not end the sender: the points are sent later
            except (MlflowException, SQLAlchemyError, OSError, MoonshiftError) as error:
                self.error, delay = mask("error", f"{type(error).__name__}: {error}"), min(60.0, delay * 2)
                place = mask("uri", self.uri)
                log.warning("metrics not sent to MLflow at %s, they stay in the ledger: %s", place, self.error)
            if closing:
                return

    def _send(self, closing: bool) -> None:
        if not self.opened:
            self._ledger.set_mlflow_run_id(self._lease, self._sender.open())
            self._sender.set_status("RUNNING")
            self.opened = True
        self._sender.send()
        if closing:
            self._sender.send_artifacts(self.artifacts)
            self._sender.set_status(self._status)


def sync(ledger: Ledger, run_id: str, home: Path, uri: str | None = None) -> int:
    """Send to MLflow what the outbox of a run still holds; returns how many points. A second call sends none.

    The MLflow run is made where there is none, and shown as what the run came to; of a run that is going on nothing
    else is touched, its own process sends too. Sends also where `tracking.enabled` is false: it was asked for.

    Args:
        uri: MLflow's address; by default the config's, whose password the ledger does not keep.

    Raises:
        LedgerError: for an unknown run.
        ConfigError: where the address held a password, and none is given.
        ServiceError: when MLflow cannot be reached, or the run has just begun and makes its MLflow run itself; what
            was not sent stays in the outbox.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    run = ledger.run(run_id)
    sender = Sender(ledger, run, config_from_json(run.config_json), home, uri)
    if MASK in sender.uri:
        raise ConfigError(
            f"The ledger does not keep the password of MLflow's address {sender.uri} (tracking.mlflow_uri of run "
            f"{run_id}). Give the whole address with --mlflow-uri."
        )
    if run.state is RunState.RUNNING and run.mlflow_run_id is None:
        raise ServiceError(
            f"Run {run_id} is RUNNING and has no MLflow run yet: its own process makes one. Wait for it; if that "
            "process is gone, start it again with --resume."
        )
    try:
        sender.open()
        count = sender.send()
        sender.set_status(shown_status(run.state), end_ms=int(run.updated_at * 1000))
    except MoonshiftError:  # a StorageError is an OSError too, and the ledger's, not MLflow's
        raise
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise ServiceError(
            f"MLflow at {mask('uri', sender.uri)} cannot be reached, {ledger.count_pending(run_id)} points of run "
            f"{run_id} stay in the ledger: {mask('error', str(error))}. Start it and sync again."
        ) from error
    return count


def shown_status(state: RunState) -> str:
    """MLflow's word for a run's state; what was interrupted or paused is KILLED there."""
    return STATUS.get(state, "KILLED")


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


def lineage_tags(run: RunRecord) -> dict[str, str]:
    """Of a fork, its parent and the step that it was forked at."""
    if run.parent_run_id is None:
        return {}
    return {PARENT_TAG: run.parent_run_id, BASE_STEP_TAG: str(run.base_step)}


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
