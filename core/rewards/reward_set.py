"""The rewards of a run, called on samples; one sample's error is its own."""

from collections.abc import Sequence

from ..config.schema import RewardSection
from ..errors import RewardError
from ..types import Sample
from . import score_sample
from .graded import Graded
from .loading import LoadedReward, load_reward


class RewardSet:
    """What grades samples in a process; made by `load_rewards`."""

    batched = False
    """whether the function takes all samples in one call"""

    def __init__(self, reward: LoadedReward) -> None:
        self._reward = reward

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        """One result a sample, in order; an exception or a result that is no reward is that sample's error."""
        return [self._graded(sample) for sample in samples]

    def _graded(self, sample: Sample) -> Graded:
        try:
            return Graded(components=score_sample(self._reward, sample), error=None)
        except RewardError as error:
            return Graded(components=None, error=str(error))


def load_rewards(reward: RewardSection) -> RewardSet:
    """The rewards that a configuration names; raises RewardError as `load_reward` does."""
    return RewardSet(load_reward(reward.function, reward.kwargs))
