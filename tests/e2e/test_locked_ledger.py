"""SIGTERM while another process has locked the ledger: the run is gone in time, and goes on when it is asked to."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from moonshift.infra.ledger import Ledger, RunState

from ..infra.ledger_rows import locked_by_another
from .conftest import command, environment_of, start, train

pytestmark = pytest.mark.slow
RUN = "quickstart-0001"
GRACE_S = 3
AFTER_S = 15
"""Seconds after the grace period: three for the ledger and for MLflow each, the rest for Ray and the interpreter."""
MEASURED_BY_THE_CLOCK = ("timing_s/", "rollout/", "perf/", "memory/")


def metrics(ledger: Ledger) -> list[tuple[int, str, list[tuple[str, str]]]]:
    """Of every stage, without what a clock measured; as text, since NaN is unequal to itself."""
    return sorted(
        (
            record.step,
            record.name,
            sorted(
                (key, repr(value)) for key, value in record.metrics.items() if not key.startswith(MEASURED_BY_THE_CLOCK)
            ),
        )
        for record in ledger.stages(RUN)
        if record.name != "checkpoint"  # its size is that of its config too, which says another grace period
    )


def said(home: Path, server: dict[str, str], *arguments: str) -> str:
    """What a command printed that went well."""
    done = subprocess.run(
        command(*arguments), env=environment_of(home, server), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_locked_ledger_does_not_outlast_the_grace_period(
    unbroken: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path, ledger_url: str
) -> None:
    home, server = tmp_path / "home", server_home | {"MOONSHIFT_LEDGER_URL": ledger_url}
    grace = f"recovery.grace_s={GRACE_S}"
    with Ledger.open(ledger_url) as ledger:
        process = start(home, server, grace)
        deadline = time.monotonic() + 240
        while not (ledger.runs() and ledger.stage(RUN, 3, "rollout")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        with locked_by_another(ledger_url):
            time.sleep(1)  # into the wait for the lock, whatever waits first
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, shown = process.communicate(timeout=300)
            took = time.monotonic() - began
            assert process.returncode == 143, shown
            assert took < GRACE_S + AFTER_S, f"{took:.1f} s\n{shown}"
            assert "the ledger could not be told" in shown and "Traceback" not in shown, shown
        assert ledger.run(RUN).state is RunState.RUNNING
        done, summary = train(home, server, "--resume", grace)
        assert done.returncode == 0, done.stderr
        assert summary["attempts"] == 2 and summary["weights_sha256"] == unbroken[1]["weights_sha256"]
        assert [attempt.state for attempt in ledger.attempts(RUN)] == ["CRASHED", "COMPLETED"]
        with Ledger.open(f"sqlite:///{unbroken[0] / 'ledger.db'}") as other:
            assert metrics(ledger) == metrics(other)
        assert "is whole" in said(home, server, "verify", RUN)
        assert f"forked from {RUN}@4" in said(home, server, "fork", RUN, "--at-step", "4", "--no-start")
        assert "after quickstart-0001@4" in said(home, server, "verify", "quickstart-0002")
