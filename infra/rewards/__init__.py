"""Running the user's reward functions: in processes that may hang, crash or be killed without harm to a run."""

from .pool import RewardPool

__all__ = ["RewardPool"]
