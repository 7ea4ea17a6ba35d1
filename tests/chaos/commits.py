"""SIGKILL in the middle of the ledger's commits: `python -m tests.chaos.commits --count 200 --seed 1`, from the root.

A writer commits one stage after the other, each with metrics and samples, and is killed: at a random moment, while
COMMIT is on its way, before one of a transaction's statements, or after the COMMIT and before it could say so. After
each kill the database is checked: sound, every stage that was said to be committed there, each with all it brought,
none half. Then the next writer takes the run over and goes on.
"""

import hashlib
import os
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from sqlalchemy import Connection, NullPool, create_engine, event, func, select, text

from moonshift.infra.ledger import AttemptState, Lease, Ledger, NewRun, RunState, SampleRow, StageCommit
from moonshift.infra.ledger.models import AttemptRow, OutboxRow, SampleIndexRow, StageRow, StepRow

from ..postgres import programs, running_server

RUN = "commits-0001"
STAGES = ("score", "update")
METRICS, PROMPTS, RESPONSES = 6, 8, 4
MOMENTS = ("time", "commit", "statement", "kept")
"""When a writer is killed: by the clock; just after its COMMIT began; before a statement; after a COMMIT."""
TIME_S, COMMIT_S = 0.12, 0.004
"""Longest waits before a kill by the clock, and after a COMMIT was announced."""
READY, BEGUN, DONE = b"R", b"C", b"D"
WAIT_S = 60


def stage_of(number: int) -> StageCommit:
    """The stage that is committed as the `number`-th, from 0: all that it brings follows from its number."""
    step, place = divmod(number, len(STAGES))
    name = STAGES[place]
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return StageCommit(
        step=step + 1,
        name=name,
        input_digest=digest,
        path=f"stages/{step + 1}/{name}",
        digest=digest,
        seconds=number / 3,
        metrics={f"{name}/metric-{index}": (number * METRICS + index) / 7 for index in range(METRICS)},
        samples=tuple(
            SampleRow(
                epoch=step,
                uid=f"prompt-{prompt}",
                sample_index=index,
                reward=(number + index) / 3,
                response_tokens=prompt + index,
                finish_reason="stop",
            )
            for prompt in range(PROMPTS if name == "score" else 0)
            for index in range(RESPONSES)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a writer is killed; drawn from the seed."""

    moment: str
    at: int
    """its so many-th commit, or statement"""
    wait_s: float

    @classmethod
    def drawn(cls, random: Random) -> "Kill":
        moment = random.choice(MOMENTS)
        longest = TIME_S if moment == "time" else COMMIT_S
        return cls(
            moment=moment, at=random.randint(1, 30 if moment == "statement" else 6), wait_s=random.uniform(0, longest)
        )


def write(url: str, kill: Kill | None, pipe: int) -> None:
    """Take the run over and commit stages until killed; without a `kill` commit one more and give the run back."""
    with Ledger.open(url) as ledger:
        lease = ledger.acquire(RUN, lease_s=3600)
        number = len(ledger.stages(RUN))
        if number and number % len(STAGES) == 0 and ledger.last_step(RUN) < number // len(STAGES):
            ledger.commit_step(lease, number // len(STAGES), number // len(STAGES))
        if kill is not None:
            _listen(ledger, kill, pipe)
        os.write(pipe, READY)
        commits = 0
        while kill is not None or commits == 0:
            _commit(ledger, lease, number + commits)
            commits += 1
            if kill is not None and kill.moment == "kept" and commits == kill.at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(pipe, DONE)
            finish_step(ledger, lease, number + commits)
        ledger.release(lease, RunState.PAUSED)


def _commit(ledger: Ledger, lease: Lease, number: int) -> None:
    ledger.commit_stage(lease, stage_of(number))


def finish_step(ledger: Ledger, lease: Lease, count: int) -> None:
    """Commit the step whose last stage was the `count`-th of all."""
    step, rest = divmod(count, len(STAGES))
    if not rest:
        ledger.commit_step(lease, step, step)


def _listen(ledger: Ledger, kill: Kill, pipe: int) -> None:
    """Announce every COMMIT on its way; strike before the statement that is meant."""
    engine = ledger._transactions.engine
    statements = iter(range(1, sys.maxsize))

    @event.listens_for(engine, "commit")
    def begun(_connection: Connection) -> None:
        os.write(pipe, BEGUN)

    if kill.moment == "statement":

        @event.listens_for(engine, "before_cursor_execute")
        def strike(*_: object) -> None:
            if next(statements) == kill.at:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class Campaign:
    """One ledger and what has become of it so far."""

    url: str
    known: int = 0
    """stages that are there for sure"""
    where: Counter[str] = field(default_factory=Counter)
    """how often a kill met what"""

    def strike(self, kill: Kill) -> list[str]:
        """Let a writer write and kill it; what is wrong afterwards."""
        reading, writing = os.pipe()
        writer = os.fork()  # this process has neither threads nor open connections
        if writer == 0:
            os.close(reading)
            _as_writer(self.url, kill, writing)
        os.close(writing)
        said = os.read(reading, 1)
        if kill.moment == "time":
            time.sleep(kill.wait_s)
        while kill.moment == "commit" and said.count(BEGUN) < kill.at and (more := os.read(reading, 1)):
            said += more
        if kill.moment == "commit":
            _spin(kill.wait_s)
        if kill.moment in ("time", "commit"):
            os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        while more := os.read(reading, 4096):
            said += more
        os.close(reading)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return [f"the writer ended by itself: {os.waitstatus_to_exitcode(status)}"]
        return self._judge(kill, said)

    def finish(self, kills: int) -> list[str]:
        """Let a last writer go on undisturbed."""
        reading, writing = os.pipe()
        writer = os.fork()
        if writer == 0:
            _as_writer(self.url, None, writing)
        os.close(writing)
        os.close(reading)
        _, status = os.waitpid(writer, 0)
        faults = self.check(self.known + 1, self.known + 1)
        with Ledger.open(self.url) as ledger:
            states = Counter(attempt.state for attempt in ledger.attempts(RUN))
        if states != {AttemptState.CRASHED: kills, AttemptState.PAUSED: 1}:
            faults.append(f"the attempts ended as {dict(states)}")
        return faults + ([f"the last writer ended with {status}"] if status else [])

    def _judge(self, kill: Kill, said: bytes) -> list[str]:
        acknowledged = self.known + said.count(DONE)
        # a commit that nobody has heard of may have been kept, at most one
        faults = self.check(acknowledged, acknowledged + 1)
        met = "after a COMMIT" if kill.moment == "kept" else "in a transaction or between two"
        if kill.moment != "kept" and said[-1:] == BEGUN:
            met = "in a COMMIT, kept" if self.known > acknowledged else "in a COMMIT, of a step or not kept"
        self.where[met] += 1
        return faults

    def check(self, least: int, most: int) -> list[str]:
        """What is wrong with the database, which must hold `least` to `most` whole stages."""
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.connect() as connection:
            faults = _unsound(connection)
            found = connection.scalar(select(func.count()).select_from(StageRow)) or 0
            if not least <= found <= most:
                faults.append(f"{found} stages, expected {least} to {most}")
            for number in range(self.known, found):
                faults += _half(connection, stage_of(number))
            faults += _totals(connection, found)
        engine.dispose()
        self.known = found
        return faults


def _as_writer(url: str, kill: Kill | None, pipe: int) -> None:
    """The whole life of a forked process: it must never go on as its parent would."""
    code = 1
    try:
        write(url, kill, pipe)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(code)


def _spin(wait_s: float) -> None:
    """Wait more exactly than sleep does."""
    until = time.perf_counter() + wait_s
    while time.perf_counter() < until:
        pass


def _unsound(connection: Connection) -> list[str]:
    """What SQLite itself finds; on PostgreSQL wait until the server has ended what the killed writer left."""
    if connection.dialect.name == "sqlite":
        answers = [row[0] for row in connection.execute(text("PRAGMA integrity_check"))]
        faults = [] if answers == ["ok"] else [f"integrity_check: {answers[:3]}"]
        return faults + [f"foreign key: {row}" for row in connection.execute(text("PRAGMA foreign_key_check"))]
    others = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )
    deadline = time.monotonic() + WAIT_S
    while connection.scalar(others):
        connection.rollback()  # the view stands still within a transaction
        if time.monotonic() > deadline:
            return [f"the connection of a killed writer is still open after {WAIT_S} s"]
        time.sleep(0.01)
    connection.rollback()
    return []


def _half(connection: Connection, expected: StageCommit) -> list[str]:
    """What a stage lacks, has too much or otherwise."""
    where = f"stage {expected.name} of step {expected.step}"
    row = connection.execute(
        select(StageRow.digest, StageRow.seconds).where(StageRow.step == expected.step, StageRow.name == expected.name)
    ).one_or_none()
    if row is None or tuple(row) != (expected.digest, expected.seconds):
        return [f"{where}: {row}"]
    points = select(OutboxRow.key, OutboxRow.value).where(
        OutboxRow.step == expected.step, OutboxRow.key.startswith(f"{expected.name}/")
    )
    found = sorted(tuple(point) for point in connection.execute(points))
    faults = [] if found == sorted(expected.metrics.items()) else [f"{where}: {len(found)} metrics"]
    if expected.samples:
        one = SampleIndexRow
        columns = (one.epoch, one.uid, one.sample_index, one.reward, one.response_tokens, one.finish_reason)
        rows = {tuple(row) for row in connection.execute(select(*columns).where(one.step == expected.step))}
        wanted = {
            (row.epoch, row.uid, row.sample_index, row.reward, row.response_tokens, row.finish_reason)
            for row in expected.samples
        }
        faults += [] if rows == wanted else [f"{where}: {len(rows)} samples, {len(rows & wanted)} as expected"]
    return faults


def _totals(connection: Connection, stages: int) -> list[str]:
    """Rows that belong to no stage, or a step without its stages."""
    scores = -(-stages // len(STAGES))
    whole = stages // len(STAGES)
    expected = {
        OutboxRow: (stages * METRICS,),
        SampleIndexRow: (scores * PROMPTS * RESPONSES,),
        StepRow: (whole - 1, whole),  # killed between the commit of its last stage and its own
    }
    faults = []
    for table, counts in expected.items():
        found = connection.scalar(select(func.count()).select_from(table)) or 0
        if found not in counts:
            faults.append(f"{found} rows in {table.__tablename__} of {stages} stages, expected {counts[-1]}")
    running = select(func.count()).select_from(AttemptRow).where(AttemptRow.state == AttemptState.RUNNING)
    if (connection.scalar(running) or 0) > 1:
        faults.append("more than one attempt is RUNNING")
    return faults


def run(url: str, count: int, seed: int) -> bool:
    """Kill `count` writers of one ledger and print what came of it; whether all was well."""
    with Ledger.open(url) as ledger:
        ledger.create_run(
            NewRun(name="commits", run_id=RUN, config_json="{}", config_hash="", seed=seed, steps_planned=10**6)
        )
    campaign, clean = Campaign(url), 0
    began = time.monotonic()
    for index in range(count):
        kill = Kill.drawn(Random(f"{seed}/{index}"))
        faults = campaign.strike(kill)
        clean += not faults
        for fault in faults:
            typer.echo(f"kill {index + 1} ({kill}): {fault}")
    faults = campaign.finish(count)
    for fault in faults:
        typer.echo(f"at the end: {fault}")
    met = ", ".join(f"{number} {where}" for where, number in sorted(campaign.where.items()))
    typer.echo(f"{campaign.known} stages committed; killed {met}")
    typer.echo(f"{clean} of {count} clean in {time.monotonic() - began:.0f} s ({url.partition(':')[0]}, seed {seed})")
    return clean == count and not faults


def main(
    count: Annotated[int, typer.Option(min=1, help="Writers to kill.")] = 200,
    seed: Annotated[int, typer.Option(help="Draws every moment; one seed, one campaign.")] = 1,
    postgres: Annotated[bool, typer.Option("--postgres", help="On a server that is started for it.")] = False,
    work: Annotated[Path, typer.Option(help="Folder of the SQLite ledger; emptied first.")] = Path(
        ".moonshift/chaos/commits"
    ),
) -> None:
    """Kill writers in the middle of their commits, check the ledger after each: exit 1 unless all was well."""
    if not postgres:
        shutil.rmtree(work, ignore_errors=True)
        raise typer.Exit(not run(f"sqlite:///{work.absolute() / 'ledger.db'}", count, seed))
    binaries = programs()
    if binaries is None:
        raise typer.BadParameter("no PostgreSQL server on this machine (initdb, pg_ctl): apt-get install postgresql")
    with running_server(binaries) as server:
        raise typer.Exit(not run(server.url(), count, seed))


if __name__ == "__main__":
    typer.run(main)
