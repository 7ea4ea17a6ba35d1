"""The values that go into the ledger and come out of it; frozen, and free of any database session."""

import math
from dataclasses import dataclass, field
from typing import Any

from .states import AttemptState, CheckpointState, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to be entered.

    Example: `NewRun(name="nightly", config_json="{}", config_hash="9f…", seed=1, steps_planned=140)` becomes the run
    `nightly-0001`, then `nightly-0002`.
    """

    name: str
    """1 to 100 of A-Z a-z 0-9 . _ - and no dot in front: it names a folder"""
    config_json: str
    """the whole effective config"""
    config_hash: str
    seed: int
    """0 to 2^63 - 1"""
    steps_planned: int
    run_id: str | None = None
    """by default the name and its next number"""
    parent_run_id: str | None = None
    base_step: int = 0
    """the parent's step that a fork goes on from; `steps_planned` counts the parent's steps up to it too"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as the ledger knows it."""

    run_id: str
    name: str
    state: RunState
    config_json: str
    config_hash: str
    seed: int
    steps_planned: int
    t0_ms: int
    """start of the run, milliseconds since the epoch: metric timestamps are computed from it"""
    mlflow_run_id: str | None
    parent_run_id: str | None
    base_step: int
    """0, or the parent's step that this run was forked from: its own steps count from the next one"""
    created_at: float
    """seconds since the epoch"""
    updated_at: float
    """seconds since the epoch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write to a run, until a later token exists."""

    run_id: str
    attempt_id: int
    attempt_number: int
    """1 is the first try"""
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One process's try at a run."""

    attempt_id: int
    run_id: str
    number: int
    state: AttemptState
    host: str
    pid: int
    resume_step: int
    flow_run_id: str | None
    error: str | None
    started_at: float
    """seconds since the epoch"""
    ended_at: float | None
    """seconds since the epoch; of a crashed attempt, when its successor found it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One response: which prompt it answers, what it earned."""

    epoch: int
    uid: str
    sample_index: int
    """0 to n - 1 in its group"""
    reward: float | None
    """None: the reward failed; NaN is kept as None"""
    response_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCommit:
    """What a finished stage hands to the ledger; its output is already on disk under its final name."""

    step: int
    name: str
    input_digest: str
    path: str
    """folder of the output, below the run's folder"""
    digest: str
    """SHA-256 of the output, hex"""
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    """one outbox row each; NaN and infinities are kept"""
    samples: tuple[SampleRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """A committed stage."""

    run_id: str
    step: int
    name: str
    attempt_id: int
    input_digest: str
    path: str
    digest: str
    seconds: float
    metrics: dict[str, float]
    committed_at: float
    """seconds since the epoch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint whose manifest is written."""

    step: int
    path: str
    manifest_sha256: str
    bytes: int
    state: CheckpointState = CheckpointState.KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened to a run."""

    run_id: str
    attempt_id: int | None
    at: float
    """seconds since the epoch"""
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One point to be sent: always finite (`nonfinite/<key>` = 1 stands for a NaN or an infinity)."""

    id: int
    key: str
    step: int
    value: float


def finite_json(value: Any) -> Any:
    """`value` with NaN and infinities as the texts nan, inf and -inf, which every database's JSON takes."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, dict):
        return {str(key): finite_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(part) for part in value]
    return value
