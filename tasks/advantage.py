"""Stage `advantage`: rewards become per-token advantages; its output is the redo log of the step."""

from pathlib import Path

from moonshift.core.training.advantages import Stages
from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput

from .policies import stage_task


@stage_task("advantage")
def advantage(attempt: Attempt, step: int, rollouts: StageRef, scores: StageRef, log_probs: StageRef) -> StageRef:
    """Write all that the update needs, so that it can be repeated without a new rollout."""
    stages = Stages(rollout=attempt.path(rollouts), score=attempt.path(scores), log_probs=attempt.path(log_probs))

    def work(out: Path) -> StageOutput:
        return StageOutput(metrics=attempt.roles.model.advantage(stages, str(out), attempt.kl_coef(step)))

    return attempt.stage(step, "advantage", (rollouts, scores, log_probs), work)
