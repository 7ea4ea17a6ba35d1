"""MLflow away, endings, long and changed parameters: what the team sees in MLflow is what the ledger says, later."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonshift.core.config import config_from_json, to_json, to_yaml
from moonshift.core.errors import StageError
from moonshift.infra import preemption
from moonshift.infra.ending import ending, tracking
from moonshift.infra.ledger import RunState
from moonshift.infra.preemption import noted_signals
from moonshift.infra.run_config import note_config
from moonshift.infra.tracking import LONGEST_PARAMETER, Tracker, sync

from .faulty_http import FaultyServer, faulty_server
from .small_run import RUN, Make, Small

OUTAGES = ("refuse", "error", "hang")


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's own settings, the waits a tenth."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")


@pytest.fixture
def faulty(mlflow_server: str) -> Iterator[FaultyServer]:
    with faulty_server(mlflow_server) as server:
        yield server


def shown(uri: str, small: Small) -> Any:
    """The MLflow run of a run made by hand."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(small.config.tracking.experiment)
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    return found


def points(uri: str, small: Small) -> list[tuple[str, int, float]]:
    """Every point of every key that MLflow has."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = shown(uri, small)
    return sorted(
        (point.key, point.step, point.value)
        for key in found.data.metrics
        for point in client.get_metric_history(found.info.run_id, key)
    )


def wanted(small: Small) -> list[tuple[str, int, float]]:
    """Every finite point of the ledger; a point that is not finite as its count."""
    small.sql("update metrics_outbox set sent = 0")
    return sorted((point.key, point.step, point.value) for point in small.ledger.pending_metrics(RUN))


@pytest.mark.slow
@pytest.mark.case("L01")
@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.parametrize("when", ["whole run", "middle"])
@pytest.mark.usefixtures("short_waits")
def test_an_outage_costs_nothing_and_every_point_comes_later_once(
    make: Make, faulty: FaultyServer, outage: str, when: str
) -> None:
    small = make(tracking__mlflow_uri=faulty.uri, tracking__flush_timeout_s=2, tracking__experiment=f"{outage} {when}")
    tracker = Tracker(small.ledger, small.lease, small.config, small.home)
    if when == "whole run":
        faulty.fail(outage)
    tracker.start()
    if when == "middle":
        small.begin()
        tracker.notify()
        _until(lambda: small.ledger.count_pending(RUN) == 0)
        faulty.fail(outage)
        small.step(4)
    else:
        small.begin()
        small.step(4)
        _until(lambda: tracker.error is not None)
    tracker.notify()
    small.stage(4, "validate", metrics={"val/score/mean": 0.7})
    small.checkpoint(4)
    pending = small.ledger.count_pending(RUN)
    assert pending > 0
    began = time.monotonic()
    assert not tracker.close(RunState.COMPLETED)
    assert time.monotonic() - began < 2 + 1
    small.ledger.release(small.lease, RunState.COMPLETED)
    assert small.ledger.count_pending(RUN) == pending
    faulty.heal()
    assert sync(small.ledger, RUN, small.home) == pending
    assert sync(small.ledger, RUN, small.home) == 0
    assert points(faulty.uri, small) == wanted(small)
    assert shown(faulty.uri, small).info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.case("L01")
@pytest.mark.usefixtures("short_waits")
def test_waiting_for_mlflow_takes_less_than_a_twentieth_of_a_core(make: Make, faulty: FaultyServer) -> None:
    small = make(tracking__mlflow_uri=faulty.uri, tracking__flush_timeout_s=1, tracking__experiment="cost")
    small.begin()
    tracker = Tracker(small.ledger, small.lease, small.config, small.home)
    faulty.fail("refuse")
    tracker.start()
    _until(lambda: tracker.error is not None)  # MLflow is imported by now
    began, used = time.monotonic(), sum(psutil.Process().cpu_times()[:2])
    while time.monotonic() < began + 10:
        tracker.notify()  # as often as a step's stages do, and more
        time.sleep(0.5)
    cost = (sum(psutil.Process().cpu_times()[:2]) - used) / (time.monotonic() - began)
    tracker.close(RunState.PREEMPTED)
    assert cost < 0.05


def test_after_a_signal_a_server_that_hangs_is_waited_for_within_the_grace_period_only(make: Make) -> None:
    with faulty_server("127.0.0.1:9") as hanging:
        hanging.fail("hang")
        small = make(tracking__mlflow_uri=hanging.uri, tracking__flush_timeout_s=60, recovery__grace_s=1)
        tracker = Tracker(small.ledger, small.lease, small.config, small.home)
        tracker.start()
        _until(lambda: hanging.asked > 0)
        try:
            with pytest.raises(preemption.Preempted), noted_signals():
                _signal()
            began = time.monotonic()
            assert not tracker.close(RunState.PREEMPTED)
            assert time.monotonic() - began < 1 + preemption.LAST_WORD_S + 1
        finally:
            preemption.forget()


def _until(holds: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Cancelled(BaseException):
    """As Prefect's own signal that a flow run was cancelled: no Exception."""


def _signal() -> None:
    os.kill(os.getpid(), 15)
    time.sleep(5)


def _raise(error: BaseException) -> Any:
    def body() -> None:
        raise error

    return body


ENDINGS: dict[str, tuple[Any, RunState, str]] = {
    "normal": (lambda: None, RunState.COMPLETED, "FINISHED"),
    "exception": (_raise(StageError("x")), RunState.FAILED, "FAILED"),
    "sys.exit(1)": (_raise(SystemExit(1)), RunState.FAILED, "FAILED"),
    "SIGTERM": (_signal, RunState.PREEMPTED, "KILLED"),
    "user cancel": (_raise(Cancelled()), RunState.PREEMPTED, "KILLED"),
}


@pytest.mark.case("L02")
@pytest.mark.parametrize("ending", ENDINGS)
def test_mlflow_shows_how_the_attempt_ended(make: Make, ending: str) -> None:
    body, state, status = ENDINGS[ending]
    small = make(trainer__total_training_steps=4)
    small.begin()
    small.step(4)
    assert _attempt(small, body) == state
    found = shown(f"sqlite:///{small.home / 'mlflow.db'}", small)
    assert (small.ledger.run(RUN).state, found.info.status) == (state, status)


@pytest.mark.case("L02")
def test_the_run_of_a_killed_process_goes_on_under_its_id_and_is_finished(make: Make) -> None:
    small = make()
    killed = Tracker(small.ledger, small.lease, small.config, small.home)
    killed.start()
    small.begin()
    killed.notify()
    _until(lambda: small.ledger.count_pending(RUN) == 0)
    uri = f"sqlite:///{small.home / 'mlflow.db'}"
    before = shown(uri, small).info
    assert before.status == "RUNNING"
    small.sql("update leases set expires_at = 0")  # SIGKILL: not a word more, and the lease runs out
    small.lease = small.ledger.acquire(RUN, lease_s=600)
    small.step(4)
    assert _attempt(small, lambda: None) is RunState.COMPLETED
    after = shown(uri, small).info
    assert (after.run_id, after.status) == (before.run_id, "FINISHED")


def _attempt(small: Small, body: Any) -> RunState:
    """`body` as an attempt's; the state that the run ends in."""
    tracker = Tracker(small.ledger, small.lease, small.config, small.home)
    preemption.forget()
    try:
        with noted_signals(), ending(small.ledger, small.lease), tracking(tracker):
            body()
    except (StageError, SystemExit, preemption.Preempted, Cancelled):
        pass
    finally:
        preemption.forget()
    assert tracker.error is None
    return small.ledger.run(RUN).state


@pytest.mark.case("L03")
@pytest.mark.parametrize("length", [6000, 6001, 100_000])
def test_a_long_parameter_is_cut_with_a_mark_and_whole_in_the_artifact(make: Make, length: int) -> None:
    from mlflow import MlflowClient

    prompt = "x" * length
    small = make(data__system_prompt=prompt)
    small.begin()
    small.step(4)
    assert _attempt(small, lambda: None) is RunState.COMPLETED
    uri = f"sqlite:///{small.home / 'mlflow.db'}"
    found = shown(uri, small)
    value = found.data.params["data.system_prompt"]
    assert len(value) <= LONGEST_PARAMETER
    if length <= LONGEST_PARAMETER:
        assert value == prompt
    else:
        assert value.endswith(f"… [cut, {length} characters: see config.yaml]") and value.startswith("xxx")
    place = MlflowClient(tracking_uri=uri).download_artifacts(found.info.run_id, "config.yaml", str(small.home))
    assert Path(place).read_text(encoding="utf-8") == to_yaml(small.config)


@pytest.mark.case("L07")
def test_a_parameter_changed_on_resume_keeps_its_first_value_and_gets_a_tag(make: Make) -> None:
    small = make(trainer__save_freq=2)
    small.begin()
    assert _attempt(small, _raise(StageError("x"))) is RunState.FAILED
    small.lease = small.ledger.acquire(RUN, lease_s=600)
    first = small.config
    small.config = first.model_copy(update={"trainer": first.trainer.model_copy(update={"save_freq": 1})})
    note_config(small.ledger, small.lease, small.ledger.run(RUN), small.config)
    small.step(4)
    assert _attempt(small, lambda: None) is RunState.COMPLETED
    data = shown(f"sqlite:///{small.home / 'mlflow.db'}", small).data
    assert data.params["trainer.save_freq"] == "2"
    assert data.tags["moonshift.changed.attempt-2"] == "trainer.save_freq: 2 → 1"
    kept = [event.detail["json"] for event in small.ledger.events(RUN) if event.kind == "config"]
    assert config_from_json(small.ledger.run(RUN).config_json).trainer.save_freq == 2
    assert kept == [to_json(small.config, masked=True)]
