"""KL estimators: how far the policy has moved from the reference, token by token, from the sampled tokens alone.

The value is added to a loss, or subtracted from a reward: it estimates KL(policy || reference) for tokens that the
policy sampled. `B` is the number of sequences, `T` the padded response width in tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .checks import check_finite, check_number, check_shapes, check_tokens, lookup

Estimator = Callable[[Tensor, Tensor], Tensor]

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str, *, response_mask: Tensor | None = None) -> Tensor:
    """Estimate the KL divergence at each sampled token (Schulman, "Approximating KL Divergence", 2020).

    With `d = log_probs - ref_log_probs`:
    - `k1`, `kl`: `d`, unbiased; its gradient as a loss is 0 on average, so it belongs into the reward.
    - `abs`: `|d|`.
    - `k2`, `mse`: `d² / 2`; its gradient as a loss is that of the KL divergence.
    - `k3`, `low_var_kl`: `exp(-d) + d - 1`, with `-d` clamped to ±20 and the result to ±10; unbiased between the
      clamps, and its gradient is 0 where a clamp holds.
    - `k1+`, `abs+`, `k3+`: straight-through, the value of the base with the gradient of `k2`.

    Example: log-probs -1, -2 against -1.5, -1.5 give k1 0.5, -0.5; k2 0.125, 0.125; k3 0.106531, 0.148721.

    Args:
        log_probs: `[B, T]`, float32 or float64, in nats; a gradient flows to it.
        ref_log_probs: `[B, T]`, of the reference; no gradient flows to it.
        kind: a name in `KL_ESTIMATORS`.
        response_mask: `[B, T]` bool; what lies outside is never read, and is 0 in the result and in the gradient.
            None means that every token counts.

    Returns:
        `[B, T]`, in nats.

    Raises:
        ConfigError: `kind` is unknown.
        ValueError: wrong shape, type or device.
        NonFiniteInputError: a log-prob that counts is NaN or infinite.
    """
    estimator = lookup("kind", kind, KL_ESTIMATORS)
    mask = response_mask
    if mask is None:
        mask = torch.ones_like(log_probs, dtype=torch.bool)
    check_tokens(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    # Filled before the arithmetic: the derivative at a NaN outside the mask would be NaN even times 0.
    return estimator(log_probs.masked_fill(~mask, 0.0), ref_log_probs.detach().masked_fill(~mask, 0.0))


def apply_kl_in_reward(
    token_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Subtract `kl_coef` × KL from the reward of every response token (arXiv 2203.02155, eq. 2, per token).

    A missing reward (NaN) stays missing: the advantage estimator's `valid` leaves it out. Outside the mask the
    rewards are handed back as they came.

    Args:
        token_rewards: `[B, T]`, float32 or float64.
        old_log_probs: `[B, T]` of the policy that sampled, in nats.
        ref_log_probs: `[B, T]` of the reference, in nats.
        response_mask: `[B, T]` bool.
        kl_coef: reward per nat, >= 0.
        kind: a name in `KL_ESTIMATORS`.

    Returns:
        New token rewards `[B, T]`, and the KL's mean over all response tokens (scalar, float64, nats; 0 when there
        are none). Neither carries a gradient.

    Raises:
        ConfigError: `kind` is unknown, or `kl_coef` is negative or not finite.
        ValueError: wrong shape, type or device.
        NonFiniteInputError: a log-prob inside the mask is NaN or infinite.
    """
    check_number("kl_coef", kl_coef)
    estimator = lookup("kind", kind, KL_ESTIMATORS)
    check_shapes(response_mask, token_rewards=token_rewards, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    check_finite(response_mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    outside = ~response_mask
    kl = estimator(old_log_probs.detach().masked_fill(outside, 0.0), ref_log_probs.detach().masked_fill(outside, 0.0))
    mean_kl = kl.sum(dtype=torch.float64) / response_mask.sum().clamp(min=1)
    return token_rewards.detach() - (kl_coef * kl).to(token_rewards.dtype), mean_kl


def _k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return log_probs - ref_log_probs


def _abs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).abs()


def _k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def _k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    log_ratio = (ref_log_probs - log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1: exp(x) - 1 loses every digit where the policies are still close, which is where most tokens are
    return (torch.expm1(log_ratio) - log_ratio).clamp(-_MAX_K3, _MAX_K3)


def _straight_through(value: Estimator) -> Estimator:
    def estimator(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        gradient = _k2(log_probs, ref_log_probs)
        return value(log_probs, ref_log_probs).detach() + (gradient - gradient.detach())

    return estimator


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": _k1,
    "kl": _k1,
    "abs": _abs,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
    "k1+": _straight_through(_k1),
    "abs+": _straight_through(_abs),
    "k3+": _straight_through(_k3),
}
"""By the name in `algorithm.kl_penalty` and `actor.kl_loss_type`; each takes log-probs and reference log-probs."""
