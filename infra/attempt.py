"""One process's try at a run: its lease, workers, folders and the protocol by which a stage becomes a fact.

Invariant: a stage's output is written to a temporary folder, renamed into place by who has the lease, flushed, and then
committed to the ledger in one transaction. A committed stage is never run again; an uncommitted one left nothing that
counts, and that is deleted. Flush and commit happen while the next stage runs (`commits`), save for a checkpoint: it
counts by its name, so it is flushed before it has it, and committed before the run goes on.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from moonshift.core.config import identity_hash
from moonshift.core.config.schema import Config
from moonshift.core.errors import CheckpointError, ConfigError, LedgerError
from moonshift.core.types import StageRef

from . import preemption, snapshots
from .cluster import cluster
from .commits import Commits
from .data_record import record_data
from .draws import SELECT, Draws, Run
from .ending import ending, tracking
from .files import (
    clear_folder,
    clear_leftovers,
    discard,
    folder_digest,
    publish,
    remove,
    rename,
    storage_errors,
)
from .heartbeat import heartbeat
from .home import home, ledger_url, run_folder
from .kl_weight import kl_weight
from .ledger import Lease, Ledger, RunRecord, SampleRow, StageCommit
from .origin import origin_of, settle
from .orphans import end_orphans, noted_processes
from .ownership import find_or_create, take
from .preemption import noted_signals
from .preflight import Prepared, prepare
from .prompt_sets import sampler
from .recovery import learned_divisors, persistent
from .roles import Roles
from .run_config import note_config
from .tracking import Tracker
from .uncommitted import clear_uncommitted

TIMING_NAMES = {
    "rollout": "gen",
    "score": "reward",
    "select": "filter_groups",
    "log_probs": "old_log_prob",
    "advantage": "adv",
    "update": "update_actor",
    "checkpoint": "save_checkpoint",
    "validate": "testing",
    "warm_start": "warm_start",
}
_Put = Callable[[Path, Path, AbstractContextManager[None]], None]
"""`rename` or `publish`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage's work reports beside the files it wrote."""

    metrics: dict[str, float] = field(default_factory=dict)
    samples: tuple[SampleRow, ...] = ()


class Listener(Protocol):
    """Something that shows a person what happens; it must not raise."""

    def started(self, run_id: str, first_step: int, steps: int) -> None: ...

    def stage_started(self, step: int, stage: str) -> None: ...

    def stage_ended(self, step: int, stage: str, metrics: dict[str, float]) -> None: ...


class Attempt:
    """A live attempt; made by `open_attempt`."""

    def __init__(self, prepared: Prepared, ledger: Ledger, lease: Lease, listener: Listener) -> None:
        self.prepared = prepared
        self.config: Config = prepared.config
        self.plan = prepared.plan
        self.lease, self.listener = lease, listener
        self.commits = Commits(ledger, lease)
        self.identity = identity_hash(self.config)
        self.folder = run_folder(lease.run_id)
        self.checkpoints = self.folder / "checkpoints"
        self.origin = origin_of(ledger, ledger.run(lease.run_id))
        settle(self.origin, self.folder)
        self.initial = self.origin.initial(self.folder) or prepared.model_folder
        self.version = self.origin.step
        run = Run(run_id=lease.run_id, folder=self.folder, origin=self.origin)
        self.draws = Draws(self.commits, run, self.config, sampler(self.config, prepared.train))
        self.roles: Roles
        self.tracker: Tracker

    @property
    def run_id(self) -> str:
        return self.lease.run_id

    @property
    def ledger(self) -> Ledger:
        """The ledger, once all that this attempt has done so far is in it. Raises what a commit has failed with."""
        self.commits.settle()
        return self.commits.ledger

    def stage(
        self,
        step: int,
        name: str,
        inputs: tuple[StageRef, ...],
        work: Callable[[Path], StageOutput],
        place: Path | None = None,
    ) -> StageRef:
        """Run a stage once: return its committed output, or do `work` into a fresh folder, publish and commit it.

        `place`: of a stage that counts by its name, a checkpoint.

        Raises:
            LedgerError: when the stage was committed from other inputs, or the lease is lost.
            MoonshiftError: what the commit of an earlier stage has failed with.
        """
        digest = self._input_digest(step, name, inputs)
        self.commits.check()
        committed = self.commits.stage(self.run_id, step, name)
        if committed is not None:
            if committed.input_digest != digest:
                raise LedgerError(
                    f"Stage {name} of step {step} of run {self.run_id} was committed from other inputs than it has "
                    "now; the run's folder or config was changed by hand. Start a new run."
                )
            return _reference(self.run_id, step, name, committed.path, committed.digest)
        preemption.check()
        with preemption.patient(self.config.recovery.grace_s):
            if place is None:
                return self._run(step, name, digest, work)
            self.commits.settle()
            ref = self._run(step, name, digest, work, place)
            self.commits.settle()
            return ref

    def _run(
        self, step: int, name: str, digest: str, work: Callable[[Path], StageOutput], named: Path | None = None
    ) -> StageRef:
        """Do a stage's work and hand it over to be committed; `digest`: of its inputs."""
        self.listener.stage_started(step, name)
        started = time.perf_counter()
        place = named or self.folder / "stages" / f"step-{step:04d}" / name
        output, content = self._produce(name, place, work, publish if named else rename)
        seconds = time.perf_counter() - started
        base, dash, round_ = name.partition("-")
        commit = StageCommit(
            step=step,
            name=name,
            input_digest=digest,
            path=place.relative_to(self.folder).as_posix(),
            digest=content,
            seconds=seconds,
            metrics=output.metrics | {f"timing_s/{TIMING_NAMES[base]}{dash}{round_}": seconds},
            samples=output.samples,
        )
        self.commits.add_stage(place, commit, self.tracker.notify)
        self.listener.stage_ended(step, name, commit.metrics)
        return _reference(self.run_id, step, name, commit.path, content)

    def _produce(
        self, stage: str, place: Path, work: Callable[[Path], StageOutput], put: _Put
    ) -> tuple[StageOutput, str]:
        temporary = place.with_name(f".{place.name}.{self.lease.attempt_id}.tmp")
        with storage_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(place.parent)
            temporary.mkdir()
            try:
                output = persistent(self, stage, lambda: work(temporary), lambda: clear_folder(temporary))
                content = folder_digest(temporary)
                put(temporary, place, self.commits.owned())
            finally:
                if temporary.exists():
                    remove(temporary)
        return output, content

    def _input_digest(self, step: int, name: str, inputs: tuple[StageRef, ...]) -> str:
        parts = [self.identity, str(step), name, *(ref.digest for ref in inputs)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def path(self, ref: StageRef) -> str:
        """Absolute folder of a stage's output."""
        return str(self.folder / ref.path)

    def start_workers(self) -> None:
        """Start the workers of every role."""
        self.roles = Roles(self.config, self.plan, self._note)

    def _note(self, kind: str, detail: dict[str, Any]) -> None:
        self.commits.ledger.event(self.run_id, kind, detail, self.lease.attempt_id)

    def restore(self) -> None:
        """Load the newest checkpoint that verifies, or the initial policy, and tell where the run begins."""
        persistent(self, "load", self.load)
        self.listener.started(self.run_id, self.version + 1, self.plan.steps)

    def load(self) -> None:
        """Bring the workers to the newest checkpoint that verifies, or to the initial policy."""
        newest = snapshots.newest(self.checkpoints)
        folder = None
        if newest is not None:
            place, manifest = newest
            if manifest.identity != self.identity:
                raise ConfigError(f"{place} was made by another config than this run's; start a new run.")
            folder = str(place)
        elif self.origin.step:
            raise CheckpointError(
                f"Run {self.run_id} has no checkpoint in {self.checkpoints} that verifies, and a fork has no other "
                f"beginning; fork {self.origin.parent_run_id} again, or put a copy back."
            )
        critic = self.prepared.critic_folder
        self.version = self.roles.model.load(
            str(self.initial), folder, str(critic) if critic else None, learned_divisors(self.ledger, self.run_id)
        )

    def steps_left(self) -> range:
        """Steps to walk through: from the restored version on, so that its own stages are completed too.

        Stages that are committed are passed over; a committed update that the weights lack is applied again from its
        redo log.
        """
        return range(max(self.origin.step + 1, self.version), self.plan.steps + 1)

    def is_due(self, frequency: int, step: int) -> bool:
        """Whether something done every `frequency` steps (-1: at the end only) is due after `step`."""
        return step == self.plan.steps or (frequency > 0 and step % frequency == 0)

    def validates(self, step: int) -> bool:
        """Whether held-out prompts are due after `step`."""
        return bool(self.prepared.validation.prompts) and self.is_due(self.config.trainer.test_freq, step)

    @property
    def validates_first(self) -> bool:
        """Whether held-out prompts are due before the run's first step; not where a restored checkpoint is past it."""
        at_origin = self.version == self.origin.step
        return bool(self.prepared.validation.prompts) and self.config.trainer.val_before_train and at_origin

    @property
    def warms_up(self) -> bool:
        """Whether the initial policy is fine-tuned first; a fork's parent has done that."""
        return bool(self.config.warm_start.steps) and not self.origin.step

    def kl_coef(self, step: int) -> float | None:
        """Weight of the KL in the reward of `step`; None where there is none."""
        return kl_weight(self.commits, self.run_id, self.config, self.origin, step)

    def sampler_state(self, step: int) -> str:
        """Position in the data after `step`, as JSON."""
        return json.dumps(self.draws.sampler.state_at(self.draws.position(step)))

    def retire_redo_logs(self) -> None:
        """Delete what only a replay needs, for steps that every kept checkpoint covers."""
        self.commits.settle()  # what is still to be flushed must be there
        kept = snapshots.steps_on_disk(self.checkpoints)
        covered = min(kept, default=0)
        for step in range(self.origin.step + 1, covered + 1):
            # what a step carried over is read by the next one
            for name in ("log_probs", "advantage", *((SELECT,) if step < covered else ())):
                place = self.folder / "stages" / f"step-{step:04d}" / name
                if place.exists():
                    discard(place)


def _reference(run_id: str, step: int, stage: str, path: str, digest: str) -> StageRef:
    return StageRef(run_id=run_id, step=step, stage=stage, path=path, digest=digest)


@contextmanager
def open_attempt(
    config_path: str, overrides: tuple[str, ...], *, resume: bool, flow_run_id: str | None, listener: Listener
) -> Iterator[Attempt]:
    """Take the run's lease, start workers and tracking, and leave a truthful state behind however it ends.

    Raises:
        MoonshiftError: from the preflight, the ledger (lease held, changed config), Ray or a stage.
    """
    prepared = prepare(config_path, overrides)
    with ExitStack() as stack:
        recovery = prepared.config.recovery
        ledger = Ledger.open(ledger_url(), seconds_left=lambda: preemption.seconds_left(recovery.grace_s))
        stack.callback(ledger.close)
        run = find_or_create(ledger, prepared, resume, flow_run_id)
        lease = take(ledger, run.run_id, recovery.lease_s, flow_run_id)
        stack.enter_context(noted_signals())
        stack.enter_context(ending(ledger, lease))
        stack.enter_context(heartbeat(ledger, lease, recovery.lease_s))
        _note_beginning(ledger, lease, run, prepared)
        attempt = Attempt(prepared, ledger, lease, listener)
        attempt.folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(attempt.checkpoints)
        clear_uncommitted(ledger, lease)
        attempt.tracker = Tracker(ledger, lease, prepared.config, home())
        stack.enter_context(tracking(attempt.tracker))
        end_orphans(run.run_id)
        stack.enter_context(noted_processes(run.run_id))
        stack.enter_context(cluster(recovery.start_timeout_s))
        attempt.start_workers()
        stack.callback(lambda: attempt.roles.stop())  # those of the end, not of the start
        stack.enter_context(attempt.commits)
        yield attempt


def _note_beginning(ledger: Ledger, lease: Lease, run: RunRecord, prepared: Prepared) -> None:
    """When the process began, and what it goes on with where that is not what the run was made with."""
    ledger.event(run.run_id, "attempt", {"process_started": psutil.Process().create_time()}, lease.attempt_id)
    note_config(ledger, lease, run, prepared.config)
    record_data(ledger, lease, prepared)
    ledger.set_steps_planned(lease, prepared.plan.steps)
