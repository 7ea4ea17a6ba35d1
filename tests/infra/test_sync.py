"""What MLflow lacks is sent once, by `sync` or by a sender that a locked ledger does not end."""

import json
import sqlite3
import time
from typing import Any

import pytest

from moonshift.core.errors import ConfigError, ServiceError
from moonshift.infra.ledger import Ledger, RunState
from moonshift.infra.tracking import Tracker, sync
from moonshift.infra.verification import Kind

from .small_run import RUN, Make


def test_sync_sends_what_is_left_once_and_ends_the_mlflow_run(make: Make) -> None:
    from mlflow import MlflowClient

    small = make()
    small.begin()
    with pytest.raises(ServiceError, match="own process"):
        sync(small.ledger, RUN, small.home)
    small.end()
    total = small.ledger.count_pending(RUN)
    assert [kind for kind, _ in small.found()] == [Kind.UNSENT]
    assert sync(small.ledger, RUN, small.home) == total
    client = MlflowClient(tracking_uri=f"sqlite:///{small.home / 'mlflow.db'}")

    def seen() -> Any:
        [shown] = client.search_runs([client.get_experiment_by_name("moonshift").experiment_id])  # type: ignore[union-attr]
        history = client.get_metric_history(shown.info.run_id, "val/score/mean")
        return shown.info, shown.data.params, [(point.step, point.value, point.timestamp) for point in history]

    info, params, history = seen()
    t0 = small.ledger.run(RUN).t0_ms
    assert info.status == "FINISHED" and params["actor_rollout_ref.rollout.n"] == "2"
    assert history == [(0, 0.5, t0), (2, 0.6, t0 + 2000), (4, 0.7, t0 + 4000)]
    assert sync(small.ledger, RUN, small.home) == 0 and small.found() == []
    small.sql("update metrics_outbox set sent = 0")  # as after a crash between sending and noting it
    assert sync(small.ledger, RUN, small.home) == total
    assert json.dumps(seen(), default=str) == json.dumps((info, params, history), default=str)
    other = make()  # its own run small-0001, on the same server
    other.begin()
    other.ledger.release(other.lease, RunState.FAILED)
    other.sql("update runs set t0_ms = t0_ms + 5")
    sync(other.ledger, RUN, other.home, uri=f"sqlite:///{small.home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("moonshift")
    assert experiment is not None
    assert {shown.info.status for shown in client.search_runs([experiment.experiment_id])} == {"FINISHED", "FAILED"}


def test_sync_says_what_it_needs_where_it_cannot_send(make: Make) -> None:
    secret = make(tracking__mlflow_uri="http://user:word@127.0.0.1:9")
    secret.begin()
    secret.ledger.release(secret.lease, RunState.PAUSED)
    with pytest.raises(ConfigError, match="--mlflow-uri"):
        sync(secret.ledger, RUN, secret.home)
    pending = secret.ledger.count_pending(RUN)
    blocked = secret.home / "file"
    blocked.write_text("")
    with pytest.raises(ServiceError, match=f"{pending} points of run small-0001 stay"):
        sync(secret.ledger, RUN, secret.home, uri=f"sqlite:///{blocked / 'mlflow.db'}")
    assert secret.ledger.count_pending(RUN) == pending


def test_a_ledger_that_was_locked_does_not_end_the_sender(make: Make) -> None:
    small = make()
    impatient = Ledger.open(f"sqlite:///{small.home / 'ledger.db'}", busy_timeout_s=0.1, retry_s=0)
    tracker = Tracker(impatient, small.lease, small.config, small.home)
    small.begin()
    with sqlite3.connect(small.home / "ledger.db", isolation_level=None) as other:
        other.execute("begin immediate")
        tracker.start()
        deadline = time.monotonic() + 60
        while tracker.error is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "locked" in tracker.error
        other.execute("rollback")
    assert tracker.close(RunState.PREEMPTED) and small.ledger.count_pending(RUN) == 0
