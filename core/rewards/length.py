"""Rewards for the length of a response, in tokens.

DAPO's soft limit (arXiv 2503.14476, eq. 13) is no reward function but `reward.overlong_buffer`: it is taken from the
score whatever the rewards are.
"""

from ..errors import RewardError
from ..types import Sample


def length_reward(sample: Sample, *, min_tokens: int = 0, max_tokens: int | None = None, falloff: int = 0) -> float:
    """1 inside of [min_tokens, max_tokens], falling linearly to 0 at `falloff` tokens outside of it.

    Example: max_tokens 100 and falloff 50 give 1 at 100 tokens, 0.5 at 125, 0 from 150 on. `max_tokens` None: no
    bound. Raises RewardError on bounds that contradict each other.
    """
    if min_tokens < 0 or falloff < 0 or (max_tokens is not None and max_tokens < min_tokens):
        raise RewardError(
            f"length_reward has min_tokens={min_tokens}, max_tokens={max_tokens}, falloff={falloff}; "
            f"they must be 0 or more, and max_tokens at least min_tokens."
        )
    tokens = sample.response_tokens
    outside = max(min_tokens - tokens, 0 if max_tokens is None else tokens - max_tokens, 0)
    if outside == 0:
        return 1.0
    return max(0.0, 1.0 - outside / falloff) if falloff else 0.0


def finished_reward(sample: Sample) -> float:
    """1.0 where the response ended by itself, 0.0 where the limit of length cut it off."""
    return float(sample.finish_reason == "stop")
