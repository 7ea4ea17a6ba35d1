"""Policy losses: one number a token, whose gradient makes good tokens likelier; `aggregate` makes them one number.

What all of them share (the border, the weights, the metrics), and PPO's own. Every exponent is clamped, so no log-ratio
overflows; metrics are sums and counts, so adding those of the micro-batches gives exactly those of the whole.
`B` is the number of sequences, `T` the padded response width in tokens.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The arguments of a policy loss behind the border: checked, and 0 outside the mask; all `[B, T]`."""

    log_probs: Tensor
    """Of the policy being trained, in nats; the only one with a gradient."""
    old_log_probs: Tensor
    advantages: Tensor
    log_ratio: Tensor
    """`clamped(log_probs - old_log_probs)`"""
    response_mask: Tensor
    weights: Tensor | None
    """Importance weights >= 0, or None where every token weighs 1."""


def clamped(exponent: Tensor) -> Tensor:
    """`exponent` within ±20, where `exp` is finite in float32; outside, the gradient is 0."""
    return exponent.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def policy_tokens(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, weights: Tensor | None
) -> PolicyTokens:
    """The border of every policy loss.

    Args:
        log_probs: `[B, T]`, float32 or float64, of the policy being trained, in nats; the gradient flows to it alone.
        old_log_probs: `[B, T]` of the policy before the step's first update. Exactly on policy: `log_probs` itself.
        advantages: `[B, T]`.
        response_mask: `[B, T]` bool; what lies outside is never read.
        weights: `[B, T]` importance weights >= 0 for the token losses, as from `rollout_correction`, or None.

    Raises:
        ValueError: wrong shape, type or device; a negative weight inside the mask.
        NonFiniteInputError: an input inside the mask is NaN or infinite.
    """
    check_tokens(response_mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    outside = ~response_mask
    if weights is not None:
        check_tokens(response_mask, weights=weights)
        weights = weights.detach().masked_fill(outside, 0.0)
        if bool((weights < 0).any()):
            raise ValueError(f"weights {list(weights.shape)} has {float(weights.min())}; an importance weight is >= 0.")
    # Filled before the arithmetic: the derivative at a NaN outside the mask would be NaN even times 0.
    new, old = log_probs.masked_fill(outside, 0.0), old_log_probs.detach().masked_fill(outside, 0.0)
    return PolicyTokens(
        log_probs=new,
        old_log_probs=old,
        advantages=advantages.detach().masked_fill(outside, 0.0),
        log_ratio=clamped(new - old),
        response_mask=response_mask,
        weights=weights,
    )


def policy_loss(tokens: PolicyTokens, token_losses: Tensor, flags: dict[str, Tensor]) -> PolicyLoss:
    """Weigh the token losses, and count: `flags` are metrics `[B, T]` by name, summed over the response tokens.

    Every loss has `actor/ppo_kl` beside its own: `old - new` log-prob in nats, clamped to ±20.
    """
    response_mask, log_ratio = tokens.response_mask, tokens.log_ratio
    if tokens.weights is not None:
        token_losses = token_losses * tokens.weights
    count = response_mask.sum(dtype=torch.float64)
    sums = flags | {"actor/ppo_kl": -log_ratio.detach()}
    return PolicyLoss(
        token_losses=token_losses.masked_fill(~response_mask, 0.0),
        metrics={
            name: (value.masked_fill(~response_mask, 0).sum(dtype=torch.float64), count) for name, value in sums.items()
        },
    )


def ppo_clip(  # noqa: PLR0913 (the tensors of every policy loss, and PPO's three constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clip (arXiv 1707.06347, eq. 7) with clip-higher (2503.14476, eq. 10) and dual clip (1912.09729, eq. 5).

    With `r = exp(clamp(log_probs - old_log_probs, ±20))`, `A` the advantage and `l = max(-A r, -A clip(r, 1 - low,
    1 + high))`, a token's loss is `l`, and `min(l, -A c)` where `A < 0`: one very unlikely old token cannot own the
    step. Where a clamp or a clip holds, the gradient is 0.

    Metrics: `actor/pg_clipfrac` (the clip raised the loss), `actor/pg_clipfrac_lower` (the dual clip lowered it), and
    `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.
        clip_ratio_c: > 1, the most that a bad token's loss can be, times its advantage.

    Raises:
        ConfigError: a clip ratio out of its bound.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    check_number("clip_ratio_c", clip_ratio_c, more_than=1)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    advantage, ratio = tokens.advantages, tokens.log_ratio.exp()
    free = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic = torch.maximum(free, clipped)
    ceiling = -advantage * clip_ratio_c
    hits_ceiling = (advantage < 0) & (pessimistic > ceiling)
    flags = {"actor/pg_clipfrac": clipped > free, "actor/pg_clipfrac_lower": hits_ceiling}
    return policy_loss(tokens, torch.where(hits_ceiling, ceiling, pessimistic), flags)
