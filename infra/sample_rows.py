"""The ledger's index of samples, read off a rollout batch."""

from collections.abc import Sequence
from pathlib import Path

from moonshift.core.batch import Batch

from .ledger import SampleRow


def sample_rows(rollouts: Path, scores: Sequence[float | None]) -> tuple[SampleRow, ...]:
    """One row a response, in the batch's order; a score of None is a reward that failed."""
    batch = Batch.load(rollouts).select(["uid", "epoch", "sample_index", "finish_reason", "response_ids"])
    return tuple(
        SampleRow(
            uid=uid,
            epoch=int(epoch),
            sample_index=int(index),
            reward=reward,
            response_tokens=int(length),
            finish_reason=reason,
        )
        for uid, epoch, index, reason, length, reward in zip(
            batch.rows("uid"),
            batch.rows("epoch"),
            batch.rows("sample_index"),
            batch.rows("finish_reason"),
            batch.ragged("response_ids").lengths.tolist(),
            scores,
            strict=True,
        )
    )
