"""The numbers that a plan is made of, read off the config once, each beside the key it comes from.

Invariant: rules and arithmetic see `Sizes` only, so that "what if this key were 8?" is `dataclasses.replace`.
"""

from dataclasses import dataclass, field, fields
from typing import TypeVar

from ..config.schema import Config

Value = TypeVar("Value")


def _from(key: str) -> int:
    """A field that mirrors one key of the config."""
    return field(metadata={"key": key})


_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model's architecture decides sizes; counts."""

    parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that the batch plan is computed from."""

    nnodes: int = _from("trainer.nnodes")
    gpus_per_node: int = _from("trainer.n_gpus_per_node")
    train_batch: int = _from("data.train_batch_size")
    max_prompt: int = _from("data.max_prompt_length")
    max_response: int = _from("data.max_response_length")
    n: int = _from(f"{_ROLLOUT}.n")
    rollout_tp: int = _from(f"{_ROLLOUT}.tensor_model_parallel_size")
    rollout_dp: int = _from(f"{_ROLLOUT}.data_parallel_size")
    rollout_pp: int = _from(f"{_ROLLOUT}.pipeline_model_parallel_size")
    rollout_ep: int = _from(f"{_ROLLOUT}.expert_parallel_size")
    max_model_len: int = _from(f"{_ROLLOUT}.max_model_len")
    """0: the model's own"""
    log_prob_micro: int = _from(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu")
    log_prob_tokens: int = _from(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu")
    ref_micro: int = _from("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu")
    ref_tokens: int = _from("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")
    mini: int = _from(f"{_ACTOR}.ppo_mini_batch_size")
    micro: int = _from(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    max_tokens: int = _from(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    epochs: int = _from(f"{_ACTOR}.ppo_epochs")
    sp: int = _from(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    tp: int = _from(f"{_ACTOR}.megatron.tensor_model_parallel_size")
    pp: int = _from(f"{_ACTOR}.megatron.pipeline_model_parallel_size")
    cp: int = _from(f"{_ACTOR}.megatron.context_parallel_size")
    critic_mini: int = _from("critic.ppo_mini_batch_size")
    critic_micro: int = _from("critic.ppo_micro_batch_size_per_gpu")
    critic_tokens: int = _from("critic.ppo_max_token_len_per_gpu")
    critic_epochs: int = _from("critic.ppo_epochs")
    megatron: bool
    dynamic: bool
    log_prob_dynamic: bool
    ref_dynamic: bool
    critic_dynamic: bool
    has_critic: bool
    has_reference: bool
    needs_groups: bool
    """the estimator compares the responses to one prompt"""
    num_prompts: int | None
    """rows of the training data; None: not known"""
    shape: ModelShape | None

    @property
    def world(self) -> int:
        """GPUs in all."""
        return self.nnodes * self.gpus_per_node

    @property
    def replica_gpus(self) -> int:
        """GPUs of one inference replica."""
        return self.rollout_tp * self.rollout_dp * self.rollout_pp

    @property
    def model_parallel(self) -> int:
        """GPUs that train one shard group together."""
        return self.tp * self.pp * self.cp if self.megatron else self.sp

    @property
    def sequence_parallel(self) -> int:
        """GPUs that share the tokens of one sequence: they multiply a token budget."""
        return self.cp if self.megatron else self.sp

    @property
    def dp(self) -> int:
        """Training shard groups; rounded down where `model_parallel` does not divide the GPUs."""
        return max(1, self.world // self.model_parallel)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample allowed."""
        return self.max_prompt + self.max_response


KEYS: dict[str, str] = {found.name: found.metadata["key"] for found in fields(Sizes) if "key" in found.metadata}
"""Name of a field to the key it mirrors."""


def sizes_of(config: Config, num_prompts: int | None, shape: ModelShape | None) -> Sizes:
    """Read the sizes off the config; what is left open follows the actor, as in verl."""
    data, parts, trainer = config.data, config.actor_rollout_ref, config.trainer
    actor, rollout, ref, critic = parts.actor, parts.rollout, parts.ref, config.critic
    log_prob_dynamic = _first(rollout.log_prob_use_dynamic_bsz, actor.use_dynamic_bsz)
    log_prob_tokens = _first(rollout.log_prob_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu)
    return Sizes(
        nnodes=trainer.nnodes,
        gpus_per_node=trainer.n_gpus_per_node,
        train_batch=data.train_batch_size,
        max_prompt=data.max_prompt_length,
        max_response=data.max_response_length,
        n=rollout.n,
        rollout_tp=rollout.tensor_model_parallel_size,
        rollout_dp=rollout.data_parallel_size,
        rollout_pp=rollout.pipeline_model_parallel_size,
        rollout_ep=rollout.expert_parallel_size,
        max_model_len=rollout.max_model_len or 0,
        log_prob_micro=rollout.log_prob_micro_batch_size_per_gpu,
        log_prob_tokens=log_prob_tokens,
        ref_micro=_first(ref.log_prob_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu),
        ref_tokens=_first(ref.log_prob_max_token_len_per_gpu, log_prob_tokens),
        mini=actor.ppo_mini_batch_size,
        micro=actor.ppo_micro_batch_size_per_gpu,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        epochs=actor.ppo_epochs,
        sp=actor.fsdp_config.ulysses_sequence_parallel_size,
        tp=actor.megatron.tensor_model_parallel_size,
        pp=actor.megatron.pipeline_model_parallel_size,
        cp=actor.megatron.context_parallel_size,
        critic_mini=_first(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
        critic_micro=_first(critic.ppo_micro_batch_size_per_gpu, actor.ppo_micro_batch_size_per_gpu),
        critic_tokens=_first(critic.ppo_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu),
        critic_epochs=_first(critic.ppo_epochs, actor.ppo_epochs),
        megatron=actor.strategy == "megatron",
        dynamic=actor.use_dynamic_bsz,
        log_prob_dynamic=log_prob_dynamic,
        ref_dynamic=_first(ref.log_prob_use_dynamic_bsz, log_prob_dynamic),
        critic_dynamic=_first(critic.use_dynamic_bsz, actor.use_dynamic_bsz),
        has_critic=config.needs_critic,
        has_reference=config.needs_reference,
        needs_groups=config.needs_groups,
        num_prompts=num_prompts,
        shape=shape,
    )


def _first(given: Value | None, otherwise: Value) -> Value:
    return otherwise if given is None else given
