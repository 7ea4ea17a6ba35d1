"""verl's keys that are not ours: under which key of ours each one's meaning is found, or why it has none here.

Facts read from verl 0.9's configuration. Patterns match whole dotted keys, `*` any part of one; the first match counts.
Keys that both have under one name are not listed: they are taken as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What becomes of a verl key."""

    pattern: str
    target: str | None = None
    """our key; None: ignored"""
    values: Mapping[Any, Any] | None = None
    """verl's value to ours, where they differ"""
    reason: str = ""
    """why it is ignored, or how it is read"""
    harmless: tuple[Any, ...] | None = None
    """values that may be ignored; any other asks for something that is not done here. None: every value"""


_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_MODEL, _TRAINER = "actor_rollout_ref.model", "trainer"
_MEMORY = "placement of memory; it changes no number, and this version does not move it"
_ENGINE = "a switch inside verl's inference server; the engine here sets it by itself"
_KERNEL = "a choice of kernels; it changes no number"
_PLACES = "files are kept in MOONSHIFT_HOME and metrics in MLflow"
_OFF = (False, None, 0, "", "disable")


def _ignored(reason: str, *patterns: str, harmless: tuple[Any, ...] | None = None) -> list[Entry]:
    return [Entry(pattern=pattern, reason=reason, harmless=harmless) for pattern in patterns]


ENTRIES: tuple[Entry, ...] = (
    *_ignored("a class name of verl's own", "*._target_"),
    *_ignored("profiling is not part of a run's config here", "*.profiler.*", "global_profiler.*"),
    *_ignored(
        "a checkpoint always holds everything",
        "*.checkpoint.save_contents*",
        "*.checkpoint.load_contents*",
        "*.checkpoint.async_save",
    ),
    Entry(pattern=f"{_ACTOR}.strategy", target=f"{_ACTOR}.strategy", values={"fsdp": "fsdp2"}, reason="FSDP is FSDP2"),
    Entry(
        pattern=f"{_ACTOR}.ulysses_sequence_parallel_size",
        target=f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        reason="moved",
    ),
    Entry(pattern=f"{_ACTOR}.optim.clip_grad", target=f"{_ACTOR}.grad_clip", reason="moved"),
    Entry(pattern=f"{_ACTOR}.optim.warmup_style", target=f"{_ACTOR}.optim.lr_scheduler_type", reason="renamed"),
    *_ignored("the learning rate follows the run's own steps", "*.optim.total_training_steps"),
    *_ignored(
        "lr_warmup_steps counts here; give steps instead of a ratio", "*.optim.lr_warmup_steps_ratio", harmless=_OFF
    ),
    *_ignored("half a cosine is used", "*.optim.num_cycles", harmless=(0.5,)),
    *(
        Entry(
            pattern=f"{place}.optim.optimizer",
            target=f"{place}.optim.optimizer",
            values={"adam": "AdamW", "adamw": "AdamW", "muon": "Muon"},
            reason="spelt as torch.optim does",
        )
        for place in (_ACTOR, "critic")
    ),
    *_ignored("AdamW is torch's own, Muon Moonshift's", "*.optim.optimizer_impl", "*.optim.override_optimizer_config"),
    Entry(
        pattern=f"{_ACTOR}.fsdp_config.offload_policy",
        target=f"{_ACTOR}.fsdp_config.param_offload",
        values={True: True, False: None},
        reason="FSDP2's policy is what param_offload is here; false leaves that as it is",
    ),
    *(
        Entry(pattern=f"critic.model.fsdp_config.{name}", target=f"critic.fsdp.{name}", reason="moved")
        for name in ("param_offload", "optimizer_offload")
    ),
    *_ignored("samples keep their order, so that a step can be replayed", f"{_ACTOR}.shuffle", harmless=(False,)),
    *_ignored(
        "global sizes were ambiguous; give the one that ends in _per_gpu",
        f"{_ACTOR}.ppo_micro_batch_size",
        "critic.ppo_micro_batch_size",
        f"{_ROLLOUT}.log_prob_micro_batch_size",
        f"{_REF}.log_prob_micro_batch_size",
        "critic.forward_micro_batch_size",
        harmless=(None,),
    ),
    *_ignored(
        "the update's own budget is used", "*.forward_max_token_len_per_gpu", "critic.forward_micro_batch_size_per_gpu"
    ),
    *_ignored(_KERNEL, "*.use_torch_compile", "*.use_fused_kernels", "*.fused_kernel_options*", "*.use_liger"),
    *_ignored(_KERNEL, "*.use_remove_padding", "*.entropy_from_logits_with_chunking", "*.entropy_checkpointing"),
    *_ignored(
        _MEMORY,
        "*.fsdp_config.param_offload",
        "*.fsdp_config.optimizer_offload",
        "*.fsdp_config.grad_offload",
        "*.fsdp_config.offload_policy",
        "*.fsdp_config.reshard_after_forward",
        "*.fsdp_config.forward_prefetch",
        "*.fsdp_config.wrap_policy*",
        "*.fsdp_config.fsdp_size",
        "*.fsdp_config.model_dtype",
        "critic.fsdp.*",
        "*.megatron.param_offload",
        "*.megatron.optimizer_offload",
        "*.megatron.grad_offload",
        "*.gradient_checkpointing_kwargs*",
        "*.enable_activation_offload",
        "*.use_shm",
    ),
    *_ignored("reference and critic compute in what the actor does", "*.fsdp_config.dtype"),
    *_ignored("the critic is trained whole", "critic.model.lora_rank", harmless=_OFF),
    *_ignored(
        "settings of an adapter that the critic does not have",
        "critic.model.lora_alpha",
        "critic.model.target_modules",
        "critic.model.exclude_modules",
    ),
    *_ignored("a new adapter is trained", f"{_MODEL}.lora_adapter_path", harmless=(None,)),
    *_ignored("an adapter is merged into the weights that are served", f"{_MODEL}.lora.merge"),
    *_ignored("the model's own template is used", f"{_MODEL}.custom_chat_template", harmless=(None,)),
    *_ignored("a reward or model is named by its path", "*.external_lib", harmless=(None,)),
    *_ignored(
        "the reference is the initial policy, placed as the actor is",
        f"{_REF}.strategy",
        f"{_REF}.ulysses*",
        f"{_REF}.megatron*",
    ),
    *_ignored("the reference is the initial policy", f"{_REF}.model*", harmless=(None,)),
    Entry(
        pattern=f"{_ROLLOUT}.val_kwargs.do_sample",
        target=f"{_ROLLOUT}.val_kwargs.temperature",
        values={False: 0.0, True: None},
        reason="greedy is temperature 0; true leaves val_kwargs.temperature as it is",
    ),
    *_ignored("training always samples", f"{_ROLLOUT}.do_sample", harmless=(True,)),
    *_ignored("a response always ends at a stop token", f"{_ROLLOUT}.ignore_eos", harmless=(False,)),
    *_ignored(
        "data.max_prompt_length and data.max_response_length count",
        f"{_ROLLOUT}.prompt_length",
        f"{_ROLLOUT}.response_length",
    ),
    *_ignored("log-probs are always taken", f"{_ROLLOUT}.calculate_log_probs"),
    *_ignored("conversations of several turns are not offered", f"{_ROLLOUT}.multi_turn.enable", harmless=(False,)),
    *_ignored(
        "settings of something that is off",
        f"{_ROLLOUT}.multi_turn*",
        f"{_ROLLOUT}.agent*",
        f"{_ROLLOUT}.trace*",
        f"{_ROLLOUT}.skip*",
    ),
    *_ignored("generation cannot be left out", f"{_ROLLOUT}.skip_rollout", harmless=(False,)),
    *_ignored(
        _ENGINE,
        *(
            f"{_ROLLOUT}.{name}"
            for name in (
                "mode",
                "cudagraph_capture_sizes",
                "disable_log_stats",
                "engine_kwargs.sglang*",
                "engine_kwargs.trtllm*",
                "update_weights_bucket_megabytes",
                "checkpoint_engine*",
                "load_format",
                "layered_summon",
                "enable_chunked_prefill",
                "over_sample_rate",
                "multi_stage_wake_up",
                "scheduling_policy",
                "prometheus*",
                "quantization_config*",
            )
        ),
    ),
    *_ignored("the engine shares the actor's GPUs", "actor_rollout_ref.hybrid_engine", harmless=(True,)),
    *_ignored(
        "waits are bounded by recovery.*_timeout_s",
        "actor_rollout_ref.nccl_timeout",
        "*.ray_wait_register_center_timeout",
    ),
    Entry(
        pattern="data.truncation",
        target="data.on_overlong",
        values={"error": "error", "left": "left", "right": "right"},
        reason="renamed to on_overlong; data.filter_overlong_prompts wins",
    ),
    Entry(
        pattern="data.filter_overlong_prompts",
        target="data.on_overlong",
        values={True: "filter", False: None},
        reason="true is filter; false leaves data.on_overlong as it is",
    ),
    *_ignored("prompts are counted in one process", "data.filter_overlong_prompts_workers"),
    Entry(pattern="data.reward_fn_key", target="data.source_key", reason="renamed"),
    *_ignored(
        "data is read once, by one reader",
        "data.dataloader_num_workers",
        "data.use_shm",
        "data.val_batch_size",
        "data.gen_batch_size",
    ),
    *_ignored("every column of a row reaches the reward", "data.return_*"),
    *_ignored(
        "only text is trained on",
        "data.image_key",
        "data.video_key",
        "data.image_patch_size",
        "data.mm_processor_kwargs*",
    ),
    *_ignored("held-out prompts keep their order", "data.validation_shuffle", harmless=(False,)),
    *_ignored("the model's own tokenizer is used", "data.tokenizer", harmless=(None,)),
    *_ignored("set actor_rollout_ref.model.trust_remote_code", "data.trust_remote_code"),
    *_ignored(
        "the readers of core/datasets are used", "data.custom_cls*", "data.sampler*", "data.datagen*", harmless=(None,)
    ),
    *_ignored(
        "the template is called without further arguments", "data.apply_chat_template_kwargs*", harmless=({}, None)
    ),
    *_ignored(
        "the critic follows the actor",
        "critic.strategy",
        "critic.rollout_n",
        "critic.ulysses*",
        "critic.shuffle",
        "critic.megatron*",
    ),
    *_ignored("the critic is read with the policy's tokenizer and settings", "critic.model.tokenizer_path"),
    *_ignored("set actor_rollout_ref.model.trust_remote_code", "critic.model.trust_remote_code"),
    *_ignored("the critic has its model's own config", "critic.model.override_config*", harmless=({}, None)),
    *_ignored(_MEMORY, "critic.model.fsdp_config.*"),
    *_ignored(
        "write the weights: algorithm.gdpo_reward_weights={a: 1, b: 1}", "algorithm.gdpo_reward_keys", harmless=(None,)
    ),
    Entry(
        pattern="algorithm.filter_groups.max_inflight_gen_batches",
        target="algorithm.filter_groups.max_num_gen_batches",
        reason="renamed",
    ),
    *(
        Entry(pattern=f"{place}overlong_buffer_cfg.{name}", target=f"reward.overlong_buffer.{name}", reason="moved")
        for place in ("reward_model.", "reward.reward_kwargs.", "reward_model.reward_kwargs.")
        for name in ("enable", "len", "penalty_factor")
    ),
    *_ignored("the metrics of the penalty are always there", "*.overlong_buffer_cfg.log"),
    *_ignored("a critic is built where algorithm.adv_estimator=gae", "critic.enable"),
    *_ignored(
        "a reward model is not offered; rewards are functions",
        "reward_model.enable",
        "reward.reward_model.enable",
        harmless=_OFF,
    ),
    *_ignored(
        "settings of a reward model, which is off; rewards are functions",
        "reward_model.*",
        "reward.reward_model*",
        "reward.reward_manager*",
        "reward.sandbox_fusion*",
        "reward_manager*",
        "sandbox_fusion*",
    ),
    *_ignored("samples are not weighted anew", "algorithm.use_pf_ppo", harmless=(False,)),
    *_ignored("settings of something that is off", "algorithm.pf_ppo*"),
    Entry(pattern=f"{_TRAINER}.project_name", target="tracking.experiment", reason="MLflow's experiment"),
    Entry(pattern=f"{_TRAINER}.experiment_name", target="run.name", reason="the run's name"),
    Entry(pattern=f"{_TRAINER}.max_actor_ckpt_to_keep", target="checkpoint.keep", reason="renamed"),
    *_ignored("the critic is in the actor's checkpoint", f"{_TRAINER}.max_critic_ckpt_to_keep"),
    *_ignored("metrics go to MLflow", f"{_TRAINER}.logger"),
    *_ignored("moonshift train --resume goes on with a run", f"{_TRAINER}.resume_mode", f"{_TRAINER}.resume_from_path"),
    *_ignored(
        _PLACES,
        *(
            f"{_TRAINER}.{name}"
            for name in ("default_local_dir", "default_hdfs_dir", "rollout_data_dir", "validation_data_dir")
        ),
    ),
    *_ignored("samples are kept in the ledger", f"{_TRAINER}.log_val_generations"),
    *_ignored("ranks are always balanced", f"{_TRAINER}.balance_batch"),
    *_ignored("validation alone is another command", f"{_TRAINER}.val_only", harmless=(False,)),
    *_ignored(
        "one trainer loop is offered", f"{_TRAINER}.use_v1", f"{_TRAINER}.v1*", f"{_TRAINER}.use_legacy_worker_impl"
    ),
    *_ignored("old checkpoints go when newer ones are verified", f"{_TRAINER}.del_local_ckpt_after_load"),
    *_ignored("a run can be preempted at any moment", f"{_TRAINER}.esi_redundant_time"),
    *_ignored("set RAY_ADDRESS for another cluster", "ray_kwargs*", "ray_init*"),
    *_ignored("a setting of Hydra", "hydra*"),
)

REWARD_FILE = ("custom_reward_function.path", "reward.custom_reward_function.path")
REWARD_NAME = ("custom_reward_function.name", "reward.custom_reward_function.name")
"""Two keys of verl's that are one of ours: `reward.function` = path:name."""


def entry_of(key: str) -> Entry | None:
    """The first entry that matches."""
    return next((entry for entry in ENTRIES if fnmatchcase(key, entry.pattern)), None)
