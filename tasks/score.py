"""Stage `score`: the reward of every response."""

from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.draws import round_name
from moonshift.infra.sample_rows import sample_rows

from .policies import stage_task
from .rollout import BASELINE


@stage_task("score")
def score(attempt: Attempt, step: int, rollouts: StageRef, round_: int = 1) -> StageRef:
    """Grade the rollouts with the user's reward function; each sample becomes a row of the ledger."""

    def work(out: Path) -> StageOutput:
        prompts = [attempt.prepared.train.prompts[row] for _, row in attempt.draws.rows(step, round_)]
        count = len(prompts) * attempt.plan.samples_per_prompt
        graded = attempt.roles.reward.score(prompts, attempt.path(rollouts), count, str(out))
        metrics = {
            f"reward/{name}/mean": sum(values) / len(values) for name, values in graded.items() if name != "score"
        }
        if attempt.config.needs_baseline:
            attempt.roles.reward.score(
                prompts, f"{attempt.path(rollouts)}/{BASELINE}", len(prompts), str(out / BASELINE)
            )
        metrics = metrics if round_ == 1 else {}  # a metric has one value a step
        return StageOutput(metrics=metrics, samples=sample_rows(Path(attempt.path(rollouts)), graded["score"]))

    return attempt.stage(step, round_name("score", round_), (rollouts,), work)
