"""An estimate of a GPU's memory, part by part, from the plan and the model's architecture; bytes.

It is an estimate for a decision before anything starts, not a promise: what it assumes is listed beside it.
"""

from dataclasses import dataclass

from ..config.schema import Config, ModelSection, OffloadSection, OptimSection
from .batch_plan import BatchPlan
from .sizes import ModelShape

_FLOAT32, _BFLOAT16, _LOGIT_COPIES = 4, 2, 3
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


def _matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Rows and columns of each linear layer of a gated decoder's block, by their usual names."""
    hidden, heads = shape.hidden_size, shape.attention_heads * shape.head_dim
    kv_heads, inner = shape.kv_heads * shape.head_dim, shape.intermediate_size
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def adapter_parameters(model: ModelSection, shape: ModelShape) -> int:
    """Parameters of a LoRA adapter, rank · (in + out) a layer; of a gated decoder, by the usual names of its layers."""
    sides = {name: rows + columns for name, (rows, columns) in _matrices(shape).items()}
    named, left_out = model.target_modules, model.exclude_modules
    chosen = [
        size for name, size in sides.items() if (named == ("all-linear",) or name in named) and name not in left_out
    ]
    # layers of other names are taken to be like the largest of these
    return model.lora_rank * shape.layers * (sum(chosen) or len(named) * max(sides.values()))


def _hidden_parameters(shape: ModelShape) -> int:
    """Parameters of all blocks' linear layers; of stacked experts, which are no matrices, none."""
    block = sum(rows * columns for rows, columns in _matrices(shape).values())
    return min(shape.layers * block, shape.parameters)


def optimizer_numbers(optim: OptimSection, shape: ModelShape, adapter: int) -> int:
    """Numbers that an optimizer keeps: two moments a parameter, and of Muon's matrices one momentum.

    `adapter`: parameters of the adapter that is trained in place of the weights; 0: none. It is all matrices.
    """
    trained = adapter or shape.parameters
    if optim.optimizer == "AdamW":
        return 2 * trained
    return 2 * trained - (adapter or _hidden_parameters(shape))


def estimate(config: Config, plan: BatchPlan, shape: ModelShape) -> Memory:
    """Memory of one GPU while the policy is updated, the inference engine being awake on the same device."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    shards = plan.world  # FSDP shards over all GPUs; Megatron's distributed optimizer does the same for its state
    adapter = adapter_parameters(model, shape)
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = plan.actor.max_tokens or plan.actor.micro_batch_size * longest
    tokens_per_gpu = -(-tokens // plan.model_parallel)
    width = _BFLOAT16 if actor.fsdp_config.dtype == "bfloat16" else _FLOAT32
    trained = [_trained(shape, actor.optim, actor.fsdp_config, adapter, width, shards)]
    if plan.critic is not None:
        trained.append(_trained(shape, config.critic.optim, config.critic.fsdp, 0, width, shards))
    weights = sum(one.weights for one in trained)
    if plan.reference is not None and not adapter:  # else it is the base under the adapter
        offloaded = config.actor_rollout_ref.ref.fsdp_config.param_offload
        weights += _streamed(shape, width) if offloaded else -(-shape.parameters // shards) * _FLOAT32
    layer_bytes = _ACTIVATIONS_PER_TOKEN // 2 * width * shape.hidden_size
    # with recomputation every layer's input is kept, and all of one layer
    recomputed = model.enable_gradient_checkpointing
    kept_bytes = shape.layers * width * shape.hidden_size + layer_bytes if recomputed else shape.layers * layer_bytes
    activations = tokens_per_gpu * kept_bytes
    logits = tokens_per_gpu * shape.vocab_size * _FLOAT32 * _LOGIT_COPIES
    sequences = min(config.actor_rollout_ref.rollout.max_num_seqs, plan.samples_per_replica)
    # TP shards the cache's heads; a replica's GPUs share it
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * _FLOAT32 * longest * sequences // plan.replica_gpus
    # alone in float32 the Transformers engine serves the weights that are trained; else it has whole ones of its own
    serves = plan.world == 1 and width == _FLOAT32 and not actor.fsdp_config.param_offload
    # one that comes for its step alone finds what the passes held free again, and no other optimizer's state
    passing = max(0, max(one.passing for one in trained) - activations - logits)
    return Memory(
        parts={
            "weights": weights,
            "engine's weights": 0 if serves else shape.parameters * _FLOAT32 // plan.replica_gpus,
            "gradients": sum(one.gradients for one in trained),
            "optimizer": sum(one.optimizer for one in trained) + passing,
            "KV cache": cache,
            "activations": activations,
            "logits": logits,
        },
        assumed=(
            f"{shape.parameters:,} parameters in float32, {_optimizer_words(actor.optim)}, sharded over {shards} GPU(s)"
            + (f"; trained is an adapter of {adapter:,} parameters alone" if adapter else ""),
            f"a micro-batch of {tokens:,} tokens ({longest} tokens a sample at the most), "
            + ("activations computed again, layer by layer" if recomputed else "no activation checkpointing"),
            f"a KV cache of {sequences} samples of full length a replica; CUDA's own memory and fragmentation left out",
            *_host_words(sum(one.host for one in trained)),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """Bytes of one trained model, each GPU."""

    weights: int
    gradients: int
    optimizer: int
    """there all the time"""
    passing: int
    """there for the optimizer step alone"""
    host: int


def _trained(
    shape: ModelShape, optim: OptimSection, offload: OffloadSection, adapter: int, width: int, shards: int
) -> _Trained:
    weights = (-(-shape.parameters // shards) + -(-adapter // shards)) * _FLOAT32
    gradients = -(-(adapter or shape.parameters) // shards) * _FLOAT32
    state = -(-optimizer_numbers(optim, shape, adapter) // shards) * _FLOAT32
    if offload.param_offload:
        host = weights + gradients + state
        return _Trained(weights=_streamed(shape, width), gradients=0, optimizer=0, passing=0, host=host)
    kept, passing = (0, state) if offload.optimizer_offload else (state, 0)
    return _Trained(weights=weights, gradients=gradients, optimizer=kept, passing=passing, host=passing)


def _streamed(shape: ModelShape, width: int) -> int:
    """Bytes of weights from host memory while they are used: embeddings and head, a block, and the one after it."""
    hidden = _hidden_parameters(shape)
    return width * (shape.parameters - hidden + 2 * -(-hidden // shape.layers))


def _optimizer_words(optim: OptimSection) -> str:
    adamw = "AdamW with two float32 moments"
    return adamw if optim.optimizer == "AdamW" else f"Muon with one float32 momentum for hidden matrices, else {adamw}"


def _host_words(held: int) -> tuple[str, ...]:
    return (f"{held / 2**30:.2f} GiB of host memory a GPU for what is offloaded",) if held else ()
