"""The ledger of runs: what has happened, in SQL, so that any run can go on."""

from .reader import FLOW_SETTLED, LedgerReader
from .records import (
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    Lease,
    MetricPoint,
    NewRun,
    RunRecord,
    SampleRow,
    StageCommit,
    StageRecord,
)
from .repository import Ledger
from .states import FINISHED_RUN_STATES, AttemptState, CheckpointState, RunState, StepState

__all__ = [
    "FINISHED_RUN_STATES",
    "FLOW_SETTLED",
    "AttemptRecord",
    "AttemptState",
    "CheckpointRecord",
    "CheckpointState",
    "EventRecord",
    "Lease",
    "Ledger",
    "LedgerReader",
    "MetricPoint",
    "NewRun",
    "RunRecord",
    "RunState",
    "SampleRow",
    "StageCommit",
    "StageRecord",
    "StepState",
]
