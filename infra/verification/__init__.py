"""Whether a run is whole: every hash, count and metric that its ledger, its folders and its plan say, compared.

Invariant: nothing is written. A run that goes on can be checked too; what it does meanwhile may show as a finding.
"""

from collections.abc import Iterator
from pathlib import Path

from ..ledger import CheckpointState, Ledger
from .audit import Audit
from .counts import COUNTS
from .facts import Facts, Finding, Kind, gather, row
from .files import FILES
from .lineage import beginning

__all__ = ["Finding", "Kind", "findings", "scope", "verify"]


def verify(ledger: Ledger, run_id: str, home: Path) -> list[Finding]:
    """All that is wrong with a run, the cheapest checks first; empty: it is whole.

    Args:
        home: the folder that has `runs/`.

    Raises:
        LedgerError: for an unknown run.
        ConfigError, PlanError: when the ledger's config of the run cannot be read by this version.
        OSError: when a file is there and cannot be read.
    """
    return list(findings(ledger, run_id, home))


def findings(ledger: Ledger, run_id: str, home: Path) -> Iterator[Finding]:
    """The same one by one, each check made when it is asked for: `next(findings(…), None)` stops at the first."""
    facts = gather(ledger, run_id, home)
    for check in (beginning, *COUNTS, *FILES, unsent):
        yield from check(facts)


def scope(ledger: Ledger, run_id: str) -> str:
    """What there is to check, in numbers. Raises LedgerError for an unknown run.

    Example: "5 steps, 35 stages, 640 samples, 233 metric points, 2 checkpoints"; of a fork " after nightly-0001@20".
    """
    run = ledger.run(run_id)
    audit = Audit(ledger)
    kept = [record for record in ledger.checkpoints(run_id) if record.state is CheckpointState.KEPT]
    samples = sum(count for _, count, _, _ in audit.sample_steps(run_id))
    return (
        f"{ledger.last_step(run_id) - run.base_step} steps, {len(ledger.stages(run_id))} stages, {samples} samples, "
        f"{len(audit.points(run_id))} metric points, {len(kept)} checkpoints"
        + (f" after {run.parent_run_id}@{run.base_step}" if run.base_step else "")
    )


def unsent(facts: Facts) -> Iterator[Finding]:
    """A COMPLETED run has told MLflow everything, where it was to."""
    count = facts.ledger.count_pending(facts.run.run_id)
    if facts.completed and facts.config.tracking.enabled and count:
        yield Finding(
            kind=Kind.UNSENT,
            where=row("metrics_outbox", facts),
            expected="every point sent to MLflow",
            found=f"{count} that are not",
            action=f"Send them with `moonshift sync {facts.run.run_id}`.",
        )
