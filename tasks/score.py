"""Stage `score`: the reward of every response."""

from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.sample_rows import sample_rows

from .policies import stage_task


@stage_task("score")
def score(attempt: Attempt, step: int, rollouts: StageRef) -> StageRef:
    """Grade the rollouts with the user's reward function; each sample becomes a row of the ledger."""

    def work(out: Path) -> StageOutput:
        prompts = [attempt.prepared.train.prompts[row] for _, row in attempt.sampler.indices(step)]
        graded = attempt.roles.reward.score(prompts, attempt.path(rollouts), attempt.plan.samples_per_step, str(out))
        metrics = {
            f"reward/{name}/mean": sum(values) / len(values) for name, values in graded.items() if name != "score"
        }
        return StageOutput(metrics=metrics, samples=sample_rows(Path(attempt.path(rollouts)), graded["score"]))

    return attempt.stage(step, "score", (rollouts,), work)
