"""Running the user's reward functions: in processes that may hang, crash or be killed without harm to a run."""

from .pool import RewardPool
from .stream import Arrivals, Finished, RewardStream

__all__ = ["Arrivals", "Finished", "RewardPool", "RewardStream"]
