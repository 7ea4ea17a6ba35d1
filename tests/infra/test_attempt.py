"""The stage protocol on a real ledger and real folders, without workers: once, in order, whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonshift.core.config import config_hash, to_json
from moonshift.core.errors import LedgerError, StageError, WorkerLostError
from moonshift.core.types import StageRef
from moonshift.infra import snapshots
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.completion import check_complete
from moonshift.infra.files import folder_digest
from moonshift.infra.ledger import Ledger, NewRun, SampleRow
from moonshift.infra.preflight import prepare
from moonshift.infra.recovery import learned_divisors, persistent
from moonshift.infra.tracking import Tracker

SETTINGS = (
    "data.train_files=sums:?max=9",
    "data.train_batch_size=4",
    "actor_rollout_ref.model.path=builtin:char-llama",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "trainer.total_training_steps=4",
    "tracking.enabled=false",
    "recovery.stage_retries=1",
)


class Recorder:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    def started(self, run_id: str, first_step: int, steps: int) -> None: ...

    def stage_started(self, step: int, stage: str) -> None: ...

    def stage_ended(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        self.ended.append((step, stage))


class NoWorkers:
    """What a stage without workers asks of them."""

    def set_deadline(self, seconds: float) -> None:
        self.deadline = seconds

    def stop(self) -> None: ...


@pytest.fixture
def ledger(moonshift_home: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{moonshift_home / 'ledger.db'}") as opened:
        yield opened


@pytest.fixture
def attempt(ledger: Ledger, moonshift_home: Path) -> Attempt:
    prepared = prepare("", SETTINGS)
    run = ledger.create_run(
        NewRun(
            name="run",
            config_json=to_json(prepared.config, masked=True),
            config_hash=config_hash(prepared.config),
            seed=0,
            steps_planned=4,
        )
    )
    return made(ledger, moonshift_home, run.run_id)


class LostOnTheWay(NoWorkers):
    """A model worker that holds a version, and whose process dies the first time it is brought to version 2."""

    def __init__(self) -> None:
        self.model = self
        self.version, self.lives = 0, 1

    def load(self, *_: Any) -> int:
        self.version = 1
        return 1

    def update(self, _redo: str, step: int) -> None:
        if step == 2 and self.lives:
            self.lives -= 1
            raise WorkerLostError("the worker died again")
        assert step == self.version + 1
        self.version = step


def made(ledger: Ledger, home: Path, run_id: str, *more: str) -> Attempt:
    """An attempt as `open_attempt` makes it, without workers."""
    lease = ledger.acquire(run_id, lease_s=600)
    attempt = Attempt(prepare("", (*SETTINGS, *more)), ledger, lease, Recorder())
    workers: Any = NoWorkers()
    attempt.roles = workers
    attempt.tracker = Tracker(ledger, lease, attempt.config, home)
    return attempt


def sample(index: int) -> SampleRow:
    return SampleRow(epoch=0, uid="a", sample_index=index, reward=1.0, response_tokens=3, finish_reason="stop")


def writes(text: str, **given: Any) -> Any:
    def work(out: Path) -> StageOutput:
        (out / "data.txt").write_text(text)
        return StageOutput(**given)

    return work


def test_a_stage_is_done_once_and_its_output_is_what_the_ledger_says(attempt: Attempt, ledger: Ledger) -> None:
    ref = attempt.stage(1, "rollout", (), writes("x", metrics={"a": 1.0}, samples=(sample(0),)))
    assert attempt.stage(1, "rollout", (), _never) == ref
    assert folder_digest(Path(attempt.path(ref))) == ref.digest
    record = ledger.stage(attempt.run_id, 1, "rollout")
    assert record is not None and record.digest == ref.digest and record.metrics["a"] == 1.0
    assert record.metrics["timing_s/gen"] > 0
    assert ledger.samples(attempt.run_id, 1) == [sample(0)]
    assert [point.key for point in ledger.pending_metrics(attempt.run_id)] == ["a", "timing_s/gen"]


def test_work_that_fails_leaves_neither_row_nor_file(attempt: Attempt, ledger: Ledger) -> None:
    def half(out: Path) -> StageOutput:
        (out / "data.txt").write_text("x")
        raise StageError("broken")

    with pytest.raises(StageError, match="broken"):
        attempt.stage(1, "rollout", (), half)
    assert ledger.stages(attempt.run_id) == []
    assert list((attempt.folder / "stages" / "step-0001").iterdir()) == []


def test_nothing_is_committed_before_its_files_have_their_name(
    attempt: Attempt, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        assert ledger.stages(attempt.run_id) == []
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input"):
        patch.setattr("moonshift.infra.attempt.rename", refused)
        attempt.stage(1, "rollout", (), writes("x"))
    assert ledger.stages(attempt.run_id) == []
    attempt.stage(1, "rollout", (), writes("y"))


def test_files_without_a_row_are_made_anew(
    attempt: Attempt, ledger: Ledger, moonshift_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ledger, "commit_stage", _killed)
        attempt.stage(1, "rollout", (), writes("old"))
        attempt.commits.settle()
    ledger.release(attempt.lease, _paused())
    attempt = made(ledger, moonshift_home, attempt.run_id)
    ref = attempt.stage(1, "rollout", (), writes("new"))
    assert Path(attempt.path(ref), "data.txt").read_text() == "new"
    assert folder_digest(Path(attempt.path(ref))) == ref.digest


def test_what_a_killed_attempt_left_half_written_goes(attempt: Attempt) -> None:
    left = attempt.folder / "stages" / "step-0001" / ".rollout.7.tmp"
    left.mkdir(parents=True)
    (left / "data.txt").write_text("half")
    attempt.stage(1, "rollout", (), writes("x"))
    assert [path.name for path in left.parent.iterdir()] == ["rollout"]


def test_a_stage_of_other_inputs_is_refused(attempt: Attempt) -> None:
    first = attempt.stage(1, "rollout", (), writes("x"))
    attempt.stage(1, "score", (first,), writes("s"))
    other = StageRef(run_id=first.run_id, step=1, stage="rollout", path=first.path, digest="0" * 64)
    with pytest.raises(LedgerError, match="other inputs"):
        attempt.stage(1, "score", (other,), _never)


def test_a_zombie_cannot_commit(attempt: Attempt, ledger: Ledger, moonshift_home: Path) -> None:
    ledger.release(attempt.lease, _paused())
    successor = made(ledger, moonshift_home, attempt.run_id)
    with pytest.raises(LedgerError, match="lost its lease"):
        attempt.stage(1, "rollout", (), writes("zombie"))
        attempt.commits.settle()
    assert ledger.stages(attempt.run_id) == []
    ref = successor.stage(1, "rollout", (), writes("mine"))
    assert Path(successor.path(ref), "data.txt").read_text() == "mine"


def test_a_lost_worker_repeats_the_stage_up_to_the_limit(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    revived: list[str] = []
    monkeypatch.setattr("moonshift.infra.recovery.revive", lambda _attempt, stage, _version: revived.append(stage))
    tries = [0]

    def dies(out: Path) -> StageOutput:
        tries[0] += 1
        assert list(out.iterdir()) == [], "what the failed try wrote is still there"
        (out / "data.txt").write_text(str(tries[0]))
        if tries[0] in (1, 3, 4):
            raise WorkerLostError("the worker died")
        return StageOutput()

    ref = attempt.stage(1, "rollout", (), dies)
    assert revived == ["rollout"] and Path(attempt.path(ref), "data.txt").read_text() == "2"
    with pytest.raises(StageError, match=r"Stage score lost its worker 2 times"):
        attempt.stage(1, "score", (ref,), dies)
    assert revived == ["rollout", "score"]


def test_workers_that_are_lost_on_their_way_back_still_reach_the_version_they_had(
    attempt: Attempt, ledger: Ledger, moonshift_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.release(attempt.lease, _paused())
    again = made(ledger, moonshift_home, attempt.run_id, "recovery.stage_retries=2")
    for step in (2, 3):
        again.stage(step, "advantage", (), writes("redo"))
    monkeypatch.setattr(again, "start_workers", lambda: None)
    model = LostOnTheWay()
    workers: Any = model
    again.roles, again.version = workers, 3
    tries: list[int] = []

    def work() -> int:
        tries.append(model.version)
        if len(tries) == 1:
            raise WorkerLostError("the worker died")
        return model.version

    assert persistent(again, "rollout", work) == again.version == 3
    assert tries == [0, 3]


def test_a_learned_memory_budget_is_kept_for_the_next_attempt(attempt: Attempt, ledger: Ledger) -> None:
    attempt.stage(1, "update", (), writes("x", metrics={"perf/memory_divisor/actor": 4.0}))
    attempt.stage(2, "update", (), writes("x", metrics={"perf/memory_divisor/actor": 2.0}))
    assert learned_divisors(attempt.ledger, attempt.run_id) == {"actor": 4}


def test_redo_logs_go_only_when_every_kept_checkpoint_covers_them(attempt: Attempt) -> None:
    for step in (1, 2, 3):
        for name in ("rollout", "log_probs", "advantage"):
            attempt.stage(step, name, (), writes(name))
    for step in (1, 2):
        place = snapshots.folder_of(attempt.checkpoints, step)
        place.mkdir(parents=True)
        (place / "state.json").write_text(json.dumps(step))
        snapshots.seal(place, step=step, identity="i")
    attempt.retire_redo_logs()
    left = sorted(path.relative_to(attempt.folder).as_posix() for path in attempt.folder.glob("stages/*/*"))
    assert left == [
        "stages/step-0001/rollout",
        *(f"stages/step-000{step}/{name}" for step in (2, 3) for name in ("advantage", "log_probs", "rollout")),
    ]


def test_fewer_optimizer_steps_than_planned_are_not_complete(attempt: Attempt) -> None:
    attempt.stage(4, "update", (), writes("x", metrics={"training/optimizer_steps": 7.0}))
    with pytest.raises(StageError, match="7 of 8"):
        check_complete(attempt)


def _never(_out: Path) -> StageOutput:
    raise AssertionError("a committed stage was run again")


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def _paused() -> Any:
    from moonshift.infra.ledger import RunState

    return RunState.PAUSED
