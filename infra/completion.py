"""Whether a run has done what it planned: one that took fewer optimizer steps never counts as completed."""

from typing import TYPE_CHECKING

from moonshift.core.errors import StageError

from .draws import TRAINED

if TYPE_CHECKING:
    from .attempt import Attempt


def check_complete(attempt: "Attempt") -> int:
    """Optimizer steps taken by the whole run.

    Raises:
        StageError: when they are fewer than planned: such a run must not count as completed.
    """
    last = attempt.ledger.stage(attempt.run_id, attempt.plan.steps, "update")
    taken = int(last.metrics["training/optimizer_steps"]) if last else 0
    planned = attempt.origin.optimizer_steps + _planned(attempt) - _without_groups(attempt)
    if taken < planned:
        raise StageError(
            f"Run {attempt.run_id} took {taken} of {planned} planned optimizer steps: the others "
            "had no token to train on or a gradient that was not finite (actor/empty_batches, actor/skipped_updates)."
        )
    return taken


def _planned(attempt: "Attempt") -> int:
    """Optimizer steps of the policy planned in the run's own steps."""
    plan = attempt.plan
    return max(0, plan.steps - max(plan.critic_warmup, attempt.origin.step)) * plan.actor.optimizer_steps_per_step


def _without_groups(attempt: "Attempt") -> int:
    """Optimizer steps that fell away because dynamic sampling found fewer groups than a step needs."""
    actor = attempt.config.actor_rollout_ref.actor
    whole, mini = attempt.plan.prompts_per_step, actor.ppo_mini_batch_size
    missing = 0
    for step, trained in attempt.ledger.metric_series(attempt.run_id, TRAINED):
        groups = int(trained) or whole  # where none had signal, all are trained on
        cuts = groups // mini if actor.drop_last else -(-groups // mini)
        missing += (whole // mini - cuts) * actor.ppo_epochs if step > attempt.plan.critic_warmup else 0
    return missing
