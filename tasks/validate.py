"""Stage `validate`: responses to held-out prompts, graded; the weights are not touched."""

from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput

from .policies import stage_task
from .rollout import validation_order


@stage_task("validate")
def validate(attempt: Attempt, step: int) -> StageRef:
    """Mean score over all held-out prompts, and by source under verl's names."""

    def work(out: Path) -> StageOutput:
        order = validation_order(attempt)
        attempt.roles.model.rollout(order, str(out / "rollout"))
        prompts = attempt.prepared.validation.prompts
        count = len(prompts) * order.params.n
        scores = attempt.roles.reward.score(prompts, str(out / "rollout"), count, str(out / "score"))["score"]
        return StageOutput(metrics=_accuracy([prompt.source for prompt in prompts], scores, order.params.n))

    return attempt.stage(step, "validate", (), work)


def _accuracy(sources: list[str], scores: list[float], count: int) -> dict[str, float]:
    """`scores` has `count` values a prompt, in prompt order."""
    by_source: dict[str, list[float]] = {}
    for index, value in enumerate(scores):
        by_source.setdefault(sources[index // count], []).append(value)
    means = {f"val-core/{source}/reward/mean@{count}": sum(v) / len(v) for source, v in by_source.items()}
    return means | {"val/score/mean": sum(scores) / len(scores)}
