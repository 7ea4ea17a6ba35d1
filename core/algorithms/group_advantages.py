"""Advantages measured against the other samples of the same prompt: every estimator with groups except GRPO itself.

Arguments, results, errors, missing rewards and the one rule for groups without signal (all sums equal, or one valid
sample: exactly 0) are those of `advantage`. `s` is the sum of a sequence's token rewards inside the mask, `n` the
number of valid samples of its group. Statistics are float64. Where nothing else is said, what one group gets depends
on no other group, so whole groups may be spread over data-parallel ranks.
`B` is the number of sequences, `T` the padded response width in tokens, `G` the number of groups.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from .advantage import GroupStatistics, group_statistics, normalised, row_values, sequence_scores, spread, valid_rows
from .checks import check_number, check_rows, check_shapes
from .whitening import whiten


def grpo_passk(
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pass@k: the best sample of a group gets what it adds to the group's best, all others 0 (arXiv 2503.19595).

    The best gets `(largest - second largest) / (std + epsilon)`, std with ddof 1, or the difference alone with
    `norm_by_std=False`. Two that share the first place add nothing: both get 0. Groups of one give 0.

    Example: rewards 3, 1, 2 in one group give 1, 0, 0 (their std is 1, up to epsilon).
    """
    check_number("epsilon", epsilon)
    scores, valid = sequence_scores(token_rewards, response_mask, groups, valid)
    group = group_statistics(scores, groups, valid)
    is_best = valid & (scores == group.largest)
    others = valid & ~is_best
    second_G = torch.zeros_like(scores).scatter_reduce(
        0, group.index[others], scores[others], "amax", include_self=False
    )
    alone = _sum_by_group(is_best.double(), group) == 1
    advantages = scores - second_G[group.index]
    if norm_by_std:
        advantages = advantages / (group.std + epsilon)
    advantages = torch.where(is_best & alone & group.has_signal, advantages, 0.0)
    return spread(advantages, token_rewards, response_mask)


def rloo(
    token_rewards: Tensor, response_mask: Tensor, groups: Tensor, *, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Leave-one-out: `s` less the mean of the other samples, `n / (n - 1) · (s - mean)` (arXiv 2402.14740, §2).

    No epsilon and no std. Groups of one give 0: there is nobody else to be measured against.

    Example: rewards 1, 0, 0, 0 in one group give 1, -1/3, -1/3, -1/3.
    """
    scores, valid = sequence_scores(token_rewards, response_mask, groups, valid)
    group = group_statistics(scores, groups, valid)
    factor = group.count / (group.count - 1).clamp(min=1)
    advantages = torch.where(valid & group.has_signal, factor * (scores - group.mean), 0.0)
    return spread(advantages, token_rewards, response_mask)


def opo(
    token_rewards: Tensor, response_mask: Tensor, groups: Tensor, *, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """OPO: `s` less the group's mean reward weighted by length, `s - Σ(length · s) / Σ length` (arXiv 2505.23585).

    The length is the number of response tokens. No epsilon and no std. Groups of one give 0.

    Example: rewards 1, 0 of lengths 1, 3 have the baseline 1/4 and get 0.75, -0.25.
    """
    scores, valid = sequence_scores(token_rewards, response_mask, groups, valid)
    group = group_statistics(scores, groups, valid)
    lengths = response_mask.sum(dim=1).double().masked_fill(~valid, 0.0)
    # a group without a token has no baseline, nor a place where its advantages could stand
    baseline = _sum_by_group(lengths * scores, group) / _sum_by_group(lengths, group).clamp(min=1)
    advantages = torch.where(valid & group.has_signal, scores - baseline, 0.0)
    return spread(advantages, token_rewards, response_mask)


def gpg(
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    *,
    f_norm: float = 1.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Group policy gradient: `α · (s - mean) / f_norm` (arXiv 2504.02546).

    `α = B / max(number of samples with s != 0, 1)` over the valid samples of the whole batch, so a batch must not be
    split before. It makes up for samples that teach nothing as long as a failed sample scores exactly 0: with other
    scores of a failure, such as -1, α is nearer to 1 than the share of samples without signal would make it.
    `f_norm` > 0. No std, no epsilon. Groups of one give 0.

    Example: rewards 1, 0 and 0, 0 in two groups have α = 4 and give 2, -2 and 0, 0.
    """
    check_number("f_norm", f_norm, more_than=0)
    scores, valid = sequence_scores(token_rewards, response_mask, groups, valid)
    group = group_statistics(scores, groups, valid)
    alpha = valid.sum(dtype=torch.float64) / torch.count_nonzero(scores).clamp(min=1)
    advantages = torch.where(valid & group.has_signal, alpha * (scores - group.mean) / f_norm, 0.0)
    return spread(advantages, token_rewards, response_mask)


def reinforce_plus_plus_baseline(
    token_rewards: Tensor, response_mask: Tensor, groups: Tensor, *, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline: `whiten(s - mean)` over the batch's tokens (arXiv 2501.03262).

    Whitening (ddof 1, epsilon 1e-8 inside the root) is over the response tokens of all valid samples, so a batch must
    not be split before; those of groups without signal, and of groups of one, count there with 0. Afterwards such a
    group gets exactly 0: the mean of the batch, taken off, would push it although nothing told its samples apart.

    Example: rewards 1, 0 in one group, one token each, give 0.707107, -0.707107.
    """
    scores, valid = sequence_scores(token_rewards, response_mask, groups, valid)
    group = group_statistics(scores, groups, valid)
    advantages = normalised(scores, group, valid, norm_by_std=False, epsilon=0.0)
    return _whitened(advantages, token_rewards, response_mask, valid, group.has_signal)


def gdpo(  # noqa: PLR0913 (the three tensors of every estimator, and four options by name)
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    *,
    reward_components: Mapping[str, Tensor],
    weights: Mapping[str, float] | None = None,
    epsilon: float = 1e-6,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GDPO: each reward normalised within its group by itself, then `whiten(Σ weight · normalised)` (arXiv 2601.05242).

    Normalised is GRPO's `(r - mean) / (std + epsilon)`, ddof 1. Whitening as in `reinforce_plus_plus_baseline`; a
    group in which no component of a weight other than 0 tells the samples apart gets exactly 0, as do groups of one.
    The values of `token_rewards` are not read, only shape and type: a KL in the reward does not reach these advantages.

    Args:
        reward_components: name to `[B]`, float32 or float64; at least one.
        weights: name to any finite number, for exactly the names of `reward_components`; None means 1 each.

    Raises:
        ConfigError: no component, or weights for other names; and what the module says.
    """
    check_number("epsilon", epsilon)
    check_shapes(response_mask, token_rewards=token_rewards)
    check_rows(len(response_mask), torch.int64, groups=groups)
    valid = valid_rows(response_mask, valid)
    weights = _checked_weights(reward_components, weights)
    total = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    has_signal = torch.zeros_like(valid)
    for name, component in reward_components.items():
        scores = row_values(f"reward_components[{name!r}]", component, valid)
        group = group_statistics(scores, groups, valid)
        total = total + weights[name] * normalised(scores, group, valid, norm_by_std=True, epsilon=epsilon)
        if weights[name] != 0:
            has_signal = has_signal | group.has_signal
    return _whitened(total, token_rewards, response_mask, valid, has_signal)


def _sum_by_group(values: Tensor, group: GroupStatistics) -> Tensor:
    """The sum over each row's group, read at the row; `[B]` float64."""
    return torch.zeros_like(values).index_add(0, group.index, values)[group.index]


def _whitened(
    advantages: Tensor, token_rewards: Tensor, response_mask: Tensor, valid: Tensor, has_signal: Tensor
) -> tuple[Tensor, Tensor]:
    counted = response_mask & valid[:, None]
    per_token = whiten(advantages[:, None].expand(response_mask.shape), counted)
    per_token = per_token.masked_fill(~(has_signal & valid)[:, None], 0.0).to(token_rewards.dtype)
    return per_token, per_token.clone()


def _checked_weights(components: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> Mapping[str, float]:
    if not components:
        raise ConfigError("reward_components is empty; gdpo needs at least one reward by name.")
    if weights is None:
        return dict.fromkeys(components, 1.0)
    if set(weights) != set(components):
        raise ConfigError(
            f"weights names {', '.join(sorted(weights)) or 'nothing'}; it must name each of reward_components and no "
            f"other: {', '.join(sorted(components))}."
        )
    for name, weight in weights.items():
        check_number(f"weights[{name!r}]", weight, at_least=-math.inf)
    return weights
