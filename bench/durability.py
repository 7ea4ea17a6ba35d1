"""What it costs that nothing is lost: `python bench/durability.py [--pairs 12] [--json]`.

One process, one model, one cluster: blocks of steps are taken in pairs, one as every run takes them, one whose stages
are neither flushed, hashed nor committed. Who comes first is drawn for each pair, so that a noisy machine strikes both
alike. A durable block ends when its last stage is committed, since commits run beside the next stage; before the next
block MLflow has been sent what there was, so that no block pays for the one before.
"""

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moonshift.core.types import StageRef

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
BAR = 0.05
"""Largest share of a step that durability may take."""
BLOCK = 6
"""Steps between two waits for the last commit: a run waits so at each checkpoint."""


def main(
    pairs: Annotated[int, typer.Option(min=4, help=f"Pairs of blocks of {BLOCK} steps that are measured.")] = 12,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Exit 1 where a step of the quickstart is more than 5 % slower for being durable."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOONSHIFT_HOME"] = folder
        from moonshift.infra.home import home
        from moonshift.infra.offline import apply_quiet_environment

        apply_quiet_environment(home())
        found = measured(pairs)
    print(json.dumps(found, indent=1) if as_json else "\n".join(f"{name:<28}{value}" for name, value in found.items()))
    raise typer.Exit(found["slower"] > BAR)


class Silent:
    """A listener that shows nothing."""

    def started(self, run_id: str, first_step: int, steps: int) -> None: ...

    def stage_started(self, step: int, stage: str) -> None: ...

    def stage_ended(self, step: int, stage: str, metrics: dict[str, float]) -> None: ...


def measured(pairs: int) -> dict[str, Any]:
    """Median seconds of a step with and without, the median of the pairs' quotients, and bytes written a step."""
    from moonshift.core.errors import StageError
    from moonshift.infra.attempt import open_attempt

    order = durable_blocks(pairs)
    given = (f"trainer.total_training_steps={BLOCK * len(order)}", "trainer.save_freq=-1", "trainer.test_freq=-1",
             "warm_start.steps=20", "data.val_files=[]", "trainer.val_before_train=false")  # fmt: skip
    seconds: dict[bool, list[float]] = {True: [], False: []}
    written: list[int] = []
    try:
        with open_attempt(str(EXAMPLE), given, resume=False, flow_run_id=None, listener=Silent()) as attempt:
            begin(attempt)
            for number, durable in enumerate(order):
                steps = range(number * BLOCK + 1, (number + 1) * BLOCK + 1)
                while attempt.ledger.count_pending(attempt.run_id):
                    time.sleep(0.05)
                before = time.perf_counter()
                for step in steps:
                    take_step(attempt, step, durable)
                attempt.commits.settle()
                if number >= WARM_UP:
                    seconds[durable].append((time.perf_counter() - before) / BLOCK)
                if durable:
                    written += [bytes_below(attempt.folder / "stages" / f"step-{step:04d}") for step in steps]
            raise StageError(DONE)  # such a run must not count as completed
    except StageError as error:
        if str(error) != DONE:
            raise
    slower = [on / off - 1 for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "pairs": pairs,
        "step_s_durable": round(statistics.median(seconds[True]), 4),
        "step_s_without": round(statistics.median(seconds[False]), 4),
        "slower": round(statistics.median(slower), 4),
        "slower_quartiles": [round(value, 4) for value in statistics.quantiles(slower, n=4)[::2]],
        "bytes_written_a_step": round(statistics.mean(written)),
    }


WARM_UP = 2
"""Blocks that are not measured."""
DONE = "measured"


def durable_blocks(pairs: int) -> list[bool]:
    """For each block whether it is durable: the warm-up, then pairs of both in drawn order."""
    draw = random.Random(0)
    order = [True, False] * (WARM_UP // 2)
    for _ in range(pairs):
        first = draw.random() < 0.5
        order += [first, not first]
    return order


def begin(attempt: Any) -> None:
    """As the flow begins."""
    from moonshift.tasks.warm_start import warm_start

    warm_start(attempt, step=0)
    attempt.restore()


def take_step(attempt: Any, step: int, durable: bool) -> None:
    """The stages of a step as the flow calls them, or their work alone."""
    from moonshift.tasks.advantage import advantage
    from moonshift.tasks.log_probs import log_probs
    from moonshift.tasks.rollout import rollout
    from moonshift.tasks.score import score
    from moonshift.tasks.update import update

    whole = attempt.stage
    if not durable:
        attempt.stage = bare(attempt)
    try:
        rollouts = rollout(attempt, step)
        scores = score(attempt, step, rollouts)
        sampled = log_probs(attempt, step, rollouts)
        advantages = advantage(attempt, step, rollouts, scores, sampled)
        if durable:
            update(attempt, step, advantages)
        else:
            attempt.roles.model.update(attempt.path(advantages), step)
            attempt.version = step
    finally:
        attempt.stage = whole


def bare(attempt: Any) -> Callable[..., StageRef]:
    """A stage that writes its output and nothing more: no flush, no hash, no rename, no row."""

    def stage(step: int, name: str, inputs: tuple[StageRef, ...], work: Callable[[Path], Any]) -> StageRef:
        place = attempt.folder / "stages" / f"step-{step:04d}" / name
        place.mkdir(parents=True)
        work(place)
        return StageRef(
            run_id=attempt.run_id, step=step, stage=name, path=place.relative_to(attempt.folder).as_posix(), digest=""
        )

    return stage


def bytes_below(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    typer.run(main)
