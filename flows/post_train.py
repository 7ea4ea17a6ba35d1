"""THE loop: every step rolls out, scores, takes log-probs, computes advantages and updates; read it top to bottom."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from moonshift.infra.attempt import open_attempt
from moonshift.infra.report import finish
from moonshift.tasks.advantage import advantage
from moonshift.tasks.checkpoint import checkpoint
from moonshift.tasks.log_probs import log_probs
from moonshift.tasks.policies import once_a_local_date, skipped_if_owned
from moonshift.tasks.refill import refilled
from moonshift.tasks.restarts import not_for_ever
from moonshift.tasks.rollout import rollout
from moonshift.tasks.score import score
from moonshift.tasks.update import update
from moonshift.tasks.validate import validate
from moonshift.tasks.warm_start import warm_start

from .display import open_display


@flow(name="post-train", flow_run_name="post-train {config}", persist_result=False, validate_parameters=True)
@not_for_ever
@once_a_local_date
@skipped_if_owned
def post_train(
    config: str,
    overrides: list[str] | None = None,
    resume: bool = False,
    display: str = "plain",
    again: bool = False,
) -> dict[str, Any]:
    """Train a model by reinforcement from a config file; returns the run's summary.

    Args:
        config: path of the YAML file.
        overrides: `key=value` pairs put over the file.
        resume: go on with the newest unfinished run of this name.
        display: live | plain | none.
        again: of a deployment with a schedule, run by hand although its local date has had its run.
    """
    with (
        open_display(display) as listener,
        open_attempt(
            config, tuple(overrides or ()), resume=resume, flow_run_id=flow_run.id, listener=listener
        ) as attempt,
    ):
        trainer = attempt.config.trainer
        if attempt.warms_up:
            warm_start(attempt, step=0)
        attempt.restore()
        if attempt.validates_first:
            validate(attempt, step=attempt.origin.step)
        for step in attempt.steps_left():
            rollouts = rollout(attempt, step)
            scores = score(attempt, step, rollouts)
            rollouts, scores = refilled(attempt, step, rollouts, scores)
            sampled_log_probs = log_probs(attempt, step, rollouts)
            advantages = advantage(attempt, step, rollouts, scores, sampled_log_probs)
            update(attempt, step, advantages)
            if attempt.validates(step):
                validate(attempt, step)
            if attempt.is_due(trainer.save_freq, step):
                checkpoint(attempt, step)
        return finish(attempt)
