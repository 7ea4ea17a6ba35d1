"""What is legal in a plan but may not be what was meant."""

from collections.abc import Iterator

from .batch_plan import BatchPlan
from .sizes import KEYS, Sizes


def notes(sizes: Sizes, plan: BatchPlan) -> list[str]:
    """One sentence each; none changes a result."""
    return list(_notes(sizes, plan))


def _notes(sizes: Sizes, plan: BatchPlan) -> Iterator[str]:
    if sizes.train_batch % plan.rollout_replicas:
        yield (
            f"{sizes.train_batch} prompts are not the same number for each of {plan.rollout_replicas} replicas: some "
            f"get {plan.prompts_per_replica}, some {sizes.train_batch // plan.rollout_replicas}"
        )
    if plan.log_prob.max_tokens is None and plan.samples_per_rank % sizes.log_prob_micro:
        yield (
            f"the last log-prob pass holds {plan.samples_per_rank % sizes.log_prob_micro} samples instead of "
            f"{sizes.log_prob_micro} ({KEYS['log_prob_micro']}); no result depends on it"
        )
    if plan.on_policy:
        yield (
            "one optimizer step a step: the update is exactly on-policy, no clip acts, and the policy's log-probs are "
            f"not computed twice; for several steps set {KEYS['mini']} below {KEYS['train_batch']}"
        )
    if sizes.num_prompts is not None and sizes.num_prompts % sizes.train_batch:
        yield (
            f"{sizes.num_prompts} prompts are no whole number of steps of {sizes.train_batch}: the last step of an "
            "epoch goes on into the next one, and no prompt is left out"
        )
