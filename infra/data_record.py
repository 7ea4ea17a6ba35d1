"""What became of the rows, in the ledger: one event an attempt, and the proof that a resumed run has the same data.

Invariant: an attempt that reads other rows than the run's first is refused before it draws one.
"""

from moonshift.core.errors import DataError

from .ledger import Lease, Ledger
from .preflight import Prepared

EVENT = "data"
COMPARED = ("train", "validation", "examples")


def record_data(ledger: Ledger, lease: Lease, prepared: Prepared) -> None:
    """Write the `data` event: for each set rows, used, dropped with reasons and the first of them, lengths, digest.

    Raises:
        DataError: the rows are others than when the run began.
    """
    found = {item.report.name: item.report for item in (prepared.train, prepared.validation, prepared.examples)}
    ledger.event(
        lease.run_id,
        EVENT,
        {name: report.detail() for name, report in found.items() if report.rows},
        lease.attempt_id,
    )
    first = ledger.events(lease.run_id, EVENT)[0]
    for name in COMPARED:
        before = first.detail.get(name, {})
        now = found[name]
        if before.get("digest", now.digest) != now.digest or before.get("used", now.used) != now.used:
            raise DataError(
                f"The {name} data of run {lease.run_id} changed since it began: {before.get('rows')} rows then, "
                f"{before.get('used')} used, digest {str(before.get('digest'))[:12]}; now {now.rows}, {now.used}, "
                f"{now.digest[:12]}. Put the old files back, or start a new run without --resume."
            )
