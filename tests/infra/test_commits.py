"""Stages are committed behind the back of the next one: in order, each after its flush, and no failure is lost."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonshift.core.errors import CommitUnknownError, LeaseLostError, LedgerError, StorageError
from moonshift.infra import snapshots
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.commits import Commits
from moonshift.infra.ending import ending
from moonshift.infra.ledger import Lease, Ledger, NewRun, RunState, StageCommit
from moonshift.infra.preflight import prepare
from moonshift.infra.tracking import Tracker
from moonshift.infra.uncommitted import clear_uncommitted

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
    return _with_lease(ledger, lease, moonshift_home)


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
    with pytest.raises(KeyError), ending(ledger, lease), Commits(ledger, lease) as commits:
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
    with pytest.raises(type(error)), ending(ledger, lease), Commits(ledger, lease) as commits:
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
        out.mkdir(parents=True, exist_ok=True)
        (out / "data.txt").write_text(text)
        return StageOutput()

    return work


def _copies(source: str, out: Path) -> StageOutput:
    (out / "data.txt").write_text(Path(source, "data.txt").read_text())
    return StageOutput()


@pytest.fixture
def successor(ledger: Ledger, lease: Lease, moonshift_home: Path) -> Iterator[Callable[[], Attempt]]:
    """Take the run over from an owner whose lease has run out, as another process would: by a ledger of its own."""
    with Ledger.open(f"sqlite:///{moonshift_home / 'ledger.db'}") as own:

        def taken() -> Attempt:
            ledger.heartbeat(lease, -1)
            clear_uncommitted(own, new := own.acquire("run-0001", lease_s=600))
            return _with_lease(own, new, moonshift_home)

        yield taken


def _with_lease(ledger: Ledger, lease: Lease, home: Path) -> Attempt:
    attempt = Attempt(prepare("", SETTINGS), ledger, lease, Recorder())
    workers: Any = NoWorkers()
    attempt.roles = workers
    attempt.tracker = Tracker(ledger, lease, attempt.config, home)
    return attempt


def visible(attempt: Attempt) -> dict[str, str]:
    """What the run's folder holds under the names of stages and checkpoints."""
    places = [*attempt.folder.glob("stages/*/[!.]*"), *attempt.checkpoints.glob("[!.]*")]
    return {place.relative_to(attempt.folder).as_posix(): (place / "data.txt").read_text() for place in places}


@pytest.mark.parametrize("named", [None, "checkpoints/step-000001"])
@pytest.mark.parametrize("ahead", [True, False])
def test_an_attempt_that_was_overtaken_during_its_work_puts_nothing_into_the_run(
    attempt: Attempt, successor: Callable[[], Attempt], named: str | None, ahead: bool
) -> None:
    place = attempt.folder / named if named else None
    known: list[dict[str, str]] = []

    def overtaken(out: Path) -> StageOutput:
        other = successor()
        if ahead:  # the successor has been there already
            other.stage(1, "rollout", (), _writes("mine"), place)
        other.commits.settle()
        known.append(visible(other))
        return _writes("late")(out)  # also where the successor has cleared it away

    with pytest.raises(LeaseLostError), attempt.commits:
        attempt.stage(1, "rollout", (), overtaken, place)
    assert visible(attempt) == known[0] and list(known[0].values()) == ["mine"] * ahead
    assert not list(attempt.folder.rglob("*.tmp"))


def test_what_an_attempt_had_in_flight_when_it_was_overtaken_is_gone_and_never_comes_back(
    attempt: Attempt, ledger: Ledger, successor: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(ledger, monkeypatch)
    first = attempt.stage(1, "rollout", (), _writes("late"))
    attempt.stage(1, "score", (first,), _writes("late"))
    attempt.stage(1, "log_probs", (first,), _writes("late"))
    assert gate.reached.wait(30) and len(visible(attempt)) == 3
    other = successor()
    assert visible(other) == {}, "the successor reads what nobody has committed"
    other.stage(1, "rollout", (), _writes("mine"))
    other.commits.settle()
    with pytest.raises(LeaseLostError), attempt.commits:
        gate.opened.set()
        attempt.commits.settle()
    other.stage(1, "score", (), _writes("mine"))  # named, not committed: the overtaken one lets it be
    with pytest.raises(LeaseLostError):
        clear_uncommitted(ledger, attempt.lease)
    assert visible(other) == {f"stages/step-0001/{name}": "mine" for name in ("rollout", "score")}
    assert [(record.name, record.attempt_id) for record in other.ledger.stages("run-0001")] == [
        (name, other.lease.attempt_id) for name in ("rollout", "score")
    ]


def test_an_attempt_whose_files_its_successor_has_cleared_away_says_that_it_was_overtaken(
    attempt: Attempt, successor: Callable[[], Attempt]
) -> None:
    gate = threading.Event()
    attempt.commits.add(lambda: _wait(gate))
    attempt.stage(1, "rollout", (), _writes("late"))
    successor()
    gate.set()
    with pytest.raises(LeaseLostError, match="another attempt took over"):
        attempt.commits.settle()


@pytest.mark.parametrize(
    ("number", "raised", "state"),
    [(errno.ENOSPC, StorageError, RunState.PAUSED), (errno.EIO, OSError, RunState.FAILED)],
)
@pytest.mark.parametrize("file", ["score/data.txt", "score", "step-0002"])
def test_what_could_not_be_flushed_does_not_stay_and_the_run_goes_on_when_mended(  # noqa: PLR0913
    attempt: Attempt, ledger: Ledger, moonshift_home: Path, monkeypatch: pytest.MonkeyPatch,
    number: int, raised: type[OSError], state: RunState, file: str,
) -> None:  # fmt: skip
    flush = os.fsync

    def refused(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(file) and Path(attempt.folder / "stages/step-0002/score").exists():
            time.sleep(0.2)  # while two more stages are done
            raise OSError(number, os.strerror(number), path)
        flush(descriptor)

    checkpoint = snapshots.folder_of(attempt.checkpoints, 1)
    whole = {"stages/step-0001/rollout": "1", "stages/step-0002/rollout": "2", "checkpoints/step-000001": "c"}
    with pytest.raises(raised), ending(ledger, attempt.lease), attempt.commits:
        attempt.stage(1, "rollout", (), _writes("1"))
        attempt.stage(1, "checkpoint", (), _seals("c"), checkpoint)
        attempt.stage(2, "rollout", (), _writes("2"))
        attempt.commits.settle()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refused)
            for name in ("score", "log_probs", "advantage"):
                attempt.stage(2, name, (), _writes(name))
            attempt.stage(2, "checkpoint", (), _seals("never"), snapshots.folder_of(attempt.checkpoints, 2))
    assert visible(attempt) == whole and ledger.run("run-0001").state is state
    assert snapshots.verify(checkpoint).step == 1 and not list(attempt.folder.rglob(".*"))
    again = _with_lease(ledger, ledger.acquire("run-0001", lease_s=600), moonshift_home)
    with again.commits:
        for name in ("rollout", "score", "log_probs"):
            again.stage(2, name, (), _writes(name))
    assert visible(again) == whole | {f"stages/step-0002/{name}": name for name in ("score", "log_probs")}


def test_what_a_killed_attempt_left_without_a_row_is_deleted_and_nothing_else(
    attempt: Attempt, ledger: Ledger, lease: Lease
) -> None:
    with attempt.commits:
        attempt.stage(1, "rollout", (), _writes("1"))
        attempt.stage(1, "checkpoint", (), _seals("c"), snapshots.folder_of(attempt.checkpoints, 1))
    for name in ("stages/step-0001/score", "stages/step-0002/rollout-2", "checkpoints/step-000002"):
        _writes("half")(attempt.folder / name)
    assert sorted(clear_uncommitted(ledger, lease)) == ["stages/step-0001/score", "stages/step-0002/rollout-2"]
    assert set(visible(attempt)) == {"stages/step-0001/rollout", "checkpoints/step-000001", "checkpoints/step-000002"}
    assert clear_uncommitted(ledger, lease) == []


def _seals(text: str) -> Callable[[Path], StageOutput]:
    def work(out: Path) -> StageOutput:
        _writes(text)(out)
        snapshots.seal(out, step=1, identity="i")
        return StageOutput()

    return work
