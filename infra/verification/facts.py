"""What a check is told of a run, and what it says when something is wrong."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moonshift.core.config import config_from_json
from moonshift.core.config.schema import Config
from moonshift.core.plan import BatchPlan, make_plan

from ..ledger import CheckpointRecord, Ledger, RunRecord, RunState, StageRecord
from ..origin import Origin, find_origin
from ..run_config import changed_configs
from .audit import Audit

RESTORE = "The run's files or rows were changed by hand or by the disk: go back to a copy, or start a new run."


class Kind(StrEnum):
    """What is wrong; only UNSENT can be mended, by `sync`."""

    CONFIG = "config"
    ORIGIN = "origin"
    STEPS = "steps"
    SAMPLES = "samples"
    OPTIMIZER = "optimizer"
    METRICS = "metrics"
    CHECKPOINT = "checkpoint"
    STAGE = "stage"
    UNSENT = "unsent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    where: str
    """the file or row"""
    expected: str
    found: str
    action: str = RESTORE

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: expected {self.expected}, found {self.found}. {self.action}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks read, asked for once."""

    ledger: Ledger
    audit: Audit
    run: RunRecord
    configs: tuple[Config, ...]
    """the first attempt's, then those that later attempts changed the placement to"""
    plan: BatchPlan
    folder: Path
    steps: list[tuple[int, int]]
    stages: dict[tuple[int, str], StageRecord]
    checkpoints: list[CheckpointRecord]
    origin: Origin
    """where the run's own steps begin; of a fork without its event, no more than its row says"""

    @property
    def config(self) -> Config:
        return self.configs[-1]

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def completed(self) -> bool:
        return self.run.state is RunState.COMPLETED

    @property
    def last(self) -> int:
        """The last committed step, whatever is missing before it; without one, the step that the run begins after."""
        return max((step for step, _ in self.steps), default=self.origin.step)

    @property
    def planned(self) -> int:
        """Steps; an open-ended run may have been lengthened."""
        return max(self.run.steps_planned, *(config.trainer.total_training_steps or 0 for config in self.configs))

    def rounds(self, step: int) -> int:
        """Generations of a step: 1 unless groups are filtered."""
        return sum(number == step and name.partition("-")[0] == "rollout" for number, name in self.stages)


def gather(ledger: Ledger, run_id: str, home: Path) -> Facts:
    """Ask the ledger for all but the mass of its rows.

    Raises:
        LedgerError: for an unknown run.
        ConfigError, PlanError: when its config cannot be read by this version.
    """
    run, audit = ledger.run(run_id), Audit(ledger)
    configs = tuple(config_from_json(text) for text in (run.config_json, *changed_configs(ledger, run_id)))
    return Facts(
        ledger=ledger,
        audit=audit,
        run=run,
        configs=configs,
        plan=make_plan(configs[0], None),
        folder=home / "runs" / run_id,
        steps=audit.steps(run_id),
        stages={(record.step, record.name): record for record in ledger.stages(run_id)},
        checkpoints=ledger.checkpoints(run_id),
        origin=find_origin(ledger, run) or Origin(parent_run_id=run.parent_run_id, step=run.base_step),
    )


def row(table: str, facts: Facts, detail: str = "") -> str:
    """Where in the ledger something is."""
    return f"ledger, {table} of run {facts.run.run_id}" + (f", {detail}" if detail else "")
