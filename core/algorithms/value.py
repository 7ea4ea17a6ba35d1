"""The critic's loss: how far its values are from the returns, and how much of them it explains.

Metrics of the loss are sums and counts, so adding those of the micro-batches gives exactly those of the whole.
`B` is the number of sequences, `T` the padded response width in tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_number, check_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """What the value loss gives back, shaped like a policy loss so that `aggregate` makes it one number.

    Example: two response tokens of which one is clipped give `metrics["critic/vf_clipfrac"] == (1.0, 2.0)`.
    """

    token_losses: Tensor
    """`[B, T]`, 0 outside the mask."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """Name to (sum over response tokens, number of response tokens); float64 scalars on the loss's device, detached."""


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float = 0.5,
) -> ValueLoss:
    """PPO's clipped value loss (arXiv 2005.12729, §3), `½ max((V - R)², (clip(V, V_old ± cliprange) - R)²)` a token.

    The larger of the two is the pessimistic one: a value that has moved further than the range, towards the return,
    has gradient 0; one that has moved away from it is pulled back.

    Metrics: `critic/vf_clipfrac` (the clip raised the loss), `critic/vpred_mean` (mean value).

    Example: V = 2, V_old = 0, R = 3, range 0.5: ½ max(1, 6.25) = 3.125, gradient 0.

    Args:
        values: `[B, T]`, float32 or float64, of the critic being trained; the gradient flows to it alone.
        old_values: `[B, T]` of the critic before the step's first update.
        returns: `[B, T]`, as the estimator `gae` gives them.
        response_mask: `[B, T]` bool; what lies outside is never read.
        cliprange_value: >= 0, in units of reward; a value far above any return clips nothing.

    Raises:
        ConfigError: `cliprange_value` is negative or not finite.
        ValueError: wrong shape, type or device.
        NonFiniteInputError: an input inside the mask is NaN or infinite.
    """
    check_number("cliprange_value", cliprange_value)
    check_tokens(response_mask, values=values, old_values=old_values, returns=returns)
    outside = ~response_mask
    # Filled before the arithmetic: the derivative at a NaN outside the mask would be NaN even times 0.
    value = values.masked_fill(outside, 0.0)
    old = old_values.detach().masked_fill(outside, 0.0)
    target = returns.detach().masked_fill(outside, 0.0)

    near = torch.minimum(torch.maximum(value, old - cliprange_value), old + cliprange_value)
    free, clipped = (value - target).square(), (near - target).square()
    # where, not maximum: at a tie torch gives each side half of the slope, and inside the range both are the same
    token_losses = 0.5 * torch.where(clipped > free, clipped, free)

    count = response_mask.sum(dtype=torch.float64)
    sums = {"critic/vf_clipfrac": clipped > free, "critic/vpred_mean": value.detach()}
    metrics = {name: (metric.sum(dtype=torch.float64), count) for name, metric in sums.items()}
    return ValueLoss(token_losses=token_losses, metrics=metrics)


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """`1 - Var(R - V) / Var(R)` over the response tokens of the whole batch, for `critic/vf_explained_var`.

    1 is a perfect critic, 0 one that is no better than a constant, below 0 one that is worse. Returns that are all
    equal (max == min), or none at all, leave nothing to explain: 0. The same ddof stands in both variances, so it does
    not matter; no epsilon. Shares of a batch do not add up to it: compute it before the batch is split.

    Example: returns 1, 2, 3 and values 1, 2, 2 give 1 - (2/9) / (6/9) = 2/3.

    Args:
        values: `[B, T]`, float32 or float64, of the critic before the update.
        returns: `[B, T]`.
        response_mask: `[B, T]` bool; what lies outside is never read.

    Returns:
        Scalar float64, without gradient.

    Raises:
        ValueError: wrong shape, type or device.
        NonFiniteInputError: an input inside the mask is NaN or infinite.
    """
    check_tokens(response_mask, values=values, returns=returns)
    target = returns.detach().double()[response_mask]
    if not target.numel() or bool(target.max() == target.min()):
        return torch.zeros((), dtype=torch.float64, device=returns.device)
    rest = target - values.detach().double()[response_mask]
    return 1 - rest.var(correction=0) / target.var(correction=0)
