"""Stage `rollout`: responses to the prompts of a step."""

from pathlib import Path

from moonshift.core.datasets.seeds import sample_seed
from moonshift.core.types import SamplingParams, StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.workers.model import RolloutOrder

from .policies import stage_task


@stage_task("rollout")
def rollout(attempt: Attempt, step: int) -> StageRef:
    """Generate `rollout.n` responses to each prompt of the step, each from its own seed."""

    def work(out: Path) -> StageOutput:
        return StageOutput(metrics=attempt.roles.model.rollout(training_order(attempt, step), str(out)))

    return attempt.stage(step, "rollout", (), work)


def training_order(attempt: Attempt, step: int) -> RolloutOrder:
    """What to generate in a step: a pure function of the config and the step."""
    settings = attempt.config.actor_rollout_ref.rollout
    chosen = attempt.sampler.indices(step)
    uids = [attempt.prepared.train.prompts[row].uid for _, row in chosen]
    epochs = [epoch for epoch, _ in chosen]
    return RolloutOrder(
        prompt_ids=[attempt.prepared.train.ids[row] for _, row in chosen],
        uids=uids,
        epochs=epochs,
        seeds=_seeds(attempt, uids, epochs, settings.n),
        params=_params(attempt, settings.n, settings.temperature, settings.top_p, settings.top_k),
    )


def validation_order(attempt: Attempt) -> RolloutOrder:
    """What to generate in a validation: every held-out prompt, with the same seeds each time."""
    settings = attempt.config.actor_rollout_ref.rollout.val_kwargs
    uids = [prompt.uid for prompt in attempt.prepared.validation.prompts]
    epochs = [0] * len(uids)
    return RolloutOrder(
        prompt_ids=attempt.prepared.validation.ids,
        uids=uids,
        epochs=epochs,
        seeds=_seeds(attempt, uids, epochs, settings.n),
        params=_params(attempt, settings.n, settings.temperature, settings.top_p, settings.top_k),
    )


def _seeds(attempt: Attempt, uids: list[str], epochs: list[int], count: int) -> list[int]:
    seed = attempt.config.run.seed
    return [
        sample_seed(seed, uid, epoch, index) for uid, epoch in zip(uids, epochs, strict=True) for index in range(count)
    ]


def _params(attempt: Attempt, n: int, temperature: float, top_p: float, top_k: int) -> SamplingParams:
    return SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=attempt.config.data.max_response_length,
        stop_ids=attempt.prepared.stop_ids,
    )
