"""Stage `update`: the optimizer steps of a training step; afterwards the rollout engine serves the new weights."""

import json
import time
from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.recovery import persistent

from .policies import stage_task

MEASURED = ("perf/", "timing_s/", "memory/")
"""Metrics that the clock or the device decides: they are no part of a stage's output, which is the same bit for bit."""


@stage_task("update")
def update(attempt: Attempt, step: int, advantages: StageRef) -> StageRef:
    """Apply the step's redo log to the weights: once, or again where a restored checkpoint lacks it."""
    committed = attempt.commits.stage(attempt.run_id, step, "update")
    if committed is not None and attempt.version < step:
        metrics = persistent(attempt, "update", lambda: attempt.roles.model.update(attempt.path(advantages), step))
        attempt.version = step
        norms = {
            key: [committed.metrics.get(key), value] for key, value in metrics.items() if key.endswith("grad_norm")
        }
        if any(before != now for before, now in norms.values()):
            attempt.ledger.event(
                attempt.run_id, "replay_differs", {"step": step, "grad_norm": norms}, attempt.lease.attempt_id
            )

    def work(out: Path) -> StageOutput:
        started = time.perf_counter()
        metrics = attempt.roles.model.update(attempt.path(advantages), step)
        attempt.version = step
        computed = {key: value for key, value in metrics.items() if not key.startswith(MEASURED)}
        (out / "metrics.json").write_text(json.dumps(computed, sort_keys=True), encoding="utf-8")
        speed = _speed(attempt, step, metrics["perf/total_num_tokens"], time.perf_counter() - started)
        return StageOutput(metrics=metrics | speed | {"training/global_step": float(step)})

    ref = attempt.stage(step, "update", (advantages,), work)
    attempt.commits.add_step(step)
    return ref


def _speed(attempt: Attempt, step: int, num_tokens: float, update_s: float) -> dict[str, float]:
    """Seconds of the step's stages up to the update, and tokens a second and process; verl's names."""
    before = attempt.ledger.stages(attempt.run_id, step)
    seconds = update_s + sum(stage.seconds for stage in before)
    return {"perf/time_per_step": seconds, "perf/throughput": num_tokens / (seconds * attempt.plan.world)}
