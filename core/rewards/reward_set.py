"""The rewards of a run, called on samples; one sample's error is its own."""

import inspect
from collections.abc import Sequence
from typing import Any

from ..config.schema import RewardSection
from ..errors import RewardError
from ..types import Sample
from . import score_sample
from .graded import Graded
from .loading import LoadedReward, load_reward


class RewardSet:
    """What grades samples in a process; made by `load_rewards`."""

    def __init__(self, reward: LoadedReward) -> None:
        self._reward = reward

    @property
    def batched(self) -> bool:
        """Whether the function takes all samples in one call, as `f(completions, …)`."""
        return "completions" in inspect.signature(self._reward.function).parameters

    @property
    def concurrency(self) -> int:
        """How many samples one call of `grade` works on at the same time."""
        return 1

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        """One result a sample, in order; an exception or a result that is no reward is that sample's error."""
        if not self.batched:
            return [_graded(self._reward, sample) for sample in samples]
        values: Any = self._reward.function(completions=[each.response for each in samples], **self._reward.kwargs)
        return [_graded(lambda _, value=value: value, sample) for sample, value in zip(samples, values, strict=True)]


def _graded(reward: object, sample: Sample) -> Graded:
    try:
        return Graded(components=score_sample(reward, sample), error=None)  # pyright: ignore[reportArgumentType]
    except RewardError as error:
        return Graded(components=None, error=str(error))


def load_rewards(reward: RewardSection) -> RewardSet:
    """The rewards that a configuration names; raises RewardError as `load_reward` does."""
    return RewardSet(load_reward(reward.function, reward.kwargs))
