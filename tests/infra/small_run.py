"""A small run made by hand: rows of a real ledger and small files, as an attempt leaves them, without training."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, CursorResult, Update, create_engine

from moonshift.core.config import config_hash, identity_hash, load_config, to_json
from moonshift.infra import snapshots
from moonshift.infra.files import folder_digest, sha256_file
from moonshift.infra.ledger import CheckpointRecord, Lease, Ledger, NewRun, RunState, SampleRow, StageCommit
from moonshift.infra.verification import Kind, verify

STEPS, PROMPTS, RESPONSES, ROWS = 4, 2, 2, 3
"""4 steps of 2 prompts from 3 rows: epoch 1 begins in the middle of step 2."""
SETTINGS = {
    "data.train_files": "sums:?max=9",
    "data.val_files": "sums:?max=9",
    "data.train_batch_size": PROMPTS,
    "actor_rollout_ref.model.path": "builtin:char-llama",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.rollout.n": RESPONSES,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 2,
    "trainer.test_freq": 2,
    "checkpoint.keep": 1,
}
RUN = "small-0001"


@dataclass(kw_only=True)
class Small:
    """A run made by hand, stage by stage, as an attempt makes it."""

    home: Path
    url: str
    """of its ledger"""
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.ledger = Ledger.open(self.url)
        self.config = load_config(None, (), environ={}, code=self.settings).config
        self.ledger.create_run(
            NewRun(
                name="small",
                config_json=to_json(self.config, masked=True),
                config_hash=config_hash(self.config),
                seed=0,
                steps_planned=STEPS,
            )
        )
        self.lease: Lease = self.ledger.acquire(RUN, lease_s=600)
        self.folder = self.home / "runs" / RUN
        self.drawn = 0
        self.optimizer_steps = 0

    def stage(self, step: int, name: str, inputs: tuple[str, ...] = (), **given: Any) -> str:
        """Write and commit a stage; returns its digest."""
        path = f"checkpoints/step-{step:06d}" if name == "checkpoint" else f"stages/step-{step:04d}/{name}"
        place = self.folder / path
        (place / "part").mkdir(parents=True)
        (place / "part" / "data.bin").write_bytes(f"{step} {name}".encode())
        if name == "checkpoint":
            snapshots.seal(place, step=step, identity=identity_hash(self.config))
        digest = folder_digest(place)
        read = "\n".join([identity_hash(self.config), str(step), name, *inputs])
        commit = StageCommit(
            step=step,
            name=name,
            input_digest=hashlib.sha256(read.encode()).hexdigest(),
            path=path,
            digest=digest,
            seconds=0.1,
            metrics={f"timing_s/{name}": 0.1, **given.get("metrics", {})},
            samples=given.get("samples", ()),
        )
        self.ledger.commit_stage(self.lease, commit)
        return digest

    def draw(self, count: int) -> tuple[SampleRow, ...]:
        """All responses to the next `count` prompts of the stream."""
        rows = []
        for position in range(self.drawn, self.drawn + count):
            epoch, row = divmod(position, ROWS)
            for index in range(RESPONSES):
                uid = f"sums:{row}"
                rows.append(
                    SampleRow(
                        epoch=epoch, uid=uid, sample_index=index, reward=1.0, response_tokens=3, finish_reason="stop"
                    )
                )
        self.drawn += count
        return tuple(rows)

    def step(self, step: int, *, again: bool = False, optimizer_steps: int = 2, skipped: float = 0.0) -> None:
        """One step up to its update; with `again` it selects groups from two generations."""
        rollouts = self.stage(step, "rollout", metrics={"response_length/mean": 3.0})
        scores = self.stage(step, "score", (rollouts,), samples=self.draw(PROMPTS))
        if again:
            second = self.stage(step, "rollout-2")
            graded = self.stage(step, "score-2", (second,), samples=self.draw(1))
            metrics = {"training/data_position": float(self.drawn), "training/filter_groups/trained": 1.0}
            rollouts = scores = self.stage(step, "select", (rollouts, scores, second, graded), metrics=metrics)
        log_probs = self.stage(step, "log_probs", (rollouts,))
        metrics = {"critic/score/mean": 1.0, "critic/odd": float("nan")}
        advantage = self.stage(step, "advantage", (rollouts, scores, log_probs), metrics=metrics)
        self.optimizer_steps += optimizer_steps
        metrics = {
            "training/global_step": float(step),
            "training/optimizer_steps": float(self.optimizer_steps),
            "actor/skipped_updates": skipped,
            "actor/empty_batches": 0.0,
        }
        self.stage(step, "update", (advantage,), metrics=metrics)
        self.ledger.commit_step(self.lease, step, step)

    def checkpoint(self, step: int) -> None:
        """Save, keep the newest, and delete the redo logs that it covers."""
        self.stage(step, "checkpoint")
        place = snapshots.folder_of(self.folder / "checkpoints", step)
        self.ledger.record_checkpoint(
            self.lease,
            CheckpointRecord(
                step=step,
                path=place.relative_to(self.folder).as_posix(),
                manifest_sha256=sha256_file(place / snapshots.MANIFEST),
                bytes=snapshots.verify(place).bytes,
            ),
        )
        for deleted in snapshots.retire(self.folder / "checkpoints", 1):
            self.ledger.mark_checkpoint_deleted(self.lease, deleted)
        for covered in range(1, step + 1):
            for name in ("log_probs", "advantage"):
                shutil.rmtree(self.folder / "stages" / f"step-{covered:04d}" / name, ignore_errors=True)

    def begin(self) -> None:
        """Up to the end of step 3: checkpoint and validation after step 2."""
        self.stage(0, "validate", metrics={"val/score/mean": 0.5})
        self.step(1)
        self.step(2)
        self.stage(2, "validate", metrics={"val/score/mean": 0.6})
        self.checkpoint(2)
        self.step(3)

    def end(self) -> None:
        self.step(4)
        self.stage(4, "validate", metrics={"val/score/mean": 0.7})
        self.checkpoint(4)
        self.ledger.release(self.lease, RunState.COMPLETED)

    def sent(self) -> None:
        self.ledger.mark_sent([point.id for point in self.ledger.pending_metrics(RUN, limit=1000)])

    def sql(self, statement: str) -> None:
        """Change the ledger behind its back."""
        self._change(lambda connection: connection.exec_driver_sql(statement))

    def update(self, statement: Update) -> None:
        """The same for what databases say in different words."""
        self._change(lambda connection: connection.execute(statement))

    def _change(self, work: Callable[[Connection], CursorResult[Any]]) -> None:
        engine = create_engine(self.url)
        with engine.begin() as connection:
            assert work(connection).rowcount > 0
        engine.dispose()

    def found(self) -> list[tuple[Kind, str]]:
        return [(finding.kind, str(finding)) for finding in verify(self.ledger, RUN, self.home)]


Make = Callable[..., Small]
NewLedger = Callable[[Path], str]
"""URL of an empty ledger for a home."""


def in_home(home: Path) -> str:
    """Where a home's ledger is by default."""
    return f"sqlite:///{home / 'ledger.db'}"


@contextmanager
def maker(folder: Path, new_ledger: NewLedger = in_home) -> Iterator[Make]:
    """Makes runs, each in a home of its own below `folder`; `data__val_files=…` changes a key of the config."""
    with ExitStack() as ledgers:

        def made(**changes: Any) -> Small:
            home = folder / f"home-{len(list(folder.iterdir()))}"
            settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
            small = Small(home=home, url=new_ledger(home), settings=settings)
            ledgers.enter_context(small.ledger)
            home.mkdir(exist_ok=True)  # counts, wherever its ledger is
            return small

        yield made
