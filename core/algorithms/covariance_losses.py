"""Policy losses that spare a policy's entropy by treating the tokens of highest covariance apart: Clip-Cov, KL-Cov.

Which tokens those are is a statistic of the whole mini-batch. A `select_…` function finds them once, from detached
log-probs `[M, T]`; each micro-batch then gets its rows (and its width) of that mask as `selected`, so the loss does
not depend on the split.
`M` is the number of sequences of the mini-batch, `B` of the micro-batch, `T` the padded response width in tokens.
"""

import torch
from torch import Tensor

from ..errors import ConfigError
from .checks import check_number
from .loss import PolicyLoss, PolicyTokens, policy_loss, policy_tokens


def clip_cov(  # noqa: PLR0913 (the tensors of every policy loss, the selection, and two constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    selected: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clip, and neither loss nor gradient for the selected tokens: Clip-Cov (arXiv 2505.22617).

    With `r = exp(clamp(log_probs - old_log_probs, ±20))` a token's loss is `max(-A r, -A clip(r, 1 - low, 1 + high))`,
    and 0 where `selected`. There is no dual clip.

    Metrics: `actor/pg_clipfrac` (the clip raised the loss), `actor/cov_selected`, `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        selected: `[B, T]` bool, this micro-batch's rows of `select_clip_cov`.
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.

    Raises:
        ConfigError: a clip ratio out of its bound.
        ValueError: `selected` is not bool of the mask's shape.
    """
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    _check_selected(selected, response_mask)
    free, clipped = _ppo_losses(tokens, clip_ratio_low, clip_ratio_high)
    losses = torch.maximum(free, clipped).masked_fill(selected, 0.0)
    return policy_loss(tokens, losses, {"actor/pg_clipfrac": clipped > free, "actor/cov_selected": selected})


def kl_cov(  # noqa: PLR0913 (the tensors of every policy loss, the selection, and one constant by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    selected: Tensor,
    ppo_kl_coef: float = 0.1,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """The ratio without a clip, and a pull to the old policy for the selected tokens: KL-Cov (arXiv 2505.22617).

    With `d = clamp(log_probs - old_log_probs, ±20)` a token's loss is `-A exp(d)`, plus `ppo_kl_coef |d|` where
    `selected`.

    Metrics: `actor/cov_selected`, `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        selected: `[B, T]` bool, this micro-batch's rows of `select_kl_cov`.
        ppo_kl_coef: loss per nat, >= 0.

    Raises:
        ConfigError: `ppo_kl_coef` is negative or not finite.
        ValueError: `selected` is not bool of the mask's shape.
    """
    check_number("ppo_kl_coef", ppo_kl_coef)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    _check_selected(selected, response_mask)
    pull = torch.where(selected, ppo_kl_coef * tokens.log_ratio.abs(), 0.0)
    losses = -tokens.advantages * tokens.log_ratio.exp() + pull
    return policy_loss(tokens, losses, {"actor/cov_selected": selected})


def select_clip_cov(  # noqa: PLR0913 (the tensors of every policy loss, and the rule's constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    seed: int,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """Tokens that Clip-Cov silences, of a whole mini-batch: a random few of those with a high covariance.

    A token's covariance is `(A - mean A) (log_probs - mean log_probs)`, means over the mini-batch's response tokens,
    float64. Candidates have a covariance strictly between the bounds and are not clipped already; `max(1, floor(ratio ×
    tokens))` of them are drawn without replacement, all where there are no more. The draw depends on `seed` and the
    order of the rows, on neither the padding nor the global random state.

    Args:
        log_probs: this and the other tensors `[M, T]` as in `policy_tokens`, which raises what it says there.
        seed: of the draw.
        clip_ratio_low: >= 0, as given to `clip_cov`.
        clip_ratio_high: >= 0, as given to `clip_cov`.
        clip_cov_ratio: fraction of the tokens, within [0, 1].
        clip_cov_lb: lower bound of the covariance, >= 0.
        clip_cov_ub: upper bound, above it.

    Returns:
        `[M, T]` bool, false outside the mask.

    Raises:
        ConfigError: a constant out of its bound.
    """
    _check_fraction("clip_cov_ratio", clip_cov_ratio)
    check_number("clip_cov_lb", clip_cov_lb)
    check_number("clip_cov_ub", clip_cov_ub, more_than=clip_cov_lb)
    tokens = policy_tokens(log_probs.detach(), old_log_probs, advantages, response_mask, None)
    free, clipped = _ppo_losses(tokens, clip_ratio_low, clip_ratio_high)
    covariance = _covariances(tokens)
    high = (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    candidates = (high & ~(clipped > free) & response_mask).nonzero()
    draw = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    chosen = candidates[draw[: _share(clip_cov_ratio, response_mask)].to(candidates.device)]
    return _marked(chosen, response_mask)


def select_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    kl_cov_ratio: float = 2e-4,
) -> Tensor:
    """Tokens that KL-Cov pulls back, of a whole mini-batch: the `max(1, floor(ratio × tokens))` of highest covariance.

    The covariance is that of `select_clip_cov`. Of equal ones the first in row order goes first, so the choice is
    the same wherever it is made.

    Args:
        log_probs: this and the other tensors `[M, T]` as in `policy_tokens`, which raises what it says there.
        kl_cov_ratio: fraction of the tokens, within [0, 1].

    Returns:
        `[M, T]` bool, false outside the mask.

    Raises:
        ConfigError: `kl_cov_ratio` out of its bound.
    """
    _check_fraction("kl_cov_ratio", kl_cov_ratio)
    tokens = policy_tokens(log_probs.detach(), old_log_probs, advantages, response_mask, None)
    order = torch.sort(_covariances(tokens)[response_mask], descending=True, stable=True).indices
    chosen = response_mask.nonzero()[order[: _share(kl_cov_ratio, response_mask)]]
    return _marked(chosen, response_mask)


def _ppo_losses(tokens: PolicyTokens, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Tensor]:
    """Free and clipped."""
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    ratio = tokens.log_ratio.exp()
    return -tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)


def _covariances(tokens: PolicyTokens) -> Tensor:
    """`[M, T]` float64; what stands outside the mask means nothing."""
    count = tokens.response_mask.sum().clamp(min=1)
    advantages, log_probs = tokens.advantages.double(), tokens.log_probs.double()  # both 0 outside the mask
    return (advantages - advantages.sum() / count) * (log_probs - log_probs.sum() / count)


def _share(ratio: float, mask: Tensor) -> int:
    return max(1, int(ratio * int(mask.sum())))


def _marked(positions: Tensor, mask: Tensor) -> Tensor:
    marks = torch.zeros_like(mask)
    marks[positions[:, 0], positions[:, 1]] = True
    return marks


def _check_fraction(argument: str, value: float) -> None:
    check_number(argument, value)
    if value > 1:
        raise ConfigError(f"{argument} is {value!r}; it must be a fraction of the tokens, within [0, 1].")


def _check_selected(selected: Tensor, mask: Tensor) -> None:
    if selected.dtype != torch.bool or selected.shape != mask.shape or selected.device != mask.device:
        raise ValueError(
            f"selected is {list(selected.shape)} {selected.dtype} on {selected.device}; it must be [B, T] = "
            f"{list(mask.shape)} torch.bool on {mask.device}, like response_mask."
        )
