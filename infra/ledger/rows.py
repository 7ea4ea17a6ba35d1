"""What a commit becomes: rows of the tables."""

import math
from typing import Any

from .models import CheckpointRow, StageRow
from .records import CheckpointRecord, Lease, StageCommit, finite_json


def checkpoint_row(run_id: str, checkpoint: CheckpointRecord) -> CheckpointRow:
    """The row of a checkpoint."""
    return CheckpointRow(
        run_id=run_id,
        step=checkpoint.step,
        path=checkpoint.path,
        manifest_sha256=checkpoint.manifest_sha256,
        bytes=checkpoint.bytes,
        state=checkpoint.state,
    )


def stage_row(lease: Lease, commit: StageCommit, now: float) -> StageRow:
    """The row of a stage that is committed at `now`, seconds since the epoch."""
    return StageRow(
        run_id=lease.run_id,
        step=commit.step,
        name=commit.name,
        attempt_id=lease.attempt_id,
        input_digest=commit.input_digest,
        path=commit.path,
        digest=commit.digest,
        seconds=commit.seconds,
        metrics=finite_json({key: float(value) for key, value in commit.metrics.items()}),
        committed_at=now,
    )


def sample_values(run_id: str, commit: StageCommit) -> list[dict[str, Any]]:
    """One row a sample; a reward that is NaN is none."""
    return [
        {
            "run_id": run_id,
            "step": commit.step,
            "uid": sample.uid,
            "epoch": sample.epoch,
            "sample_index": sample.sample_index,
            "reward": None if sample.reward is None or math.isnan(sample.reward) else float(sample.reward),
            "response_tokens": sample.response_tokens,
            "finish_reason": sample.finish_reason,
        }
        for sample in commit.samples
    ]


def outbox_values(run_id: str, commit: StageCommit) -> list[dict[str, Any]]:
    """One row a metric; a value that is not finite is kept as text."""
    values = []
    for key, given in commit.metrics.items():
        value = float(given)
        finite = math.isfinite(value)
        values.append(
            {
                "run_id": run_id,
                "key": key,
                "step": commit.step,
                "value": value if finite else None,
                "value_text": None if finite else repr(value),
                "sent": False,
            }
        )
    return values
