"""Advantages, policy losses, KL estimators, rollout correction and aggregation: pure functions, found by name.

They know no config object and no process group, mutate no argument, and read nothing outside the mask.
"""

from .advantage import grpo
from .aggregate import LOSS_AGG_MODES, aggregate
from .checks import NonFiniteInputError, lookup
from .dapo import GroupBuffer, has_signal, overlong_penalty
from .estimators import ADVANTAGE_ESTIMATORS, Estimator
from .kl import (
    KL_ESTIMATORS,
    AdaptiveKlController,
    FixedKlController,
    apply_kl_in_reward,
    full_kl,
    kl_penalty,
)
from .loss import PolicyLoss, ppo_clip
from .policy_losses import POLICY_LOSSES, Loss
from .rollout_correction import (
    REJECTION_KINDS,
    CorrectionRule,
    RolloutCorrection,
    correction_metrics,
    rollout_correction,
)
from .value import ValueLoss, explained_variance, value_loss
from .whitening import whiten

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "REJECTION_KINDS",
    "AdaptiveKlController",
    "CorrectionRule",
    "Estimator",
    "FixedKlController",
    "GroupBuffer",
    "Loss",
    "NonFiniteInputError",
    "PolicyLoss",
    "RolloutCorrection",
    "ValueLoss",
    "aggregate",
    "apply_kl_in_reward",
    "correction_metrics",
    "explained_variance",
    "full_kl",
    "grpo",
    "has_signal",
    "kl_penalty",
    "lookup",
    "overlong_penalty",
    "ppo_clip",
    "rollout_correction",
    "value_loss",
    "whiten",
]
