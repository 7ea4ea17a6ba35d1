"""Questions about whole tables of the ledger, answered by the database: a run may have millions of samples."""

from sqlalchemy import distinct, func, select

from ..ledger import Ledger, LedgerReader
from ..ledger.models import OutboxRow, SampleIndexRow, StepRow

_ROWS_NAMED = 20
"""Broken rows that are named; the others are as those."""


class Audit(LedgerReader):
    """Questions about whole tables that nobody else asks; on the connections of the ledger it is made from."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger._transactions)

    def steps(self, run_id: str) -> list[tuple[int, int]]:
        """(step, policy version) of every committed step."""
        query = select(StepRow.step, StepRow.policy_version).where(StepRow.run_id == run_id).order_by(StepRow.step)
        with self._read() as session:
            return [(step, version) for step, version in session.execute(query)]

    def points(self, run_id: str) -> list[tuple[int, str, float | None, str | None]]:
        """(step, key, value, text of a value that is not finite) of every metric point."""
        columns = (OutboxRow.step, OutboxRow.key, OutboxRow.value, OutboxRow.value_text)
        query = select(*columns).where(OutboxRow.run_id == run_id).order_by(OutboxRow.step, OutboxRow.key)
        with self._read() as session:
            return [(step, key, value, text) for step, key, value, text in session.execute(query)]

    def sample_steps(self, run_id: str) -> list[tuple[int, int, int, int]]:
        """(step, samples, first epoch, last epoch) of every step that has samples."""
        row = SampleIndexRow
        query = (
            select(row.step, func.count(), func.min(row.epoch), func.max(row.epoch))
            .where(row.run_id == run_id)
            .group_by(row.step)
            .order_by(row.step)
        )
        with self._read() as session:
            return [(step, count, first, last) for step, count, first, last in session.execute(query)]

    def broken_groups(self, run_id: str, num_samples: int) -> list[tuple[int, str, int]]:
        """(epoch, uid, samples) of prompts whose samples of one epoch are not each of 0 to `num_samples` - 1 once."""
        row = SampleIndexRow
        index = row.sample_index
        whole = (func.count() == num_samples) & (func.count(distinct(index)) == num_samples)
        query = (
            select(row.epoch, row.uid, func.count())
            .where(row.run_id == run_id)
            .group_by(row.epoch, row.uid)
            .having(~whole | (func.min(index) != 0) | (func.max(index) != num_samples - 1))
            .order_by(row.epoch, row.uid)
            .limit(_ROWS_NAMED)
        )
        with self._read() as session:
            return [(epoch, uid, count) for epoch, uid, count in session.execute(query)]

    def prompts(self, run_id: str) -> dict[int, int]:
        """How many different prompts each epoch has."""
        row = SampleIndexRow
        query = select(row.epoch, func.count(distinct(row.uid))).where(row.run_id == run_id).group_by(row.epoch)
        with self._read() as session:
            return {int(epoch): int(count) for epoch, count in session.execute(query)}

    def prompts_before(self, run_id: str, epoch: int) -> int:
        """How many different prompts the epochs before `epoch` have together."""
        row = SampleIndexRow
        query = select(func.count(distinct(row.uid))).where(row.run_id == run_id, row.epoch < epoch)
        with self._read() as session:
            return session.scalar(query) or 0
