"""From rollouts, scores and log-probs to the batch that an update needs: the redo log of a step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms import (
    ADVANTAGE_ESTIMATORS,
    apply_kl_in_reward,
    correction_metrics,
    explained_variance,
    has_signal,
    overlong_penalty,
    rollout_correction,
)
from ..batch import Batch, Ragged
from ..config.schema import Config
from .correction import correction_rule
from .measures import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Folders of the stages that an advantage is computed from."""

    rollout: str
    score: str
    log_probs: str


def compute_advantages(stages: Stages, config: Config, kl_coef: float | None = None) -> tuple[Batch, dict[str, float]]:
    """The redo log and its metrics.

    The score of a response becomes the reward of its last token; where `algorithm.use_kl_in_reward` is on, every token
    pays for its distance to the reference. `kl_coef`: the controller's weight of that, by default the config's.

    A response whose score is NaN, because its reward failed, is in no statistic and none of its tokens is trained on:
    its group is measured over the others alone, and a group in which fewer than two are left has the advantage 0.
    """
    batch = Batch.load(Path(stages.rollout)).union(Batch.load(Path(stages.score)))
    log_probs = Batch.load(Path(stages.log_probs))
    batch = batch.union(log_probs) if log_probs.names else batch  # nothing was needed before the update
    mask = batch.padded("response_ids")[1]
    scores, metrics = _shaped_scores(batch, config)
    valid = torch.isfinite(scores)
    rewards = torch.zeros(mask.shape)
    # an engine's response holds at least one token, its stop token: there is a last one to reward
    rewards[torch.arange(len(batch)), batch.ragged("response_ids").lengths - 1] = scores
    if config.algorithm.use_kl_in_reward:
        weight = config.algorithm.kl_ctrl.kl_coef if kl_coef is None else kl_coef
        old, reference = batch.padded("old_log_probs")[0], batch.padded("ref_log_probs")[0]
        rewards, kl = apply_kl_in_reward(rewards, old, reference, mask, weight, config.algorithm.kl_penalty)
        metrics |= {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": weight}
    if config.needs_baseline:
        valid &= torch.isfinite(_baseline(batch, stages))
    advantages, returns = _estimate(batch, rewards, mask, valid, stages, config)
    counted = mask & valid[:, None]
    metrics |= spread("critic/rewards", rewards[valid].sum(1))
    metrics |= spread("critic/advantages", advantages[counted]) | spread("critic/returns", returns[counted])
    signal = has_signal(scores, batch.dense("group"), valid=valid)
    metrics["training/groups_without_signal"] = float((~signal).double().mean())
    trained = counted & ~_cut_off(batch)[:, None] if config.algorithm.mask_truncated else counted
    metrics["training/masked_samples"] = float((mask.any(1) & ~trained.any(1)).sum())
    columns, measured = _corrected(batch, trained, config)
    columns |= {"advantages": Ragged.from_padded(advantages, mask)}
    if config.needs_critic:
        columns |= {"returns": Ragged.from_padded(returns, mask), "values": batch["values"]}
        metrics["critic/vf_explained_var"] = float(explained_variance(batch.padded("values")[0], returns, counted))
    return batch.select(["prompt_ids", "response_ids"]).with_columns(columns), metrics | measured


def _shaped_scores(batch: Batch, config: Config) -> tuple[Tensor, dict[str, float]]:
    """`[B]` float32: the scores, less the price of overlong answers where it is asked for; metrics of both.

    A missing score stays NaN, and out of the metrics.
    """
    scores = batch.dense("score").float()
    metrics = spread("critic/score", scores[torch.isfinite(scores)])
    buffer = config.reward.overlong_buffer
    if not buffer.enable:
        return scores, metrics
    penalty = overlong_penalty(
        batch.ragged("response_ids").lengths,
        max_response_length=config.data.max_response_length,
        buffer_length=buffer.len,
        penalty_factor=buffer.penalty_factor,
    ).float()
    metrics |= {
        "reward/overlong_penalty/mean": float(penalty.mean()),
        "reward/overlong": float((penalty < 0).float().mean()),
    }
    return scores + penalty, metrics


def _baseline(batch: Batch, stages: Stages) -> Tensor:
    """`[B]` float32: the score of the greedy response to each row's prompt; NaN where that one's reward failed."""
    return Batch.load(Path(stages.score) / "baseline").dense("score").float()[batch.dense("group")]


def _estimate(
    batch: Batch, rewards: Tensor, mask: Tensor, valid: Tensor, stages: Stages, config: Config
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[B, T]` by the estimator that the config names, given what it needs and no more."""
    algorithm = config.algorithm
    estimator = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
    settings = {"norm_by_std": algorithm.norm_adv_by_std_in_grpo, "gamma": algorithm.gamma, "lam": algorithm.lam}
    arguments: dict[str, Any] = {name: value for name, value in settings.items() if name in estimator.options}
    if "values" in estimator.needs:
        arguments["values"] = batch.padded("values")[0]
    if "baseline_scores" in estimator.needs:
        arguments["baseline_scores"] = _baseline(batch, stages)
    if "reward_components" in estimator.needs:
        arguments["reward_components"] = _components(batch)
        arguments["weights"] = dict(algorithm.gdpo_reward_weights) or None
    return estimator.compute(rewards, mask, batch.dense("group"), valid=valid, **arguments)


def _components(batch: Batch) -> dict[str, Tensor]:
    """Every component of the reward, by its name; the score alone where it has none."""
    named = {
        name.removeprefix("score/"): batch.dense(name).float() for name in batch.names if name.startswith("score/")
    }
    return named or {"score": batch.dense("score").float()}


def _corrected(batch: Batch, trained: Tensor, config: Config) -> tuple[dict[str, Ragged], dict[str, float]]:
    """Loss mask, old log-probs, and with three policies the importance weights; the gap between the engines."""
    columns: dict[str, Ragged] = {}
    metrics: dict[str, float] = {}
    mask = batch.padded("response_ids")[1]
    if "old_log_probs" in batch.names:
        rule = correction_rule(config)
        sampled = batch.padded("rollout_log_probs")[0]
        found = rollout_correction(batch.padded("old_log_probs")[0], sampled, trained, rule)
        metrics = correction_metrics([found])
        columns["old_log_probs"] = batch.ragged("old_log_probs")
        trained = found.loss_mask
        if rule.rollout_is or rule.rollout_rs:
            columns["weights"] = Ragged.from_padded(found.weights, mask)
    elif config.algorithm.rollout_correction.bypass_mode:
        columns["old_log_probs"] = batch.ragged("rollout_log_probs")
    else:
        columns["rollout_log_probs"] = batch.ragged("rollout_log_probs")
    if "ref_log_probs" in batch.names:
        columns["ref_log_probs"] = batch.ragged("ref_log_probs")
    columns["loss_mask"] = Ragged.from_padded(trained, mask)
    return columns, metrics


def _cut_off(batch: Batch) -> Tensor:
    """`[B]` bool: the engine stopped at the length limit, by its own finish reason and never by a length (case G05)."""
    return torch.tensor([reason == "length" for reason in batch.rows("finish_reason")], dtype=torch.bool)
