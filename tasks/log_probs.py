"""Stage `log_probs`: the policy's own log-probs of what was sampled, and the reference's where the loss needs them."""

from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput

from .policies import stage_task


@stage_task("log_probs")
def log_probs(attempt: Attempt, step: int, rollouts: StageRef) -> StageRef:
    """Score every sampled token with the training engine."""

    def work(out: Path) -> StageOutput:
        return StageOutput(metrics=attempt.roles.model.log_probs(attempt.path(rollouts), str(out)))

    return attempt.stage(step, "log_probs", (rollouts,), work)
