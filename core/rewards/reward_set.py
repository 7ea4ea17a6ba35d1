"""The rewards that a config names, as one: each sample's weighted score and components, or its error.

Invariant: one Graded a sample, in order; a sample with an error has no score, and no other sample changes by it.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.schema import RewardFunctionSection, RewardSection
from ..errors import RewardContractError, RewardError
from ..types import Prompt, Sample
from .calling import CONCURRENT, Outcome, UserCode, outcomes
from .contracts import Contract, columns_of, missing_columns
from .graded import Graded
from .loading import LoadedReward, load_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One reward of a set."""

    reward: LoadedReward
    weight: float = 1.0
    name: str | None = None
    """of its component; None for a reward that stands alone and names its components itself"""


class RewardSet:
    """Grades samples with one reward or with several."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self.rewards = tuple(rewards)

    @property
    def batched(self) -> bool:
        """Some reward grades all samples of a call together: when it raises, all of them have its error."""
        return any(each.reward.contract.batched for each in self.rewards)

    @property
    def concurrency(self) -> int:
        """How many samples one call of `grade` works on at the same time: more than one where every reward is async."""
        functions = [each.reward.function for each in self.rewards]
        waits = [inspect.iscoroutinefunction(each) or inspect.iscoroutinefunction(_called(each)) for each in functions]
        return CONCURRENT if all(waits) else 1

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        """One result a sample, in order; nothing that a reward does raises here, short of KeyboardInterrupt."""
        may_abstain = len(self.rewards) > 1
        columns = [outcomes(each.reward, samples, may_abstain=may_abstain) for each in self.rewards]
        return [self._combined(sample, row) for sample, row in zip(samples, zip(*columns, strict=True), strict=True)]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Grade empty responses to the first prompt of each source, to find a broken reward before anything starts.

        A reward with a method `check_setup(prompts, **kwargs)` is asked by that instead: one that is dear to load.
        Raises RewardError: as `grade` would give it, or a TRL reward that names a column which a source lacks, with
        the list of columns.
        """
        by_source: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_source.setdefault(prompt.source, []).append(prompt)
        for source, rows in by_source.items():
            for each in self.rewards:
                _check_reward(each.reward, source, rows, may_abstain=len(self.rewards) > 1)

    def _combined(self, sample: Sample, row: Sequence[Outcome]) -> Graded:
        """score = Σ weight · value over the rewards that apply."""
        for outcome in row:
            if isinstance(outcome, RewardError):
                return _failed(outcome)
        if all(outcome is None for outcome in row):
            names = ", ".join(each.reward.spec for each in self.rewards)
            return _failed(RewardContractError(f"No reward applies to {sample.prompt.uid}: {names} all returned None."))
        found = {"score": 0.0}
        for each, outcome in zip(self.rewards, row, strict=True):
            if isinstance(outcome, dict):
                found |= _named(each, outcome)
                found["score"] += each.weight * outcome["score"]
        if not math.isfinite(found["score"]):
            return _failed(
                RewardContractError(f"The weighted sum of the rewards of {sample.prompt.uid} is not finite.")
            )
        return Graded(found, None)


def load_rewards(reward: RewardSection) -> RewardSet:
    """The rewards of a config.

    Raises RewardError: as `load_reward`, `reward.functions` beside `reward.function`, or two of one name.
    """
    if not reward.functions:
        return RewardSet([WeightedReward(reward=load_reward(reward.function, reward.kwargs, reward.contract))])
    defaults = RewardSection.model_fields
    for key, value in {"function": reward.function, "kwargs": reward.kwargs, "contract": reward.contract}.items():
        if value != defaults[key].default:
            raise RewardError(
                f"reward.{key} and reward.functions are both given; put the reward into reward.functions alone."
            )
    loaded = [_load_one(position, section) for position, section in enumerate(reward.functions)]
    names = [each.name for each in loaded]
    for position, name in enumerate(names):
        if name == "score" or name in names[:position]:
            raise RewardError(
                f"reward.functions[{position}]: its metric would be called {name!r}, which is taken; give it a name."
            )
    return RewardSet(loaded)


def _load_one(position: int, section: RewardFunctionSection) -> WeightedReward:
    try:
        loaded = load_reward(section.function, section.kwargs, section.contract)
    except RewardError as error:
        raise RewardError(f"reward.functions[{position}]: {error}") from error
    return WeightedReward(reward=loaded, weight=section.weight, name=section.name or loaded.own_name)


def _named(each: WeightedReward, outcome: Mapping[str, float]) -> dict[str, float]:
    """Its components as the set's: `format` and `format/length` for a reward called format."""
    if each.name is None:
        return {name: value for name, value in outcome.items() if name != "score"}
    return {each.name if name == "score" else f"{each.name}/{name}": value for name, value in outcome.items()}


def _called(function: Any) -> Any:
    """What runs when an object with a method `__call__` is called."""
    return getattr(function, "__call__", None)  # noqa: B004


def _failed(error: RewardError) -> Graded:
    return Graded(None, f"{type(error).__name__}: {error}")


def _check_reward(reward: LoadedReward, source: str, rows: Sequence[Prompt], *, may_abstain: bool) -> None:
    empty = Sample(prompt=rows[0], response="", finish_reason="stop", response_tokens=0)
    if reward.contract is Contract.TRL:
        missing = missing_columns(reward.signature, reward.kwargs, rows)
        if missing:
            raise RewardError(
                f"Reward {reward.spec} takes {', '.join(map(repr, missing))}, which the data from {source} lacks. "
                f"Columns: {', '.join(map(repr, columns_of(rows)))}. Rename the parameter or the column."
            )
    check_setup = getattr(reward.function, "check_setup", None)
    if callable(check_setup):
        with UserCode(reward.spec, [empty]):
            check_setup(rows, **reward.kwargs)
        return
    # two, so that a batched function that answers for one only is found
    found = outcomes(reward, [empty] * (2 if reward.contract.batched else 1), may_abstain=may_abstain)
    for outcome in found:
        if isinstance(outcome, RewardError):
            raise outcome
