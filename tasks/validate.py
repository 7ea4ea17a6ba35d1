"""Stage `validate`: responses to held-out prompts, graded; the weights are not touched."""

from collections.abc import Sequence
from pathlib import Path

from moonshift.core.rewards.graded import Graded
from moonshift.core.rewards.summary import check_error_rate, error_rate, sample_names
from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput

from .policies import stage_task
from .rollout import validation_order


@stage_task("validate")
def validate(attempt: Attempt, step: int) -> StageRef:
    """Mean score over all held-out prompts, and by source under verl's names."""

    def work(out: Path) -> StageOutput:
        order = validation_order(attempt)
        prompts = attempt.prepared.validation.prompts
        stream = attempt.roles.reward.stream(prompts, order.params.n)
        attempt.roles.model.rollout(order, str(out / "rollout"), stream)
        count = len(prompts) * order.params.n
        graded = attempt.roles.reward.score(prompts, str(out / "rollout"), count, str(out / "score")).graded
        names = sample_names([prompt.uid for prompt in prompts], order.params.n)
        check_error_rate(graded, *names, attempt.config.reward.max_error_rate)
        return StageOutput(metrics=_accuracy([prompt.source for prompt in prompts], graded, order.params.n))

    return attempt.stage(step, "validate", (), work)


def _accuracy(sources: list[str], graded: Sequence[Graded], count: int) -> dict[str, float]:
    """`graded` has `count` results a prompt, in prompt order; a mean is over those that have a score."""
    by_source: dict[str, list[float]] = {}
    for index, each in enumerate(graded):
        if each.components is not None:
            by_source.setdefault(sources[index // count], []).append(each.components["score"])
    scores = [value for values in by_source.values() for value in values]
    means = {f"val-core/{source}/reward/mean@{count}": sum(v) / len(v) for source, v in by_source.items()}
    whole = {"val/score/mean": sum(scores) / len(scores)} if scores else {}
    return means | whole | {"val/reward/error_rate": error_rate(graded)}
