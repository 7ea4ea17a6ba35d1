"""From what a person means (prompts, responses, GPUs) to what each process does; pure, before any GPU is taken.

Invariant: every rule is checked here, all failures are reported at once, and no later code computes a batch size.
"""

from dataclasses import dataclass

from .config.schema import Config
from .errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sizes of one step.

    Example: 64 prompts × 16 responses, mini-batch 32 prompts, micro-batch 128 sequences on one process gives
    `samples_per_step=1024, samples_per_mini_batch=512, micro_batches_per_mini_batch=4, optimizer_steps_per_step=2`.
    """

    prompts_per_step: int
    samples_per_prompt: int
    samples_per_step: int
    """sequences: prompts × responses"""
    rollout_replicas: int
    dp_size: int
    """training shard groups"""
    samples_per_mini_batch: int
    """sequences an optimizer step, over all ranks"""
    micro_batch_size: int
    """sequences a forward and backward pass, each rank"""
    micro_batches_per_mini_batch: int
    """gradient accumulation, each rank"""
    optimizer_steps_per_step: int
    log_prob_micro_batch_size: int
    """sequences a forward pass for log-probs, each rank"""
    steps: int
    """steps planned in the whole run"""

    @property
    def on_policy(self) -> bool:
        """One optimizer step a rollout: the policy that is trained is the one that sampled, token by token.

        The old log-probs are then the current ones, and no forward pass of their own is spent on them.
        """
        return self.optimizer_steps_per_step == 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps planned in the whole run."""
        return self.steps * self.optimizer_steps_per_step


def make_plan(config: Config, num_prompts: int) -> BatchPlan:
    """Turn the config and the number of training prompts into a plan.

    Raises:
        PlanError: listing every rule that fails, with the numbers and the keys to change.
    """
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    faults = _faults(config, num_prompts)
    if faults:
        raise PlanError("The batch sizes do not fit:\n" + "\n".join(f"  - {fault}" for fault in faults))
    per_mini_batch = actor.ppo_mini_batch_size * rollout.n
    steps = config.trainer.total_training_steps or num_prompts * config.trainer.total_epochs // data.train_batch_size
    return BatchPlan(
        prompts_per_step=data.train_batch_size,
        samples_per_prompt=rollout.n,
        samples_per_step=data.train_batch_size * rollout.n,
        rollout_replicas=1,
        dp_size=1,
        samples_per_mini_batch=per_mini_batch,
        micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
        micro_batches_per_mini_batch=-(-per_mini_batch // actor.ppo_micro_batch_size_per_gpu),
        optimizer_steps_per_step=data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs,
        log_prob_micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
        steps=steps,
    )


def _faults(config: Config, num_prompts: int) -> list[str]:
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    faults: list[str] = []
    if world > 1 or rollout.tensor_model_parallel_size > 1:
        faults.append(
            f"trainer.nnodes × trainer.n_gpus_per_node = {world} and rollout.tensor_model_parallel_size = "
            f"{rollout.tensor_model_parallel_size}: this version trains and generates in one process; set them to 1."
        )
    if num_prompts < data.train_batch_size:
        faults.append(
            f"data.train_files holds {num_prompts} prompts, fewer than data.train_batch_size = "
            f"{data.train_batch_size}: give more prompts or set data.train_batch_size to {max(num_prompts, 1)} or less."
        )
    if data.train_batch_size % actor.ppo_mini_batch_size:
        legal = [size for size in range(1, data.train_batch_size + 1) if data.train_batch_size % size == 0]
        nearest = sorted(legal, key=lambda size: abs(size - actor.ppo_mini_batch_size))[:2]
        faults.append(
            f"data.train_batch_size = {data.train_batch_size} prompts is not a multiple of actor.ppo_mini_batch_size "
            f"= {actor.ppo_mini_batch_size} prompts; nearest legal values: {', '.join(map(str, nearest))}."
        )
    if actor.ppo_micro_batch_size_per_gpu > actor.ppo_mini_batch_size * rollout.n:
        faults.append(
            f"actor.ppo_micro_batch_size_per_gpu = {actor.ppo_micro_batch_size_per_gpu} sequences is more than a "
            f"mini-batch holds: actor.ppo_mini_batch_size × rollout.n = {actor.ppo_mini_batch_size} × {rollout.n} = "
            f"{actor.ppo_mini_batch_size * rollout.n}."
        )
    if config.algorithm.adv_estimator == "grpo" and rollout.n < 2:
        faults.append(
            f"actor_rollout_ref.rollout.n = {rollout.n}: grpo compares the responses to one prompt and needs at "
            "least 2; set rollout.n to 2 or more."
        )
    return faults
