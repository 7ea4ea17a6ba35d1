"""Stage `rollout`: responses to the prompts of a step."""

from dataclasses import replace
from pathlib import Path

from moonshift.core.datasets.seeds import sample_seed
from moonshift.core.types import Prompt, SamplingParams, StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.draws import round_name
from moonshift.infra.workers.orders import RolloutOrder

from .policies import stage_task

BASELINE = "baseline"
"""Folder of the greedy responses below a rollout, and of their scores below a score."""


@stage_task("rollout")
def rollout(attempt: Attempt, step: int, round_: int = 1) -> StageRef:
    """Generate `rollout.n` responses to each prompt of a generation of the step, each from its own seed."""
    first = round_ == 1

    def work(out: Path) -> StageOutput:
        order = training_order(attempt, step, round_)
        stream = attempt.roles.reward.stream(drawn_prompts(attempt, step, round_), order.params.n)
        metrics = attempt.roles.model.rollout(order, str(out), stream)
        if attempt.config.needs_baseline:
            attempt.roles.model.rollout(greedy_order(attempt, step, round_), str(out / BASELINE))
        return StageOutput(metrics=metrics if first else {})  # a metric has one value a step

    return attempt.stage(step, round_name("rollout", round_), (), work)


def drawn_prompts(attempt: Attempt, step: int, round_: int) -> list[Prompt]:
    """The prompts of a generation of the step, in the order of its groups."""
    return [attempt.prepared.train.prompts[row] for _, row in attempt.draws.rows(step, round_)]


def greedy_order(attempt: Attempt, step: int, round_: int) -> RolloutOrder:
    """One greedy response to each prompt: ReMax's baseline."""
    order = training_order(attempt, step, round_)
    count = order.params.n
    return replace(order, seeds=order.seeds[::count], params=replace(order.params, n=1, temperature=0.0))


def training_order(attempt: Attempt, step: int, round_: int = 1) -> RolloutOrder:
    """What to generate: a pure function of the config and of what is committed."""
    settings = attempt.config.actor_rollout_ref.rollout
    chosen = attempt.draws.rows(step, round_)
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
        prompt_ids=list(attempt.prepared.validation.ids),
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
