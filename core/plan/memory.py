"""An estimate of a GPU's memory, part by part, from the plan and the model's architecture; bytes.

It is an estimate for a decision before anything starts, not a promise: what it assumes is listed beside it.
"""

from dataclasses import dataclass

from ..config.schema import Config
from .batch_plan import BatchPlan
from .sizes import ModelShape

_FLOAT32, _ADAM_MOMENTS, _LOGIT_COPIES = 4, 2, 3
_ACTIVATIONS_PER_TOKEN = 34
"""Half-precision bytes a token, layer and unit of hidden size (arXiv 2205.05198, eq. 1, no attention map)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes a GPU by what they hold, and what was assumed."""

    parts: dict[str, int]
    assumed: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes a GPU, everything at once: the engine and the optimizer share the device."""
        return sum(self.parts.values())


def estimate(config: Config, plan: BatchPlan, shape: ModelShape) -> Memory:
    """Memory of one GPU while the policy is updated, the inference engine being awake on the same device."""
    shards = plan.world  # FSDP shards over all GPUs; Megatron's distributed optimizer does the same for its state
    per_shard = -(-shape.parameters // shards)
    longest = config.data.max_prompt_length + config.data.max_response_length
    parallel = plan.model_parallel
    tokens = plan.actor.max_tokens or plan.actor.micro_batch_size * longest
    tokens_per_gpu = -(-tokens // parallel)
    width = _FLOAT32  # this version trains in float32
    models = 1 + (plan.reference is not None) + (plan.critic is not None)
    trained = 1 + (plan.critic is not None)
    layer_bytes = _ACTIVATIONS_PER_TOKEN // 2 * width * shape.hidden_size
    sequences = min(config.actor_rollout_ref.rollout.max_num_seqs, plan.samples_per_replica)
    # TP shards the cache's heads; a replica's GPUs share it
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * width * longest * sequences // plan.replica_gpus
    return Memory(
        parts={
            "weights": models * per_shard * width,
            "gradients": trained * per_shard * width,
            "optimizer": trained * per_shard * _FLOAT32 * _ADAM_MOMENTS,
            "KV cache": cache,
            "activations": tokens_per_gpu * shape.layers * layer_bytes,
            "logits": tokens_per_gpu * shape.vocab_size * _FLOAT32 * _LOGIT_COPIES,
        },
        assumed=(
            f"{shape.parameters:,} parameters in float32, AdamW with two float32 moments, sharded over {shards} GPU(s)",
            f"a micro-batch of {tokens:,} tokens ({longest} tokens a sample at the most), no activation checkpointing",
            f"a KV cache of {sequences} samples of full length a replica; CUDA's own memory and fragmentation left out",
        ),
    )
