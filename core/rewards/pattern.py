"""Rewards for the form of a response: a regular expression, or tags in their order."""

import re
from functools import lru_cache
from typing import Literal

from ..errors import RewardError
from ..types import Sample


def regex_reward(sample: Sample, *, pattern: str, mode: Literal["search", "fullmatch"] = "search") -> float:
    """1.0 where the pattern is found in the response (search) or is all of it (fullmatch, ends stripped), else 0.0.

    The dot stands for line breaks too; `(?i)` at the start ignores case. Raises RewardError: no regular expression, or
    another mode.
    """
    compiled = _compiled(pattern)
    if mode == "search":
        return float(compiled.search(sample.response) is not None)
    if mode == "fullmatch":
        return float(compiled.fullmatch(sample.response.strip()) is not None)
    raise RewardError(f"reward.kwargs.mode is {mode!r}; use search or fullmatch.")


def format_reward(sample: Sample, *, tags: tuple[str, ...] | list[str] = ("think", "answer")) -> float:
    """1.0 where the response is `<think>…</think><answer>…</answer>` and no more, white space aside, else 0.0.

    `tags`: names in their order. Each must open and close once and hold something that is not white space.
    """
    response = sample.response.strip()
    place = 0
    for tag in tags:
        opening, end = f"<{tag}>", f"</{tag}>"
        if response.count(opening) != 1 or response.count(end) != 1 or not response.startswith(opening, place):
            return 0.0
        closes = response.find(end, place)
        if not response[place + len(opening) : max(closes, 0)].strip():
            return 0.0
        place = closes + len(end)
        while response[place : place + 1].isspace():
            place += 1
    return float(place == len(response))


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"reward.kwargs.pattern {pattern!r} is no regular expression: {error}.") from error
