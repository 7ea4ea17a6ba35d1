"""Stages are committed behind the back of the next one: in order, each after its flush, and no failure is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonshift.core.errors import CommitUnknownError, LeaseLostError, LedgerError, StorageError
from moonshift.infra.attempt import Attempt, StageOutput, _ending
from moonshift.infra.commits import Commits
from moonshift.infra.ledger import Lease, Ledger, NewRun, RunState, StageCommit
from moonshift.infra.preflight import prepare
from moonshift.infra.tracking import Tracker

from .test_attempt import SETTINGS, NoWorkers, Recorder


@pytest.fixture
def ledger(moonshift_home: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{moonshift_home / 'ledger.db'}") as opened:
        yield opened


@pytest.fixture
def lease(ledger: Ledger) -> Lease:
    ledger.create_run(NewRun(name="run", run_id="run-0001", config_json="{}", config_hash="0", seed=0, steps_planned=4))
    return ledger.acquire("run-0001", lease_s=600)


@pytest.fixture
def attempt(ledger: Ledger, lease: Lease, moonshift_home: Path) -> Attempt:
    attempt = Attempt(prepare("", SETTINGS), ledger, lease, Recorder())
    workers: Any = NoWorkers()
    attempt.roles = workers
    attempt.tracker = Tracker(ledger, lease, attempt.config, moonshift_home)
    return attempt


def stage_commit(step: int, name: str = "rollout", seconds: float = 1.0) -> StageCommit:
    return StageCommit(
        step=step, name=name, input_digest="i", path="p", digest="d", seconds=seconds, metrics={f"{name}/x": 1.0}
    )


@pytest.fixture
def add(tmp_path: Path) -> Callable[[Commits, int], None]:
    """Add a stage of a step, whose output is there."""

    def added(commits: Commits, step: int) -> None:
        place = tmp_path / "stages" / f"step-{step:04d}" / "rollout"
        place.mkdir(parents=True)
        (place / "data.txt").write_text(str(step))
        commits.add_stage(place, stage_commit(step), lambda: None)

    return added


class Gate:
    """Holds up the ledger's commits until it is opened; a second thread may wait in it."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        commit = ledger.commit_stage

        def held(*arguments: Any) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            commit(*arguments)

        monkeypatch.setattr(ledger, "commit_stage", held)


def steps(ledger: Ledger) -> list[int]:
    return [record.step for record in ledger.stages("run-0001")]


@pytest.mark.parametrize(
    "error",
    [LeaseLostError("lost"), StorageError("full"), LedgerError("no"), CommitUnknownError("?"), OSError(5, "I/O")],
)
def test_after_a_failure_nothing_is_committed_and_it_is_raised_everywhere_as_what_it_was(
    ledger: Ledger, lease: Lease, add: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    commit = ledger.commit_stage
    monkeypatch.setattr(ledger, "commit_stage", lambda lease, stage: _third_fails(commit, lease, stage, error))
    commits = Commits(ledger, lease)
    gate = threading.Event()
    commits.add(lambda: _wait(gate))  # so that all are added before the first is done
    for step in (1, 2, 3, 4):
        add(commits, step)
    commits.add_step(1)
    gate.set()
    for ask in (commits.settle, lambda: commits.stage("run-0001", 2, "rollout"), commits.settle, commits.check):
        with pytest.raises(type(error)) as raised:
            ask()
        assert raised.value is error
    with pytest.raises(type(error)):
        add(commits, 5)
    assert steps(ledger) == [1, 2] and ledger.last_step("run-0001") == 0
    with pytest.raises(type(error)), commits:
        pass


def _third_fails(commit: Any, lease: Lease, stage: StageCommit, error: Exception) -> None:
    if stage.step == 3:
        raise error
    commit(lease, stage)


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_row_comes_after_the_flush_of_its_files_and_names(
    ledger: Ledger, lease: Lease, add: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    flush, commit = os.fsync, ledger.commit_stage

    def fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        seen.append(path.relative_to(tmp_path).as_posix() if path.is_relative_to(tmp_path) else "")
        flush(file)

    def committed(lease: Lease, stage: StageCommit) -> None:
        seen.append(f"row {stage.step}")
        commit(lease, stage)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(ledger, "commit_stage", committed)
    with Commits(ledger, lease) as commits:
        add(commits, 1)
        add(commits, 2)
    for step in (1, 2):
        before = seen[: seen.index(f"row {step}")]
        place = f"stages/step-000{step}"
        assert {f"{place}/rollout/data.txt", f"{place}/rollout", place, "stages"} <= set(before)
    assert seen.index("row 1") < seen.index("row 2")


def test_a_stage_is_read_by_the_next_one_before_it_is_committed_and_the_ledger_waits_for_it(
    attempt: Attempt, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(ledger, monkeypatch)
    first = attempt.stage(1, "rollout", (), _writes("x"))
    second = attempt.stage(1, "score", (first,), lambda out: _copies(attempt.path(first), out))
    assert gate.reached.wait(30) and steps(ledger) == []
    assert Path(attempt.path(second), "data.txt").read_text() == "x"
    threading.Timer(0.3, gate.opened.set).start()
    assert [record.name for record in attempt.ledger.stages(attempt.run_id)] == ["rollout", "score"]


def test_a_checkpoint_is_committed_with_all_before_it_when_its_stage_returns(
    attempt: Attempt, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(ledger, monkeypatch)
    attempt.stage(1, "rollout", (), _writes("x"))
    threading.Timer(0.3, gate.opened.set).start()
    place = attempt.checkpoints / "step-000001"

    def work(out: Path) -> StageOutput:
        assert steps(ledger) == [1], "a checkpoint is begun over stages that are not committed"
        return _writes("c")(out)

    attempt.stage(1, "checkpoint", (), work, place)
    assert [record.name for record in ledger.stages(attempt.run_id)] == ["rollout", "checkpoint"]


def test_what_waits_is_committed_before_an_attempt_that_failed_gives_its_lease_back(
    ledger: Ledger, lease: Lease, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(ledger, monkeypatch)
    with pytest.raises(KeyError), _ending(ledger, lease), Commits(ledger, lease) as commits:
        add(commits, 1)
        add(commits, 2)
        threading.Timer(0.3, gate.opened.set).start()
        raise KeyError("broken")
    assert steps(ledger) == [1, 2] and ledger.run("run-0001").state is RunState.FAILED


@pytest.mark.parametrize(
    ("error", "state"), [(StorageError("full"), RunState.PAUSED), (LedgerError("no"), RunState.FAILED)]
)
def test_a_run_whose_last_commit_failed_does_not_end_as_completed(
    ledger: Ledger, lease: Lease, add: Any, error: Exception, state: RunState
) -> None:
    def fails() -> None:
        time.sleep(0.2)
        raise error

    for step in (1, 2, 3, 4):
        ledger.commit_step(lease, step, step)
    with pytest.raises(type(error)), _ending(ledger, lease), Commits(ledger, lease) as commits:
        commits.add(fails)
    assert ledger.run("run-0001").state is state


def test_a_ledger_that_hangs_holds_up_the_run_after_some_stages(ledger: Ledger, lease: Lease) -> None:
    gate = threading.Event()
    with Commits(ledger, lease) as commits:
        for _ in range(10):
            commits.add(lambda: _wait(gate))
        threading.Timer(0.5, gate.set).start()
        before = time.monotonic()
        commits.add(lambda: None)
        assert time.monotonic() - before > 0.4


def test_the_ledger_is_asked_for_what_it_can_know_only(
    ledger: Ledger, lease: Lease, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.commit_stage(lease, stage_commit(2, seconds=7.0))
    ledger.commit_step(lease, 1, 1)
    asked: list[tuple[int, str]] = []
    ask = ledger.stage
    monkeypatch.setattr(
        ledger, "stage", lambda run_id, step, name: asked.append((step, name)) or ask(run_id, step, name)
    )
    with Commits(ledger, lease) as commits:
        assert commits.stage("run-0001", 3, "rollout") is None and asked == []
        assert commits.stage("run-0001", 2, "rollout") is not None and commits.stage("run-0001", 2, "score") is None
        add(commits, 3)
        found = commits.stage("run-0001", 3, "rollout")
        assert found is not None and found.step == 3
        assert asked == [(2, "rollout"), (2, "score"), (3, "rollout")]
        assert commits.longest_s("rollout") == 7.0 and commits.longest_s("score") is None
        commits.add_step(1)  # an attempt before has committed it
        commits.add_step(2)
    assert ledger.last_step("run-0001") == 2


def _writes(text: str) -> Callable[[Path], StageOutput]:
    def work(out: Path) -> StageOutput:
        (out / "data.txt").write_text(text)
        return StageOutput()

    return work


def _copies(source: str, out: Path) -> StageOutput:
    (out / "data.txt").write_text(Path(source, "data.txt").read_text())
    return StageOutput()
