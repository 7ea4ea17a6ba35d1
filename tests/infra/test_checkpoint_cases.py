"""Checkpoints and resuming: what is restored, what is deleted, what a disk too small or a bad flag says."""

import errno
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moonshift.core.errors import StageError
from moonshift.flows.cli import app
from moonshift.infra import snapshots
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.disk_space import checkpoint_bytes, disk_warning
from moonshift.infra.files import clear_leftovers
from moonshift.infra.ledger import Ledger, RunState
from moonshift.infra.ownership import find_or_create
from moonshift.infra.preflight import prepare

from .test_attempt import SETTINGS, attempt, ledger, made, writes
from .test_snapshots import make

__all__ = ["attempt", "ledger"]  # fixtures
STAGES = ("rollout", "score", "advantage", "update")


@pytest.mark.case("K07")
@pytest.mark.usefixtures("moonshift_home")
def test_a_disk_without_room_for_the_checkpoints_is_named_before_the_run() -> None:
    free = shutil.disk_usage("/").free
    enough = prepare("", (*SETTINGS, "checkpoint.keep=1"))
    assert enough.warnings == ()
    one = checkpoint_bytes(enough.config, enough.model_folder, None)
    assert one is not None and one > 0
    keep = free // one + 1_000_000
    [warning] = prepare("", (*SETTINGS, f"checkpoint.keep={keep}")).warnings
    assert re.search(rf"GiB free.*checkpoint.keep={keep}.*Lower checkpoint.keep", warning)


@pytest.mark.case("K07")
def test_one_checkpoint_more_than_is_kept_has_to_fit(tmp_path: Path) -> None:
    config = prepare("", (*SETTINGS, "checkpoint.keep=2")).config
    third = shutil.disk_usage(tmp_path).free // 3
    assert disk_warning(config, third - 2**30, tmp_path) is None
    assert disk_warning(config, third + 2**30, tmp_path) is not None


@pytest.mark.case("K14")
@pytest.mark.parametrize("number", [errno.EBUSY, errno.ENOTEMPTY])
def test_a_checkpoint_that_cannot_be_deleted_is_left_for_the_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    with _folders_in_use(number), caplog.at_level(logging.WARNING):
        assert snapshots.retire(tmp_path, keep=1) == []
        assert os.strerror(number) in caplog.text and "tried again next time" in caplog.text
        # its name is gone first: what is half deleted is no checkpoint
        assert snapshots.steps_on_disk(tmp_path) == [2]
        clear_leftovers(tmp_path)
        assert [path.name for path in tmp_path.glob(".*")] != []
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.case("K14")
def test_a_run_goes_on_when_its_redo_log_cannot_be_deleted(attempt: Attempt) -> None:
    attempt.stage(1, "advantage", (), writes("x"))
    make(attempt.checkpoints, 1)
    with _folders_in_use(errno.EBUSY):
        attempt.retire_redo_logs()
        attempt.stage(1, "update", (), writes("y"))  # clears leftovers beside its place, as far as it can
    attempt.stage(1, "checkpoint", (), writes("z"))
    assert sorted(path.name for path in (attempt.folder / "stages" / "step-0001").iterdir()) == ["checkpoint", "update"]


@contextmanager
def _folders_in_use(number: int) -> Iterator[None]:
    """Every folder's deletion fails as on a network disk where a file is open."""

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        yield


@pytest.mark.case("O02")
def test_a_second_attempt_repeats_only_the_stage_that_failed(
    attempt: Attempt, ledger: Ledger, moonshift_home: Path
) -> None:
    done: Counter[str] = Counter()

    def step_of(attempt: Attempt) -> None:
        before: tuple[Any, ...] = ()
        for name in STAGES:

            def work(out: Path, name: str = name) -> StageOutput:
                done[name] += 1
                (out / "data.txt").write_text(name)
                if name == "update" and done[name] == 1:
                    raise StageError("once")
                return StageOutput(metrics={f"made/{name}": 1.0})

            before = (attempt.stage(1, name, before, work),)

    with pytest.raises(StageError, match="once"), attempt.commits:
        step_of(attempt)
    ledger.release(attempt.lease, RunState.FAILED)
    again = made(ledger, moonshift_home, attempt.run_id)
    with again.commits:
        step_of(again)
    assert done == {"rollout": 1, "score": 1, "advantage": 1, "update": 2}
    by = {record.name: record.attempt_id for record in ledger.stages(attempt.run_id)}
    first, second = ledger.attempts(attempt.run_id)
    assert by == dict.fromkeys(STAGES[:3], first.attempt_id) | {"update": second.attempt_id}


@pytest.mark.case("K19")
@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_flag_of_resuming_that_is_not_known_is_an_error(command: str, moonshift_home: Path) -> None:
    for flag in ("--skip-scheduler", "--no-optimizer"):
        result = CliRunner().invoke(app, [command, "run-0001", flag])
        assert result.exit_code == 2 and flag in result.output
    for key in ("checkpoint.skip_scheduler=true", "recovery.skip_optimizer=true"):
        result = CliRunner().invoke(app, ["config", key])
        assert result.exit_code == 2 and key.partition("=")[0] in result.output
    assert not (moonshift_home / "ledger.db").exists()


@pytest.mark.case("K19")
def test_the_only_flag_of_resuming_chooses_the_unfinished_run_and_nothing_else(
    attempt: Attempt, ledger: Ledger
) -> None:
    ledger.release(attempt.lease, RunState.FAILED)
    prepared = prepare("", (*SETTINGS, "run.name=run"))
    assert find_or_create(ledger, prepared, True, None).run_id == attempt.run_id
    assert find_or_create(ledger, prepared, False, None).run_id == "run-0002"
    options = {
        name: {option for parameter in found.params for option in parameter.opts if option.startswith("--")}
        for name, found in typer.main.get_group(app).commands.items()
    }
    assert options["train"] == {"--resume", "--plain", "--summary", "--debug"}
    assert options["resume"] == {"--plain", "--debug"}
