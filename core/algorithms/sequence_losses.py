"""Policy losses whose ratio is one of the whole sequence: GSPO and GMPO.

Both are given token by token, and only their aggregation `seq-mean-token-mean` is the loss of the paper; the registry
forces it. A sequence's ratio is over its own tokens, so the split into micro-batches does not matter.
`B` is the number of sequences, `T` the padded response width in tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .checks import check_number
from .loss import PolicyLoss, clamped, policy_loss, policy_tokens


def gspo(  # noqa: PLR0913 (the tensors of every policy loss, and two constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Group sequence policy optimisation, in its form by token (arXiv 2507.18071, §4.3 with the ratio of eq. 7).

    With `s = exp(clamp(mean over the sequence's tokens of log_probs - old_log_probs, ±20))`, a token's loss is PPO's
    clip `max(-A s, -A clip(s, 1 - low, 1 + high))`. Its value is the sequence's; its gradient goes to the token's own
    log-prob, `-A s`, and is 0 where the clip or the clamp holds. There is no dual clip. With one advantage a sequence
    the mean over its tokens has value and gradient of the sequence's loss. The mean log-ratio is float64.

    Metrics: `actor/pg_clipfrac` (the clip raised the loss), `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        clip_ratio_low: >= 0; far smaller than PPO's, because the mean log-ratio of many tokens is small.
        clip_ratio_high: >= 0.

    Raises:
        ConfigError: a clip ratio out of its bound.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    mean_B = _token_means(tokens.log_probs.detach() - tokens.old_log_probs, response_mask)
    mean_BT = mean_B.to(log_probs.dtype)[:, None]
    # The sequence's value with the token's own gradient: the added difference is 0.
    ratio = clamped(mean_BT + (tokens.log_probs - tokens.log_probs.detach())).exp()
    free = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return policy_loss(tokens, torch.maximum(free, clipped), {"actor/pg_clipfrac": clipped > free})


def geo_mean(  # noqa: PLR0913 (the tensors of every policy loss, and two constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Geometric-mean policy optimisation, GMPO (arXiv 2507.20673).

    With `d = clamp(log_probs - old_log_probs, ±20)`, clipped in log space where the move is already in the advantage's
    direction (`min(d, high)` where `A > 0`, `max(d, -low)` where `A < 0`, 0 where `A = 0`), and `R` the exponential of
    its mean over the sequence's tokens, the sequence's loss is `-mean(A) R`. Every token of the sequence carries that
    same number, so that `seq-mean-token-mean` gives its mean over sequences, with the gradient of that mean; no other
    aggregation does. The means are float64.

    `weights` enter as the sequence's geometric mean `exp(mean(log w))`: one token of weight 0 silences its sequence.

    Metrics: `actor/pg_clipfrac` (tokens whose log-ratio was clipped), `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        clip_ratio_low: >= 0, in nats.
        clip_ratio_high: >= 0, in nats.

    Raises:
        ConfigError: a clip ratio out of its bound.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    log_ratio, advantage = tokens.log_ratio, tokens.advantages
    bounded = torch.where(advantage > 0, log_ratio.clamp(max=clip_ratio_high), log_ratio.clamp(min=-clip_ratio_low))
    bounded = torch.where(advantage == 0, 0.0, bounded)
    ratio_B = _token_means(bounded, response_mask).exp()
    losses_B = -_token_means(advantage, response_mask) * ratio_B
    if tokens.weights is not None:
        weights_B = _token_means(tokens.weights.log(), response_mask).exp()
        tokens = replace(tokens, weights=weights_B.to(log_probs.dtype)[:, None])
    clipped = (bounded != log_ratio) & (advantage != 0)
    spread = losses_B.to(log_probs.dtype)[:, None].expand_as(log_probs)
    return policy_loss(tokens, spread, {"actor/pg_clipfrac": clipped.detach()})


def _token_means(values: Tensor, mask: Tensor) -> Tensor:
    """`[B]` float64: the mean over each row's tokens, 0 for a row without any."""
    return values.masked_fill(~mask, 0.0).sum(dim=1, dtype=torch.float64) / mask.sum(dim=1).clamp(min=1)
