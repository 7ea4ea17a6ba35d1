"""The states that runs, attempts, steps and checkpoints can be in, spelt as the ledger stores them."""

from enum import StrEnum


class RunState(StrEnum):
    """State of a run: that of its last attempt."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    PREEMPTED = "PREEMPTED"
    PAUSED = "PAUSED"
    CANCELLED = "CANCELLED"


FINISHED_RUN_STATES = (RunState.COMPLETED, RunState.CANCELLED)
"""nothing is left to resume; every other state, FAILED too, can go on"""

ENDING_RUN_STATES = (
    RunState.COMPLETED,
    RunState.FAILED,
    RunState.PREEMPTED,
    RunState.PAUSED,
    RunState.CANCELLED,
)
"""how an attempt can end by its own word"""


class AttemptState(StrEnum):
    """State of one process's try at a run; CRASHED is only ever written by its successor."""

    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    PREEMPTED = "PREEMPTED"
    PAUSED = "PAUSED"
    CANCELLED = "CANCELLED"
    CRASHED = "CRASHED"


class StepState(StrEnum):
    """State of a step: there is a row only once it is committed."""

    COMMITTED = "COMMITTED"


class CheckpointState(StrEnum):
    """Whether a checkpoint's files are there."""

    KEPT = "kept"
    DELETED = "deleted"
