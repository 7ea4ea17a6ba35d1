"""From rollouts, scores and log-probs to the batch that an update needs: the redo log of a step."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..algorithms import ADVANTAGE_ESTIMATORS
from ..algorithms.kl import apply_kl_in_reward
from ..batch import Batch, Ragged
from ..config.schema import Config
from .measures import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Folders of the stages that an advantage is computed from."""

    rollout: str
    score: str
    log_probs: str


def compute_advantages(stages: Stages, config: Config) -> tuple[Batch, dict[str, float]]:
    """The redo log and its metrics.

    The score of a response becomes the reward of its last token; where `algorithm.use_kl_in_reward` is on, every token
    pays for its distance to the reference.
    """
    batch = Batch.load(Path(stages.rollout)).union(Batch.load(Path(stages.score)))
    log_probs = Batch.load(Path(stages.log_probs))
    batch = batch.union(log_probs) if log_probs.names else batch  # nothing was needed before the update
    mask = batch.padded("response_ids")[1]
    rewards = torch.zeros(mask.shape)
    scores, responses = batch.dense("score"), batch.ragged("response_ids")
    # an engine's response holds at least one token, its stop token: there is a last one to reward
    rewards[torch.arange(len(batch)), responses.lengths - 1] = scores.to(rewards.dtype)
    metrics = spread("critic/score", scores)
    if config.algorithm.use_kl_in_reward:
        coefficient = config.algorithm.kl_ctrl.kl_coef
        old, reference = batch.padded("old_log_probs")[0], batch.padded("ref_log_probs")[0]
        rewards, kl = apply_kl_in_reward(rewards, old, reference, mask, coefficient, config.algorithm.kl_penalty)
        metrics |= {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coefficient}
    groups = batch.dense("group")
    advantages, returns = ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator](
        rewards, mask, groups, norm_by_std=config.algorithm.norm_adv_by_std_in_grpo
    )
    metrics |= spread("critic/rewards", rewards.sum(1))
    metrics |= spread("critic/advantages", advantages[mask]) | spread("critic/returns", returns[mask])
    solved = torch.zeros(int(groups.max()) + 1).index_reduce(0, groups, advantages.abs().sum(1), "amax")
    metrics["training/groups_without_signal"] = float((solved == 0).float().mean())
    trained = mask & ~_cut_off(batch)[:, None] if config.algorithm.mask_truncated else mask
    metrics["training/masked_samples"] = float((mask.any(1) & ~trained.any(1)).sum())
    kept = ["prompt_ids", "response_ids", "old_log_probs" if "old_log_probs" in batch.names else "rollout_log_probs"]
    kept += ["ref_log_probs"] if "ref_log_probs" in batch.names else []
    redo = batch.select(kept).with_columns(
        {"advantages": Ragged.from_padded(advantages, mask), "loss_mask": Ragged.from_padded(trained, mask)}
    )
    return redo, metrics


def _cut_off(batch: Batch) -> torch.Tensor:
    """`[B]` bool: the engine stopped at the length limit, by its own finish reason and never by a length (case G05)."""
    return torch.tensor([reason == "length" for reason in batch.rows("finish_reason")], dtype=torch.bool)
