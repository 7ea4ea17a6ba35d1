"""Rewards: user functions in their several forms, and the built-in ones, graded sample by sample.

Invariant: a result that is no finite number, and an exception, is an error with the sample's uid; it is never
turned into 0. Functions are named, never pickled: each process loads its own.
"""

from .contracts import Contract
from .graded import Graded
from .loading import LoadedReward, load_reward, reward_of
from .reward_set import RewardSet, WeightedReward, load_rewards

__all__ = [
    "Contract",
    "Graded",
    "LoadedReward",
    "RewardSet",
    "WeightedReward",
    "load_reward",
    "load_rewards",
    "reward_of",
]
