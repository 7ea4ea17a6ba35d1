"""From what a person means (prompts, responses, GPUs) to what each process does; pure, before any GPU is taken.

Invariant: every rule is checked here, all failures are reported at once, and no later code computes a batch size.
"""

from dataclasses import dataclass

from ..config.schema import Config
from ..errors import PlanError
from .rules import faults
from .sizes import ModelShape, Sizes, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """What one model that is trained does in a step."""

    samples_per_mini_batch: int
    """samples an optimizer step, over all ranks"""
    samples_per_rank_per_mini_batch: int
    micro_batch_size: int
    """samples a forward and backward pass, each rank; meaningless where `max_tokens` counts"""
    micro_batches_per_mini_batch: int
    """gradient accumulation, each rank; with a token budget the most that can be needed"""
    max_tokens: int | None
    """tokens of a pass, each rank, over its sequence-parallel GPUs; None: passes are counted in samples"""
    optimizer_steps_per_step: int
    epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """Forward passes without gradient: log-probs of the policy or the reference."""

    samples_per_rank: int
    micro_batch_size: int
    """samples a pass, each rank; meaningless where `max_tokens` counts"""
    micro_batches: int
    """passes each rank; with a token budget the most that can be needed"""
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sizes of one step.

    Example: 60 prompts × 12 responses on 6 GPUs, replicas of 2 GPUs, mini-batch 60 prompts, micro-batches of 8 give
    3 replicas of 20 prompts and 240 samples, 720 samples in all, 120 a rank, 15 micro-batches and 1 optimizer step.
    """

    world: int
    """GPUs in all, or 1 process on the CPU"""
    prompts_per_step: int
    samples_per_prompt: int
    samples_per_step: int
    """prompts × responses"""
    replica_gpus: int
    rollout_replicas: int
    prompts_per_replica: int
    """the most that one replica gets"""
    samples_per_replica: int
    dp_size: int
    """training shard groups"""
    model_parallel: int
    """GPUs of one shard group"""
    samples_per_rank: int
    """of a step's samples, each DP rank"""
    actor: TrainPlan
    log_prob: ForwardPlan
    reference: ForwardPlan | None
    critic: TrainPlan | None
    steps: int
    """steps planned in the whole run; 0 where neither they nor the number of prompts is known"""
    critic_warmup: int
    """steps in which the critic alone is trained"""

    @property
    def on_policy(self) -> bool:
        """One optimizer step a rollout: the policy that is trained is the one that sampled, token by token.

        The old log-probs are then the current ones, and no forward pass of their own is spent on them.
        """
        return self.actor.optimizer_steps_per_step == 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy planned in the whole run."""
        return max(0, self.steps - self.critic_warmup) * self.actor.optimizer_steps_per_step


def make_plan(config: Config, num_prompts: int | None, shape: ModelShape | None = None) -> BatchPlan:
    """Turn the config, the number of training prompts and the model's architecture into a plan.

    What is None is not known, and the rules that need it are passed over.

    Raises:
        PlanError: listing every rule that fails, with the numbers, the keys and the nearest legal values.
    """
    sizes = sizes_of(config, num_prompts, shape)
    found = faults(sizes)
    if found:
        lines = "\n".join(f"  - {fault}" for fault in found)
        raise PlanError(f"The batch plan breaks {len(found)} rule{'s' if len(found) > 1 else ''}:\n{lines}")
    replicas = sizes.world // sizes.replica_gpus
    prompts_per_replica = -(-sizes.train_batch // replicas)
    return BatchPlan(
        world=sizes.world,
        prompts_per_step=sizes.train_batch,
        samples_per_prompt=sizes.n,
        samples_per_step=sizes.train_batch * sizes.n,
        replica_gpus=sizes.replica_gpus,
        rollout_replicas=replicas,
        prompts_per_replica=prompts_per_replica,
        samples_per_replica=prompts_per_replica * sizes.n,
        dp_size=sizes.dp,
        model_parallel=sizes.model_parallel,
        samples_per_rank=sizes.train_batch * sizes.n // sizes.dp,
        actor=_train(sizes, sizes.mini, sizes.micro, sizes.max_tokens if sizes.dynamic else None, sizes.epochs),
        log_prob=_forward(sizes, sizes.log_prob_micro, sizes.log_prob_tokens if sizes.log_prob_dynamic else None),
        reference=_reference(sizes),
        critic=_critic(sizes),
        steps=_steps(config, num_prompts),
        critic_warmup=config.trainer.critic_warmup if sizes.has_critic else 0,
    )


def _steps(config: Config, num_prompts: int | None) -> int:
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return (num_prompts or 0) * config.trainer.total_epochs // config.data.train_batch_size


def _reference(sizes: Sizes) -> ForwardPlan | None:
    if not sizes.has_reference:
        return None
    return _forward(sizes, sizes.ref_micro, sizes.ref_tokens if sizes.ref_dynamic else None)


def _critic(sizes: Sizes) -> TrainPlan | None:
    if not sizes.has_critic:
        return None
    budget = sizes.critic_tokens if sizes.critic_dynamic else None
    return _train(sizes, sizes.critic_mini, sizes.critic_micro, budget, sizes.critic_epochs)


def _train(sizes: Sizes, mini: int, micro: int, tokens: int | None, epochs: int) -> TrainPlan:
    per_rank = mini * sizes.n // sizes.dp
    return TrainPlan(
        samples_per_mini_batch=mini * sizes.n,
        samples_per_rank_per_mini_batch=per_rank,
        micro_batch_size=micro,
        micro_batches_per_mini_batch=_passes(sizes, per_rank, micro, tokens),
        max_tokens=tokens and tokens * sizes.sequence_parallel,
        optimizer_steps_per_step=sizes.train_batch // mini * epochs,
        epochs=epochs,
    )


def _forward(sizes: Sizes, micro: int, tokens: int | None) -> ForwardPlan:
    per_rank = sizes.train_batch * sizes.n // sizes.dp
    return ForwardPlan(
        samples_per_rank=per_rank,
        micro_batch_size=micro,
        micro_batches=_passes(sizes, per_rank, micro, tokens),
        max_tokens=tokens and tokens * sizes.sequence_parallel,
    )


def _passes(sizes: Sizes, samples: int, micro: int, tokens: int | None) -> int:
    """Passes over `samples`; under a token budget with every sample as long as allowed."""
    if tokens is None:
        return -(-samples // micro)
    return -(-samples // (tokens * sizes.sequence_parallel // sizes.longest))
