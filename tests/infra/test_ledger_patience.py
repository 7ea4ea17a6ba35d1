"""How long a ledger that another process has locked is waited for: a signal is heard, and its deadline kept."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from moonshift.core.errors import LedgerAwayError
from moonshift.infra import preemption
from moonshift.infra.commits import Commits
from moonshift.infra.ending import ending
from moonshift.infra.heartbeat import heartbeat
from moonshift.infra.ledger import Lease, Ledger, RunState
from moonshift.infra.preemption import LAST_WORD_S, Preempted, noted_signals

from .ledger_rows import locked_by_another, new_run, owned, stage

PROMPT_S = 3.0
"""Several slices, on a busy machine."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    preemption.forget()
    yield
    preemption.forget()


@contextmanager
def ended_by(moment: dict[str, float], url: str, **patience: float) -> Iterator[Ledger]:
    """A ledger whose deadline is `moment["is"]`, once that is set."""

    def seconds_left() -> float:
        return moment.get("is", float("inf")) - time.monotonic()

    with Ledger.open(url, seconds_left=seconds_left, **patience) as ledger:
        yield ledger


WAITS = {
    "for the lock": {"busy_timeout_s": 60.0, "retry_s": 0.0},
    "to try again": {"busy_timeout_s": 0.1, "retry_s": 60.0},
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_deadline_that_comes_while_they_wait_ends_all_transactions(ledger_url: str, wait: str) -> None:
    moment: dict[str, float] = {}
    with ended_by(moment, ledger_url, **WAITS[wait]) as ledger, ThreadPoolExecutor(3) as pool:
        lease = owned(ledger)

        def hold() -> None:
            with ledger.owned(lease):
                pass

        works: list[Callable[[], object]] = [
            lambda: ledger.commit_stage(lease, stage()),
            lambda: ledger.release(lease, RunState.PREEMPTED),
            hold,
        ]
        with locked_by_another(ledger_url):
            waiting = [pool.submit(work) for work in works]
            time.sleep(2)
            assert not any(future.done() for future in waiting)
            moment["is"] = time.monotonic() + 1
            for future in waiting:
                with pytest.raises(LedgerAwayError, match="locked by another process"):
                    future.result(1 + PROMPT_S)
            assert time.monotonic() > moment["is"] - 0.1
        ledger.commit_stage(lease, stage())  # a ledger that is not locked is still written to
        ledger.release(lease, RunState.PREEMPTED)


def test_a_signal_is_heard_while_a_lock_is_waited_for(ledger_url: str) -> None:
    with Ledger.open(ledger_url) as ledger, locked_by_another_after(ledger, ledger_url) as lease, noted_signals():
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        with pytest.raises(Preempted):
            ledger.commit_stage(lease, stage())
        assert time.monotonic() - began < 1 + PROMPT_S


@contextmanager
def locked_by_another_after(ledger: Ledger, url: str) -> Iterator[Lease]:
    lease = owned(ledger)
    with locked_by_another(url):
        yield lease


def test_an_attempt_that_cannot_say_how_it_ended_is_gone_in_time_and_its_run_goes_on(
    ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM while a commit, the heartbeat and a name wait for the lock, with a grace period of a second."""
    left = lambda: preemption.seconds_left(1)  # noqa: E731
    with Ledger.open(ledger_url, seconds_left=left) as ledger:
        run = ledger.create_run(new_run())
        lease = ledger.acquire(run.run_id, lease_s=5)
        with locked_by_another(ledger_url):
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            began = time.monotonic()
            with (
                pytest.raises(Preempted),
                noted_signals(),
                ending(ledger, lease),
                heartbeat(ledger, lease, 0.3),
                Commits(ledger, lease) as commits,
            ):
                commits.add(lambda: ledger.commit_stage(lease, stage()))
                with commits.owned():
                    raise AssertionError("the ledger is locked")
            assert time.monotonic() - began < 1 + 1 + LAST_WORD_S + PROMPT_S
        assert "could not be told" in caplog.text and f"moonshift resume {run.run_id}" in caplog.text
        preemption.forget()
        assert ledger.run(run.run_id).state is RunState.RUNNING and ledger.stages(run.run_id) == []
        time.sleep(max(0.0, began + 5 - time.monotonic()))  # this process lives, so its lease has to run out
        second = ledger.acquire(run.run_id, lease_s=60)
        ledger.commit_stage(second, stage())
        assert [attempt.state for attempt in ledger.attempts(run.run_id)] == ["CRASHED", "RUNNING"]
