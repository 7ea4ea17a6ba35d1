"""An estimate of a GPU's memory, part by part, from the plan and the model's architecture; bytes.

It is an estimate for a decision before anything starts, not a promise: what it assumes is listed beside it.
"""

from dataclasses import dataclass

from ..config.schema import Config, ModelSection
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


def adapter_parameters(model: ModelSection, shape: ModelShape) -> int:
    """Parameters of a LoRA adapter, rank · (in + out) a layer; of a gated decoder, by the usual names of its layers."""
    hidden, heads = shape.hidden_size, shape.attention_heads * shape.head_dim
    kv_heads, inner = shape.kv_heads * shape.head_dim, shape.intermediate_size
    sides = {
        "q_proj": hidden + heads,
        "k_proj": hidden + kv_heads,
        "v_proj": hidden + kv_heads,
        "o_proj": heads + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    named, left_out = model.target_modules, model.exclude_modules
    chosen = [
        size for name, size in sides.items() if (named == ("all-linear",) or name in named) and name not in left_out
    ]
    # layers of other names are taken to be like the largest of these
    return model.lora_rank * shape.layers * (sum(chosen) or len(named) * max(sides.values()))


def estimate(config: Config, plan: BatchPlan, shape: ModelShape) -> Memory:
    """Memory of one GPU while the policy is updated, the inference engine being awake on the same device."""
    shards = plan.world  # FSDP shards over all GPUs; Megatron's distributed optimizer does the same for its state
    per_shard = -(-shape.parameters // shards)
    adapter = -(-adapter_parameters(config.actor_rollout_ref.model, shape) // shards)
    actor_trained = adapter or per_shard
    critic = per_shard if plan.critic is not None else 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    parallel = plan.model_parallel
    tokens = plan.actor.max_tokens or plan.actor.micro_batch_size * longest
    tokens_per_gpu = -(-tokens // parallel)
    width = _BFLOAT16 if config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16" else _FLOAT32
    recomputed = config.actor_rollout_ref.model.enable_gradient_checkpointing
    # the reference is the base under the adapter, where there is one
    models = 1 + (plan.reference is not None and not adapter) + (plan.critic is not None)
    trained = actor_trained + critic
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
            "weights": (models * per_shard + adapter) * _FLOAT32,
            "engine's weights": served,
            "gradients": trained * _FLOAT32,
            "optimizer": trained * _FLOAT32 * _ADAM_MOMENTS,
            "KV cache": cache,
            "activations": tokens_per_gpu * kept_bytes,
            "logits": tokens_per_gpu * shape.vocab_size * _FLOAT32 * _LOGIT_COPIES,
        },
        assumed=(
            f"{shape.parameters:,} parameters in float32, AdamW with two float32 moments, sharded over {shards} GPU(s)"
            + (f"; trained is an adapter of {adapter * shards:,} parameters alone" if adapter else ""),
            f"a micro-batch of {tokens:,} tokens ({longest} tokens a sample at the most), "
            + ("activations computed again, layer by layer" if recomputed else "no activation checkpointing"),
            f"a KV cache of {sequences} samples of full length a replica; CUDA's own memory and fragmentation left out",
        ),
    )
