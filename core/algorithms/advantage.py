"""GRPO's advantages, and what every estimator asks and gives: how much better a response was than expected.

Every estimator is called `f(token_rewards, response_mask, groups, *, valid=None, …)` with
- `token_rewards` `[B, T]`, float32 or float64; `response_mask` `[B, T]` bool, true at response tokens;
- `groups` `[B]` int64: rows with the same number are samples of the same prompt row (by uid, never by text), and the
  numbers need not be dense or sorted; an estimator that has no groups takes None and reads nothing of it;
- `valid` `[B]` bool, or None when no reward is missing: a sample whose reward is missing (it may be NaN) is left out of
  every statistic and gets 0;
and returns advantages and returns, `[B, T]` in the type of `token_rewards`, without gradient, computed in float64.
It is blind to what lies outside the response mask, and gives exactly 0 there; it changes no argument. It raises
- ValueError: wrong shape, type or device;
- NonFiniteInputError: a number of a valid sample is NaN or infinite inside the mask;
- ConfigError: an option out of its bound.

One rule for all that use groups: a group whose sums of rewards are all equal has no signal and gets exactly 0, and so
does a group with one valid sample, which has no baseline to be measured against. The test is max == min: the float
mean of equal numbers can be one ulp off, and dividing that by an epsilon makes a signal out of nothing.
A sequence without response tokens has the sum 0 and counts; pass `valid=False` to leave it out.
`B` is the number of sequences, `T` the padded response width in tokens, `G` the number of groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_finite, check_number, check_rows, check_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Of each row's own group over its valid rows, read at the row; all `[B]`."""

    mean: Tensor
    """float64."""
    std: Tensor
    """float64, ddof 1; 0 in a group of one."""
    largest: Tensor
    """float64; 0 in a group without a valid row."""
    has_signal: Tensor
    """bool: not all equal."""
    count: Tensor
    """float64: valid rows."""
    index: Tensor
    """int64: number of the group, 0 ≤ index < num_groups ≤ B."""


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
    the sample's own (ddof 1), epsilon (>= 0) stands outside the root. Equal sums, and groups of one, give exactly 0.
    Arguments, results, errors: see the module.

    Example: rewards 1, 0, 0, 0 in one group give 1.5, -0.5, -0.5, -0.5; without the std 0.75, -0.25, -0.25, -0.25.
    """
    check_number("epsilon", epsilon)
    scores, valid = sequence_scores(token_rewards, response_mask, groups, valid)
    advantages = normalised(scores, group_statistics(scores, groups, valid), valid, norm_by_std, epsilon)
    return spread(advantages, token_rewards, response_mask)


def sequence_scores(
    token_rewards: Tensor, response_mask: Tensor, groups: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum of each valid sequence's rewards inside the mask `[B]` float64 (0 for the others), and `valid` `[B]` bool.

    Raises:
        ValueError, NonFiniteInputError: as in the module's docstring.
    """
    check_rows(len(response_mask), torch.int64, groups=groups)
    rewards, valid = counted_rewards(token_rewards, response_mask, valid)
    return rewards.sum(dim=1), valid


def counted_rewards(token_rewards: Tensor, response_mask: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards `[B, T]` float64, 0 outside the mask and in rows that are not valid, and `valid` `[B]` bool.

    Raises:
        ValueError, NonFiniteInputError: as in the module's docstring.
    """
    check_shapes(response_mask, token_rewards=token_rewards)
    valid = valid_rows(response_mask, valid)
    counted = response_mask & valid[:, None]
    check_finite(counted, token_rewards=token_rewards)
    return token_rewards.detach().double().masked_fill(~counted, 0.0), valid


def valid_rows(response_mask: Tensor, valid: Tensor | None) -> Tensor:
    """`valid`, or all true where it is None; raises ValueError unless it is `[B]` bool."""
    if valid is None:
        return torch.ones(len(response_mask), dtype=torch.bool, device=response_mask.device)
    check_rows(len(response_mask), torch.bool, valid=valid)
    return valid


def row_values(argument: str, values: Tensor, valid: Tensor) -> Tensor:
    """One number a sequence, `[B]` float64, 0 where the sequence is not valid.

    Raises:
        ValueError: `values`, called `argument`, is not `[B]` float32 or float64.
        NonFiniteInputError: it is NaN or infinite at a valid row.
    """
    if values.dim() != 1:
        raise ValueError(f"{argument} has the shape {list(values.shape)}; it must be [B] = [{len(valid)}].")
    check_shapes(valid[:, None], mask_name="valid", **{argument: values[:, None]})
    check_finite(valid[:, None], **{argument: values[:, None]})
    return values.detach().double().masked_fill(~valid, 0.0)


def normalised(scores: Tensor, group: GroupStatistics, valid: Tensor, norm_by_std: bool, epsilon: float) -> Tensor:
    """Scores `[B]` less the mean of their group, over its std + epsilon if asked; 0 without signal or reward."""
    advantages = scores - group.mean
    if norm_by_std:
        advantages = advantages / (group.std + epsilon)
    return torch.where(valid & group.has_signal, advantages, 0.0)  # also drops the 0 / 0 of epsilon = 0


def spread(advantages: Tensor, token_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """One advantage a sequence `[B]` at each of its response tokens, as advantages and as returns `[B, T]`."""
    per_token = torch.where(response_mask, advantages[:, None], 0.0).to(token_rewards.dtype)
    return per_token, per_token.clone()


def group_statistics(scores: Tensor, groups: Tensor, valid: Tensor) -> GroupStatistics:
    """Mean, standard deviation, largest, "not all equal" and size of each row's group over its valid rows.

    `scores` `[B]` float64, `groups` `[B]` int64, `valid` `[B]` bool. Two passes: the squares are those of centred
    values, so that rewards far from zero keep their digits.
    """
    _, index_B = torch.unique(groups, return_inverse=True)
    # Room for as many groups as rows: their true number would have to be waited for on the device.
    index_V, scores_V = index_B[valid], scores[valid]
    zeros_G = torch.zeros_like(scores)

    count_G = zeros_G.index_add(0, index_V, torch.ones_like(scores_V))
    mean_G = zeros_G.index_add(0, index_V, scores_V) / count_G.clamp(min=1)
    squares_G = zeros_G.index_add(0, index_V, (scores_V - mean_G[index_V]).square())
    std_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    largest_G = zeros_G.scatter_reduce(0, index_V, scores_V, "amax", include_self=False)
    smallest_G = zeros_G.scatter_reduce(0, index_V, scores_V, "amin", include_self=False)
    return GroupStatistics(
        mean=mean_G[index_B],
        std=std_G[index_B],
        largest=largest_G[index_B],
        has_signal=(largest_G != smallest_G)[index_B],
        count=count_G[index_B],
        index=index_B,
    )
