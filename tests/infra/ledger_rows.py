"""Rows for a ledger, and processes that write to one and are killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moonshift.infra.ledger import Lease, Ledger, NewRun, SampleRow, StageCommit


def new_run(name: str = "nightly", *, steps: int = 2, run_id: str | None = None) -> NewRun:
    return NewRun(name=name, config_json="{}", config_hash="h", seed=7, steps_planned=steps, run_id=run_id)


def owned(ledger: Ledger, *, steps: int = 2) -> Lease:
    return ledger.acquire(ledger.create_run(new_run(steps=steps)).run_id, lease_s=60)


def stage(
    step: int = 1,
    name: str = "update",
    metrics: dict[str, float] | None = None,
    samples: tuple[SampleRow, ...] = (),
) -> StageCommit:
    return StageCommit(
        step=step,
        name=name,
        input_digest="in",
        path=f"steps/{step}/{name}",
        digest="out",
        seconds=0.5,
        metrics=metrics or {},
        samples=samples,
    )


def sample(uid: str = "train.jsonl:1", index: int = 0, reward: float | None = 1.0) -> SampleRow:
    return SampleRow(epoch=0, uid=uid, sample_index=index, reward=reward, response_tokens=5, finish_reason="stop")


def started(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def killed(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


LOCKER = """
import sys
from sqlalchemy import create_engine
with create_engine(sys.argv[1]).connect() as connection:
    connection.exec_driver_sql(sys.argv[2])
    print("locked", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def locked_by_another(url: str) -> Iterator[None]:
    """Within, another process holds what every write of an attempt needs; readers are free to read stages."""
    lock = "BEGIN EXCLUSIVE" if url.startswith("sqlite") else "LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"
    process = started(LOCKER, url, lock)
    try:
        assert first_line(process) == "locked"
        yield
    finally:
        killed(process)
