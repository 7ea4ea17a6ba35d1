"""What makes two configs the same run: the keys that change the mathematics, apart from those that say where.

Invariant: a key is mathematics unless it is declared placement here; placement may change when a run is resumed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from .keys import all_keys
from .masking import mask
from .schema import Config
from .serialize import canonical, to_json, unfold

PLACEMENT = (
    "run.name",
    "run.id",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.use_liger",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.megatron.*",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine",
    "actor_rollout_ref.rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "actor_rollout_ref.rollout.expert_parallel_size",
    "actor_rollout_ref.ref.*",
    "critic.model.enable_gradient_checkpointing",
    "critic.fsdp.*",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu",
    "reward.num_workers",
    "reward.processes_per_worker",
    "reward.timeout_s",
    "reward.memory_gib",
    "reward.max_error_rate",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.device",
    "trainer.num_threads",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.val_before_train",
    "checkpoint.*",
    "recovery.*",
    "tracking.*",
)
"""Keys and whole sections (`.*`) that say where, how fast and how safely the same numbers are made."""
LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")
"""How long a run is: mathematics only where the learning rate depends on the last step (see `is_open_ended`)."""


def _is_placement(key: str) -> bool:
    parts = key.split(".")
    return key in PLACEMENT or any(".".join(parts[:length]) + ".*" in PLACEMENT for length in range(1, len(parts)))


FORK_FIXED = ("actor_rollout_ref.model", "critic.model", "warm_start")
"""Sections that even a fork keeps: its weights have that architecture, and were warmed up already."""

MATHEMATICS = frozenset(info.key for info in all_keys() if not _is_placement(info.key) and info.key not in LENGTH)
"""Every other key of the schema: fixed for the life of a run."""


def is_open_ended(config: Config) -> bool:
    """Whether step s is the same however many steps follow: a constant learning rate, so a run may be lengthened."""
    return config.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant"


def config_hash(config: Config) -> str:
    """SHA-256 (hex) of the canonical JSON of the whole, secrets masked: of `to_json(config, masked=True)`.

    So a stored, masked config has the same hash, and a new password makes no other config.
    """
    return hashlib.sha256(to_json(config, masked=True).encode()).hexdigest()


def identity_hash(config: Config) -> str:
    """SHA-256 (hex) of the mathematics: equal for configs that must give the same numbers step by step."""
    return hashlib.sha256(canonical(_identity(config)).encode()).hexdigest()


def resume_diff(old: Config, new: Config) -> list[str]:
    """`key: old → new` for each change that a resumed run must not make; none: it may go on.

    With a constant learning rate a run may be lengthened, never shortened.
    """
    changed = _changes(_identity(old), _identity(new))
    return changed + (list(_shortened(old, new)) if is_open_ended(old) and is_open_ended(new) else [])


def changed_below(old: Config, new: Config, sections: Sequence[str]) -> list[str]:
    """`key: old → new` for each change in these sections, values masked."""

    def values(config: Config) -> dict[str, Any]:
        paths = ((".".join(path), value) for _, path, value in unfold(config))
        return {key: mask(key, value) for key, value in paths if key.startswith(tuple(f"{one}." for one in sections))}

    return _changes(values(old), values(new))


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in dict.fromkeys([*before, *after])
        if key not in before or key not in after or canonical(before[key]) != canonical(after[key])
    ]


def _identity(config: Config) -> dict[str, Any]:
    """Masked values of the mathematics, by dotted key."""
    counted = MATHEMATICS if is_open_ended(config) else MATHEMATICS | set(LENGTH)
    return {".".join(path): mask(".".join(path), value) for key, path, value in unfold(config) if key in counted}


def _shortened(old: Config, new: Config) -> Iterator[str]:
    before, after = old.trainer, new.trainer
    if before.total_training_steps is None and after.total_training_steps is None:
        if after.total_epochs < before.total_epochs:
            yield f"trainer.total_epochs: {before.total_epochs} → {after.total_epochs} (a run may only be lengthened)"
        return
    steps = (before.total_training_steps, after.total_training_steps)
    if steps[0] is None or steps[1] is None:
        yield f"trainer.total_training_steps: {steps[0]} → {steps[1]} (give it in both or in neither)"
    elif steps[1] < steps[0]:
        yield f"trainer.total_training_steps: {steps[0]} → {steps[1]} (a run may only be lengthened)"
