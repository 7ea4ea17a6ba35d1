"""KL: how far the policy has moved from the reference, token by token, and how much that costs.

The value is added to a loss, or subtracted from a reward. The estimators see the sampled tokens alone and estimate
KL(policy || reference); `full_kl` computes it from both distributions. The controllers hold its weight in the reward.
`B` is the number of sequences, `T` the padded response width in tokens, `V` the size of the vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self

import torch
from torch import Tensor

from ..errors import ConfigError
from .checks import NonFiniteInputError, check_finite, check_number, check_shapes, check_tokens, lookup

Estimator = Callable[[Tensor, Tensor], Tensor]

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0
_MAX_KL_ERROR = 0.2
_LEAST_KL_FACTOR = 0.5
_MAX_SUM_ERROR = 0.05  # log-probs of a bfloat16 softmax sum to 1 within a per cent or two


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


def full_kl(log_probs: Tensor, ref_log_probs: Tensor, *, response_mask: Tensor | None = None) -> Tensor:
    """The KL divergence itself at each token, `Σ_v p_v (log p_v - log q_v)`, over the whole vocabulary.

    It has no sampling noise, and as a loss its gradient is the true one, at the price of both distributions in memory.
    A token of probability 0 (log-prob -inf) adds 0.

    Example: probabilities 0.5, 0.5 against 0.25, 0.75 give 0.143841 nats.

    Args:
        log_probs: `[B, T, V]`, float32 or float64, in nats, normalised over V; a gradient flows to it.
        ref_log_probs: `[B, T, V]` of the reference; no gradient flows to it.
        response_mask: `[B, T]` bool; what lies outside is never read, and is 0 in the result and in the gradient.
            None means that every token counts.

    Returns:
        `[B, T]`, in nats, >= 0 up to rounding.

    Raises:
        ValueError: wrong shape, type or device; logits in place of log-probs: their probabilities do not sum to 1.
        NonFiniteInputError: a log-prob that counts is NaN or +inf, or the reference is -inf where the policy is not.
    """
    if log_probs.dim() != 3 or ref_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"log_probs has the shape {list(log_probs.shape)} and ref_log_probs {list(ref_log_probs.shape)}; both must "
            "be the same [B, T, V]."
        )
    mask = torch.ones_like(log_probs[..., 0], dtype=torch.bool) if response_mask is None else response_mask
    check_shapes(mask, log_probs=log_probs[..., 0], ref_log_probs=ref_log_probs[..., 0])
    possible = mask[..., None] & (log_probs != -torch.inf)
    _check_distribution(mask, possible, "log_probs", log_probs.detach())
    _check_distribution(mask, possible, "ref_log_probs", ref_log_probs.detach())
    # Filled before the arithmetic: the derivative at -inf, or at a NaN outside the mask, would be NaN even times 0.
    policy = log_probs.masked_fill(~possible, 0.0)
    terms = policy.exp() * (policy - ref_log_probs.detach().masked_fill(~possible, 0.0))
    return terms.masked_fill(~possible, 0.0).sum(dim=2)


def _check_distribution(mask: Tensor, possible: Tensor, name: str, log_probs: Tensor) -> None:
    wrong = possible & ~torch.isfinite(log_probs)
    check_finite(mask, **{name: log_probs.masked_fill(~wrong, 0.0).sum(dim=2)})  # not finite where one of V is not
    total = log_probs.logsumexp(dim=2).masked_fill(~mask, 0.0)
    bad = ~(total.abs() <= _MAX_SUM_ERROR)
    if bool(bad.any()):
        row, token = (int(index) for index in bad.nonzero()[0])
        raise ValueError(
            f"{name} at row {row}, token {token} has the log-sum-exp {float(total[row, token]):g}; it must be 0: "
            "hand in log-probs (log_softmax of the logits)."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKlController:
    """A weight of the KL in the reward that stays what it is.

    Raises:
        ConfigError: `value` is negative or not finite.
    """

    value: float
    """Reward per nat, >= 0."""

    def __post_init__(self) -> None:
        check_number("value", self.value)

    def updated(self, observed_kl: float, num_samples: int) -> Self:
        """The same controller: nothing that is observed changes it."""
        return self

    def state(self) -> dict[str, float]:
        """What `from_state` needs, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Self:
        """The controller whose `state()` this was; raises ConfigError unless it has exactly those keys."""
        return cls(**_checked_state(cls, state))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKlController:
    """A weight that grows while the KL is above its target and shrinks below it (arXiv 1909.08593, §2.2).

    After each step `value ← value · (1 + e · num_samples / horizon)` with `e = clip(observed / target - 1, ±0.2)`. The
    factor is at least 0.5, or a horizon shorter than a step could make the penalty 0 for good, or a reward. The value
    is state: it belongs into the checkpoint.

    Example: value 0.1, target 6 nats, horizon 10,000: a step of 500 samples at 12 nats gives 0.1 · 1.01 = 0.101.

    Raises:
        ConfigError: `value` is negative, `target` or `horizon` not > 0, or one of them not finite.
    """

    value: float
    """Reward per nat, >= 0."""
    target: float
    """Nats, > 0."""
    horizon: float
    """Samples, > 0: how many it takes, at the largest error, to change the value by a fifth."""

    def __post_init__(self) -> None:
        check_number("value", self.value)
        check_number("target", self.target, more_than=0)
        check_number("horizon", self.horizon, more_than=0)

    def updated(self, observed_kl: float, num_samples: int) -> Self:
        """The controller for the next step.

        Args:
            observed_kl: of this step, in nats, as `apply_kl_in_reward` gives it; may be negative (k1).
            num_samples: sequences of this step, over all ranks, >= 0.

        Raises:
            NonFiniteInputError: `observed_kl` is NaN or infinite.
            ConfigError: `num_samples` is negative.
        """
        if not math.isfinite(observed_kl):
            raise NonFiniteInputError(f"observed_kl is {observed_kl}; it must be a finite number of nats.")
        check_number("num_samples", num_samples)
        error = min(max(observed_kl / self.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
        factor = max(1 + error * num_samples / self.horizon, _LEAST_KL_FACTOR)
        return type(self)(value=self.value * factor, target=self.target, horizon=self.horizon)

    def state(self) -> dict[str, float]:
        """What `from_state` needs, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Self:
        """The controller whose `state()` this was; raises ConfigError unless it has exactly those keys."""
        return cls(**_checked_state(cls, state))


def _checked_state(controller: type, state: Mapping[str, float]) -> dict[str, float]:
    names = [field.name for field in fields(controller)]
    if sorted(state) != sorted(names):
        raise ConfigError(
            f"state of the KL controller has {', '.join(sorted(state)) or 'no key'}; {controller.__name__} needs "
            f"{', '.join(names)}. It was saved by another kind of controller."
        )
    return dict(state)


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
