"""Stage `checkpoint`: a snapshot of the weights and all training state, sealed by a manifest."""

from pathlib import Path

from moonshift.core.config import identity_hash, to_yaml
from moonshift.core.types import StageRef
from moonshift.infra import snapshots
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.ledger import CheckpointRecord

from .policies import stage_task


@stage_task("checkpoint")
def checkpoint(attempt: Attempt, step: int) -> StageRef:
    """Write, seal, publish, note in the ledger; then retire older checkpoints and the redo logs they needed."""
    place = snapshots.folder_of(attempt.checkpoints, step)

    def work(out: Path) -> StageOutput:
        attempt.roles.model.save(str(out))
        (out / "config.yaml").write_text(to_yaml(attempt.config), encoding="utf-8")
        (out / "sampler.json").write_text(attempt.sampler_state(step), encoding="utf-8")
        manifest = snapshots.seal(out, step=step, identity=identity_hash(attempt.config))
        return StageOutput(metrics={"checkpoint/bytes": float(manifest.bytes)})

    ref = attempt.stage(step, "checkpoint", (), work, place)
    if not any(record.step == step for record in attempt.ledger.checkpoints(attempt.run_id)):
        _retire(attempt, step, place)
    return ref


def _retire(attempt: Attempt, step: int, place: Path) -> None:
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
    for deleted in snapshots.retire(attempt.checkpoints, attempt.config.checkpoint.keep):
        attempt.ledger.mark_checkpoint_deleted(attempt.lease, deleted)
    attempt.retire_redo_logs()
