"""Advantage estimators: how much better a response was than what its prompt usually earns.

Every estimator is blind to what lies outside the response mask, and gives exactly 0 there.
`B` is the number of sequences, `T` the padded response width in tokens, `G` the number of groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_finite, check_number, check_rows, check_shapes


class _GroupStatistics(NamedTuple):
    """Of each row's own group, read at the row; all `[B]`."""

    mean: Tensor
    std: Tensor
    has_signal: Tensor


def grpo(
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages: GRPO (arXiv 2402.03300, §4.1.2), or Dr. GRPO (arXiv 2503.20783, §3.2) without the std.

    With `s` the sum of a sequence's token rewards inside the mask, every response token of the sequence gets
    `(s - mean) / (std + epsilon)` over its group, or `s - mean` with `norm_by_std=False`. The standard deviation is
    the sample's own (ddof 1), epsilon stands outside the root, and the statistics are float64 whatever comes in.
    - A group whose sums are all equal gets exactly 0: the test is max == min, because the float mean of equal
      numbers can be one ulp off, and dividing that by epsilon makes a signal out of nothing.
    - A group with one valid sample has no baseline, so it gets exactly 0, with and without the std.
    - A sample with `valid=False` (its reward is missing; it may be NaN) is left out of mean and std and gets 0.
    - A sequence without response tokens has `s = 0` and counts; pass `valid=False` to leave it out.

    Example: rewards 1, 0, 0, 0 in one group give 1.5, -0.5, -0.5, -0.5; without the std 0.75, -0.25, -0.25, -0.25.

    Args:
        token_rewards: `[B, T]`, float32 or float64.
        response_mask: `[B, T]` bool, true at response tokens.
        groups: `[B]` int64; rows with the same number are samples of the same prompt row (by uid, never by text).
            The numbers need not be dense or sorted.
        norm_by_std: divide by the group's standard deviation.
        epsilon: added to it, >= 0.
        valid: `[B]` bool, or None when no reward is missing.

    Returns:
        Advantages and returns, `[B, T]` in the type of `token_rewards`, equal to each other and without gradient.

    Raises:
        ValueError: wrong shape, type or device.
        NonFiniteInputError: a reward of a valid sample is NaN or infinite inside the mask.
        ConfigError: `epsilon` is negative or not finite.
    """
    check_number("epsilon", epsilon)
    check_shapes(response_mask, token_rewards=token_rewards)
    check_rows(len(response_mask), torch.int64, groups=groups)
    if valid is None:
        valid = torch.ones(len(response_mask), dtype=torch.bool, device=response_mask.device)
    check_rows(len(response_mask), torch.bool, valid=valid)
    counted = response_mask & valid[:, None]
    check_finite(counted, token_rewards=token_rewards)

    scores = token_rewards.detach().double().masked_fill(~counted, 0.0).sum(dim=1)
    group = _group_statistics(scores, groups, valid)
    advantages = scores - group.mean
    if norm_by_std:
        advantages = advantages / (group.std + epsilon)
    advantages = torch.where(valid & group.has_signal, advantages, 0.0)  # also drops the 0 / 0 of epsilon = 0
    per_token = torch.where(response_mask, advantages[:, None], 0.0).to(token_rewards.dtype)
    return per_token, per_token.clone()


def _group_statistics(scores: Tensor, groups: Tensor, valid: Tensor) -> _GroupStatistics:
    """Mean, standard deviation (ddof 1) and "not all equal" of each row's group over its valid rows.

    `scores` `[B]` float64, `groups` `[B]` int64, `valid` `[B]` bool. Two passes: the squares are those of centred
    values, so that rewards far from zero keep their digits.
    """
    _, index_B = torch.unique(groups, return_inverse=True)
    num_groups = int(index_B.max()) + 1 if len(index_B) else 0
    index_V, scores_V = index_B[valid], scores[valid]
    zeros_G = scores.new_zeros(num_groups)

    count_G = zeros_G.index_add(0, index_V, torch.ones_like(scores_V))
    mean_G = zeros_G.index_add(0, index_V, scores_V) / count_G.clamp(min=1)
    squares_G = zeros_G.index_add(0, index_V, (scores_V - mean_G[index_V]).square())
    std_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    largest_G = zeros_G.scatter_reduce(0, index_V, scores_V, "amax", include_self=False)
    smallest_G = zeros_G.scatter_reduce(0, index_V, scores_V, "amin", include_self=False)
    return _GroupStatistics(mean_G[index_B], std_G[index_B], (largest_G != smallest_G)[index_B])


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"grpo": grpo}
"""By the name in `algorithm.adv_estimator`."""
