"""Advantages, policy losses, KL estimators and loss aggregation: pure functions on tensors, found by name in dicts.

They know no config object and no process group, mutate no argument, and read nothing outside the mask.
"""

from .advantage import ADVANTAGE_ESTIMATORS, grpo
from .aggregate import LOSS_AGG_MODES, aggregate
from .checks import NonFiniteInputError, lookup
from .kl import KL_ESTIMATORS, apply_kl_in_reward, kl_penalty
from .loss import POLICY_LOSSES, PolicyLoss, ppo_clip

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "NonFiniteInputError",
    "PolicyLoss",
    "aggregate",
    "apply_kl_in_reward",
    "grpo",
    "kl_penalty",
    "lookup",
    "ppo_clip",
]
