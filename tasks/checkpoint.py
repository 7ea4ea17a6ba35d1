"""Stage `checkpoint`: a snapshot of the weights and all training state, sealed by a manifest."""

from pathlib import Path

from moonshift.core.config import to_yaml
from moonshift.core.types import StageRef
from moonshift.infra import snapshots
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.ledger import CheckpointRecord, CheckpointState

from .policies import stage_task


@stage_task("checkpoint")
def checkpoint(attempt: Attempt, step: int) -> StageRef:
    """Write, seal, publish, note in the ledger; then retire older checkpoints and the redo logs they needed."""
    place = snapshots.folder_of(attempt.checkpoints, step)

    def work(out: Path) -> StageOutput:
        memory = attempt.roles.model.save(str(out))
        (out / "config.yaml").write_text(to_yaml(attempt.config), encoding="utf-8")
        (out / "sampler.json").write_text(attempt.sampler_state(step), encoding="utf-8")
        manifest = snapshots.seal(out, step=step, identity=attempt.identity)
        return StageOutput(metrics=memory | {"checkpoint/bytes": float(manifest.bytes)})

    ref = attempt.stage(step, "checkpoint", (), work, place)
    if not any(record.step == step for record in attempt.ledger.checkpoints(attempt.run_id)):
        _record(attempt, step, place)
    _retire(attempt)
    return ref


def _record(attempt: Attempt, step: int, place: Path) -> None:
    from moonshift.infra.files import sha256_file

    attempt.ledger.record_checkpoint(
        attempt.lease,
        CheckpointRecord(
            step=step,
            path=place.relative_to(attempt.folder).as_posix(),
            manifest_sha256=sha256_file(place / snapshots.MANIFEST),
            bytes=snapshots.verify(place).bytes,
        ),
    )


def _retire(attempt: Attempt) -> None:
    """Delete what newer checkpoints replace; run at each checkpoint, so that what a crash left undone is done then."""
    snapshots.retire(attempt.checkpoints, attempt.config.checkpoint.keep)
    there = set(snapshots.steps_on_disk(attempt.checkpoints))
    for record in attempt.ledger.checkpoints(attempt.run_id):
        if record.state is CheckpointState.KEPT and record.step not in there:
            attempt.ledger.mark_checkpoint_deleted(attempt.lease, record.step)
    attempt.retire_redo_logs()
