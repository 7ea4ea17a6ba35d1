"""Reward functions: found by import path or file, called on one Sample, their result checked.

Invariant: a result that is no finite number, and an exception, is an error with the sample's uid; it is never
turned into 0. Functions are named, never pickled: each process loads its own.
"""

import math
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..errors import RewardError
from ..types import Prompt, Sample
from .loading import LoadedReward, load_reward

__all__ = ["LoadedReward", "check_reward", "load_reward", "score_sample"]

Reward = Callable[[Sample], float | dict[str, float]]

SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 120


def score_sample(reward: Reward, sample: Sample) -> dict[str, float]:
    """The reward's components, `score` among them: what is trained on.

    A plain number is `{"score": number}`. bool, int, float and NumPy scalars are numbers.
    Raises RewardError naming function, uid and value: the function raised, or its result or a component is None,
    NaN, infinite, text, a list or anything else; or a dict has no `score`.
    """
    name = _name(reward)
    with _UserCode(name, sample):
        result = reward(sample)
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(
                f"Reward {name} on {sample.prompt.uid} returned {SHOWN.repr(dict(result))} without 'score'. "
                f"Put the number to train on under the key 'score'."
            )
        return {str(key): _number(value, f"{name}[{key!r}]", sample) for key, value in result.items()}
    return {"score": _number(result, name, sample)}


def check_reward(reward: Reward, prompts: Sequence[Prompt]) -> None:
    """Score an empty response to the first prompt of each source, to find a broken reward before anything starts.

    Raises RewardError as `score_sample` does, for example where the function reads a column that a source lacks.
    """
    first = {prompt.source: prompt for prompt in reversed(prompts)}
    for prompt in reversed(first.values()):
        score_sample(reward, Sample(prompt=prompt, response="", finish_reason="stop", response_tokens=0))


class _UserCode:
    """Turns what a reward function raises into a RewardError with the user's own traceback.

    SystemExit is caught too: a reward that calls `exit()` must not end the worker as if all were well.
    """

    def __init__(self, name: str, sample: Sample) -> None:
        self.name = name
        self.sample = sample

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(error, Exception | SystemExit):
            return
        # the first two frames are this module's and the loaded reward's
        text = "".join(traceback.format_exception(error.with_traceback(tb.tb_next if tb else None), limit=-8))
        columns = ", ".join(map(repr, self.sample.prompt.extra)) or "none"
        raise RewardError(
            f"Reward {self.name} raised {type(error).__name__} on {self.sample.prompt.uid}: {error}\n"
            f"Columns in sample.prompt.extra: {columns}\n{text}"
        ) from error


def _number(value: Any, what: str, sample: Sample) -> float:
    plain = value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value
    if isinstance(plain, bool | int | float):
        try:
            number = float(plain)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise RewardError(
        f"Reward {what} on {sample.prompt.uid} returned {SHOWN.repr(value)} ({type(value).__name__}); "
        f"return one finite number, or a dict of numbers with the key 'score'."
    )


def _name(reward: Reward) -> str:
    if isinstance(reward, LoadedReward):
        return reward.spec
    return f"{getattr(reward, '__module__', '?')}:{getattr(reward, '__qualname__', type(reward).__qualname__)}"
