"""Stage `update`: the optimizer steps of a training step; afterwards the rollout engine serves the new weights."""

import json
from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.recovery import persistent

from .policies import stage_task


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
        metrics = attempt.roles.model.update(attempt.path(advantages), step)
        attempt.version = step
        (out / "metrics.json").write_text(json.dumps(metrics, sort_keys=True), encoding="utf-8")
        return StageOutput(metrics=metrics | {"training/global_step": float(step)})

    ref = attempt.stage(step, "update", (advantages,), work)
    attempt.commits.add_step(step)
    return ref
