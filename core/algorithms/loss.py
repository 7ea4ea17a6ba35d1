"""Policy losses: one number a token, whose gradient makes good tokens likelier; `aggregate` makes them one number.

Every exponent is clamped, so no log-ratio overflows; metrics are sums and counts, so adding those of the micro-batches
gives exactly those of the whole. `B` is the number of sequences, `T` the padded response width in tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_number, check_tokens

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What a policy loss gives back.

    Example: two response tokens of which one is clipped give `metrics["actor/pg_clipfrac"] == (1.0, 2.0)`; with
    (3.0, 8.0) of another micro-batch the fraction of both is 4 / 10, whatever the sizes.
    """

    token_losses: Tensor
    """`[B, T]`, 0 outside the mask."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """Name to (sum over response tokens, number of response tokens); float64 scalars on the loss's device, detached."""


def ppo_clip(  # noqa: PLR0913 (the four tensors of every policy loss, and PPO's three constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> PolicyLoss:
    """PPO's clip (arXiv 1707.06347, eq. 7) with clip-higher (2503.14476, eq. 10) and dual clip (1912.09729, eq. 5).

    With `r = exp(clamp(log_probs - old_log_probs, ±20))`, `A` the advantage and `l = max(-A r, -A clip(r, 1 - low,
    1 + high))`, a token's loss is `l`, and `min(l, -A c)` where `A < 0`: one very unlikely old token cannot own the
    step. Where a clamp or a clip holds, the gradient is 0.

    Metrics: `actor/pg_clipfrac` (the clip raised the loss), `actor/pg_clipfrac_lower` (the dual clip lowered it),
    `actor/ppo_kl` (`old - new` log-prob in nats, clamped to ±20).

    Args:
        log_probs: `[B, T]`, float32 or float64, of the policy being trained, in nats; the gradient flows to it alone.
        old_log_probs: `[B, T]` of the policy before the step's first update. Exactly on policy: `log_probs` itself.
        advantages: `[B, T]`.
        response_mask: `[B, T]` bool; what lies outside is never read.
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.
        clip_ratio_c: > 1, the most that a bad token's loss can be, times its advantage.

    Raises:
        ConfigError: a clip ratio out of its bound.
        ValueError: wrong shape, type or device.
        NonFiniteInputError: an input inside the mask is NaN or infinite.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    check_number("clip_ratio_c", clip_ratio_c, more_than=1)
    check_tokens(response_mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    outside = ~response_mask
    # Filled before the arithmetic: the derivative at a NaN outside the mask would be NaN even times 0.
    advantage = advantages.detach().masked_fill(outside, 0.0)
    log_ratio = (log_probs - old_log_probs.detach()).masked_fill(outside, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)

    ratio = log_ratio.exp()
    free = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic = torch.maximum(free, clipped)
    ceiling = -advantage * clip_ratio_c
    hits_ceiling = (advantage < 0) & (pessimistic > ceiling)
    token_losses = torch.where(hits_ceiling, ceiling, pessimistic).masked_fill(outside, 0.0)

    count = response_mask.sum(dtype=torch.float64)
    sums = {
        "actor/pg_clipfrac": clipped > free,
        "actor/pg_clipfrac_lower": hits_ceiling,
        "actor/ppo_kl": -log_ratio.detach(),
    }
    metrics = {name: (value.sum(dtype=torch.float64), count) for name, value in sums.items()}
    return PolicyLoss(token_losses=token_losses, metrics=metrics)


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {"vanilla": ppo_clip}
"""By the name in `actor.policy_loss.loss_mode`."""
