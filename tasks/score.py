"""Stage `score`: the reward of every response, or why it has none."""

from pathlib import Path

from moonshift.core.rewards.summary import check_error_rate, means, sample_names
from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.draws import round_name
from moonshift.infra.sample_rows import sample_rows

from .policies import stage_task
from .rollout import BASELINE, drawn_prompts


@stage_task("score")
def score(attempt: Attempt, step: int, rollouts: StageRef, round_: int = 1) -> StageRef:
    """Grade the rollouts with the user's reward function; each sample becomes a row of the ledger.

    Raises:
        RewardError: more samples than `reward.max_error_rate` allows have an error, naming the first five.
    """

    def work(out: Path) -> StageOutput:
        prompts = drawn_prompts(attempt, step, round_)
        uids = [prompt.uid for prompt in prompts]
        per_prompt = attempt.plan.samples_per_prompt
        scored = attempt.roles.reward.score(prompts, attempt.path(rollouts), len(prompts) * per_prompt, str(out))
        graded = scored.graded
        limit = attempt.config.reward.max_error_rate
        check_error_rate(graded, *sample_names(uids, per_prompt), limit)
        if attempt.config.needs_baseline:
            greedy = f"{attempt.path(rollouts)}/{BASELINE}"
            baseline = attempt.roles.reward.score(prompts, greedy, len(prompts), str(out / BASELINE))
            check_error_rate(baseline.graded, *sample_names(uids, 1), limit)
        # a metric has one value a step
        metrics = means(graded) | {"timing_s/reward_tail": scored.tail_s} if round_ == 1 else {}
        rewards = [each.components["score"] if each.components else None for each in graded]
        return StageOutput(metrics=metrics, samples=sample_rows(Path(attempt.path(rollouts)), rewards))

    return attempt.stage(step, round_name("score", round_), (rollouts,), work)
