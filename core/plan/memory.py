"""An estimate of a GPU's memory, part by part, from the plan and the model's architecture; bytes.

It is an estimate for a decision before anything starts, not a promise: what it assumes is listed beside it.
"""

from dataclasses import dataclass

from ..config.schema import Config
from .batch_plan import BatchPlan
from .sizes import ModelShape

_FLOAT32, _BFLOAT16, _ADAM_MOMENTS, _LOGIT_COPIES = 4, 2, 2, 3
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
    width = _BFLOAT16 if config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16" else _FLOAT32
    recomputed = config.actor_rollout_ref.model.enable_gradient_checkpointing
    models = 1 + (plan.reference is not None) + (plan.critic is not None)
    trained = 1 + (plan.critic is not None)
    layer_bytes = _ACTIVATIONS_PER_TOKEN // 2 * width * shape.hidden_size
    # with recomputation every layer's input is kept, and all of one layer
    kept_bytes = shape.layers * width * shape.hidden_size + layer_bytes if recomputed else shape.layers * layer_bytes
    sequences = min(config.actor_rollout_ref.rollout.max_num_seqs, plan.samples_per_replica)
    # TP shards the cache's heads; a replica's GPUs share it
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * _FLOAT32 * longest * sequences // plan.replica_gpus
    # alone in float32 the Transformers engine serves the weights that are trained; else it has whole ones of its own
    served = 0 if plan.world == 1 and width == _FLOAT32 else shape.parameters * _FLOAT32 // plan.replica_gpus
    return Memory(
        parts={
            "weights": models * per_shard * _FLOAT32,
            "engine's weights": served,
            "gradients": trained * per_shard * _FLOAT32,
            "optimizer": trained * per_shard * _FLOAT32 * _ADAM_MOMENTS,
            "KV cache": cache,
            "activations": tokens_per_gpu * kept_bytes,
            "logits": tokens_per_gpu * shape.vocab_size * _FLOAT32 * _LOGIT_COPIES,
        },
        assumed=(
            f"{shape.parameters:,} parameters in float32, AdamW with two float32 moments, sharded over {shards} GPU(s)",
            f"a micro-batch of {tokens:,} tokens ({longest} tokens a sample at the most), "
            + ("activations computed again, layer by layer" if recomputed else "no activation checkpointing"),
            f"a KV cache of {sequences} samples of full length a replica; CUDA's own memory and fragmentation left out",
        ),
    )
