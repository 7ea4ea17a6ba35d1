"""What a step costs when MLflow is away: `python -m bench.tracking_away [--rounds 12] [--json]`, from a checkout.

One process, one model, one cluster, and a real MLflow server behind one that fails on demand, each in a process of its
own. Blocks of steps of the quickstart's small sibling are taken in rounds, one of each kind in drawn order: MLflow
well, well once more, refusing connections, answering 500, hanging for 30 s. Each block has a sender of its own, that
has told a healthy MLflow all there was before MLflow fails and the clock starts; so a block has what an outage costs
most, its beginning. By how much the two healthy blocks of a round differ is what noise alone makes of a comparison.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.durability import EXAMPLE, Silent, begin, take_step

BAR = 0.05
"""Largest share by which a step may take longer while MLflow is away."""
BLOCK = 8
"""Steps of a block, some seconds: the sender asks a server that is away after 1, 2, 4 … seconds."""
WELL, CONTROL = "well", "well again"
OUTAGES = ("refuse", "error", "hang")
KINDS = (WELL, CONTROL, *OUTAGES)
SETTINGS = (
    "warm_start.steps=20",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.val_files=[]",
    "tracking.flush_timeout_s=0.2",
)
DONE = "measured"
ROOT = Path(__file__).parent.parent


def main(
    rounds: Annotated[int, typer.Option(min=4, help=f"Rounds of {len(KINDS)} blocks of {BLOCK} steps.")] = 12,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Exit 1 where a step takes over 5 % longer while MLflow is away, by the median of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOONSHIFT_HOME"] = folder
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        from moonshift.infra.home import home
        from moonshift.infra.offline import apply_quiet_environment

        apply_quiet_environment(home())
        with failing_mlflow(Path(folder)) as mlflow:
            found = summary(measured(rounds, mlflow))
    print(json.dumps(found, indent=1) if as_json else shown(found))
    raise typer.Exit(not all(found["slower"][outage]["passes"] for outage in OUTAGES))


class FailingMlflow:
    """The server that fails on demand, in its process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.uri = self._answer()

    def be(self, word: str) -> None:
        """refuse, error, hang or heal."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        assert self._answer() == word

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def failing_mlflow(folder: Path) -> Iterator[FailingMlflow]:
    """A real MLflow server with the one before it."""
    from moonshift.infra.server_programs import mlflow_program
    from moonshift.infra.services import StandingServer

    os.environ["MLFLOW_ARTIFACTS_DESTINATION"] = str(folder / "artifacts")  # by default the working folder
    with StandingServer(folder, program=mlflow_program(f"sqlite:///{folder / 'mlflow.db'}")) as server:
        upstream = server.wait_ready().removeprefix("http://")
        command = [sys.executable, "-m", "tests.infra.faulty_http", upstream]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield FailingMlflow(process)
        finally:
            process.kill()
            process.wait()


def measured(rounds: int, mlflow: FailingMlflow) -> dict[str, list[float]]:
    """Seconds of a step, by kind of block, one of each round."""
    from moonshift.core.errors import StageError
    from moonshift.infra.attempt import open_attempt

    order = drawn_order(rounds)
    given = (*SETTINGS, f"trainer.total_training_steps={BLOCK * len(order)}", f"tracking.mlflow_uri={mlflow.uri}")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        with open_attempt(str(EXAMPLE), given, resume=False, flow_run_id=None, listener=Silent()) as attempt:
            begin(attempt)
            for number, kind in enumerate(order):
                taken_s = block(attempt, mlflow, kind, range(number * BLOCK + 1, (number + 1) * BLOCK + 1))
                if number >= len(KINDS):
                    seconds[kind].append(taken_s / BLOCK)
            mlflow.be("heal")
            raise StageError(DONE)  # such a run must not count as completed
    except StageError as error:
        if str(error) != DONE:
            raise
    return seconds


def block(attempt: Any, mlflow: FailingMlflow, kind: str, steps: range) -> float:
    """Seconds that the steps took."""
    from moonshift.infra.ledger import RunState

    attempt.tracker.close(RunState.PREEMPTED)
    mlflow.be("heal")
    attempt.tracker = told_tracker(attempt)
    if kind in OUTAGES:
        mlflow.be(kind)
    before = time.perf_counter()
    for step in steps:
        take_step(attempt, step, True)
    attempt.commits.settle()
    return time.perf_counter() - before


def told_tracker(attempt: Any) -> Any:
    """A sender that has told MLflow all there is."""
    from moonshift.infra.home import home
    from moonshift.infra.tracking import Tracker

    tracker = Tracker(attempt.ledger, attempt.lease, attempt.config, home())
    tracker.start()
    tracker.notify()
    while attempt.ledger.count_pending(attempt.run_id) or not tracker.opened:
        time.sleep(0.05)
    return tracker


def drawn_order(rounds: int) -> list[str]:
    """One round that is not measured, then `rounds`, each with one block of each kind."""
    draw = random.Random(0)
    return [kind for _ in range(rounds + 1) for kind in draw.sample(KINDS, len(KINDS))]


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Of each kind, by how much its blocks took longer than the healthy one of their round: median and quartiles."""
    found: dict[str, Any] = {
        "rounds": len(seconds[WELL]),
        "step_s": {kind: round(statistics.median(each), 4) for kind, each in seconds.items()},
        "slower": {},
    }
    for kind in KINDS[1:]:
        slower = [away / well - 1 for away, well in zip(seconds[kind], seconds[WELL], strict=True)]
        low, median, high = (round(value, 4) for value in statistics.quantiles(slower, n=4))
        found["slower"][kind] = {"median": median, "quartiles": [low, high], "passes": median <= BAR}
    low, high = found["slower"][CONTROL]["quartiles"]
    found["noise_exceeds_bar"] = high - low > 2 * BAR or abs(found["slower"][CONTROL]["median"]) > BAR
    return found


def shown(found: dict[str, Any]) -> str:
    lines = [f"{found['rounds']} rounds, a step takes {found['step_s'][WELL]:.3f} s while MLflow is well"]
    for kind, slower in found["slower"].items():
        low, high = slower["quartiles"]
        verdict = "" if kind == CONTROL else "passes" if slower["passes"] else "FAILS"
        lines.append(f"{kind:<12}{slower['median']:+7.1%}  (quartiles {low:+.1%} and {high:+.1%})  {verdict}")
    if found["noise_exceeds_bar"]:
        lines.append(f"Two healthy blocks differ by more than the bar of {BAR:.0%}: this machine is too noisy for it.")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
