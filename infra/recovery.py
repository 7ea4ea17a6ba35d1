"""A stage whose worker was lost is repeated by a new one, which is brought to the weights that the stage began with.

Invariant: a new worker loads the newest checkpoint and applies the committed redo logs after it, as an attempt would,
so the stage's result does not depend on how often it was tried.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from moonshift.core.errors import StageError, WorkerLostError

from .ledger import Lease, Ledger

if TYPE_CHECKING:
    from .attempt import Attempt

Result = TypeVar("Result")
DIVISOR = "perf/memory_divisor/"
"""Metrics under this name say how far passes were cut smaller when the memory ran out, by kind of pass."""
MEMORY_BUDGET = "memory_budget"
"""Kind of the event that keeps it for the next attempt."""


def persistent(
    attempt: "Attempt", stage: str, work: Callable[[], Result], undo: Callable[[], None] | None = None
) -> Result:
    """`work()`, repeated by new workers up to `recovery.stage_retries` times when a worker was lost.

    `undo` drops what a failed try has written.

    Raises:
        StageError: when workers are lost again and again, naming the stage and the last reason.
    """
    retries = attempt.config.recovery.stage_retries
    version = attempt.version  # a worker that is lost while it is brought there must not lower the aim of the next
    for failed in range(retries + 1):
        try:
            if failed:
                revive(attempt, stage, version)
            attempt.roles.set_deadline(deadline(attempt, stage))
            return work()
        except WorkerLostError as error:
            if failed == retries:
                raise StageError(
                    f"Stage {stage} lost its worker {failed + 1} times (recovery.stage_retries={retries}); its last "
                    f"checkpoint is whole. The last time: {error}"
                ) from error
            if undo is not None:
                undo()
    raise AssertionError("a loop that returns or raises ended")


def deadline(attempt: "Attempt", stage: str) -> float:
    """Seconds: `recovery.stage_patience` times what the stage has taken at the most in this run, within bounds."""
    recovery = attempt.config.recovery
    longest_s = attempt.commits.longest_s(stage)
    if longest_s is None:
        return recovery.stage_timeout_s
    return min(recovery.stage_timeout_s, max(recovery.stage_patience_s, recovery.stage_patience * longest_s))


def revive(attempt: "Attempt", stage: str, version: int) -> None:
    """End the workers, start new ones, and bring them to the policy version that they had."""
    attempt.roles.stop()
    attempt.start_workers()
    if stage == "warm_start":
        return  # loads its model itself
    attempt.load()
    for step in range(attempt.version + 1, version + 1):
        redo = attempt.ledger.stage(attempt.run_id, step, "advantage")
        if redo is None:
            raise StageError(f"The redo log of step {step} is not in the ledger; start again with --resume.")
        attempt.roles.model.update(str(attempt.folder / redo.path), step)
        attempt.version = step


def learned_divisors(ledger: Ledger, run_id: str) -> dict[str, int]:
    """How far passes were cut smaller by this run when the memory ran out, the latest of each kind."""
    return {event.detail["what"]: int(event.detail["divisor"]) for event in ledger.events(run_id, MEMORY_BUDGET)}


def note_divisors(ledger: Ledger, lease: Lease, metrics: dict[str, float]) -> None:
    """Keep what a stage has learned of the memory, where it is more than was known."""
    found = {key.removeprefix(DIVISOR): int(value) for key, value in metrics.items() if key.startswith(DIVISOR)}
    known = learned_divisors(ledger, lease.run_id) if found else {}
    for what, divisor in found.items():
        if divisor > known.get(what, 1):
            ledger.event(lease.run_id, MEMORY_BUDGET, {"what": what, "divisor": divisor}, lease.attempt_id)
