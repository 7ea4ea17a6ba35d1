"""Policy losses without PPO's hard clip: the plain policy gradient, and four ways to hold it back.

`B` is the number of sequences, `T` the padded response width in tokens.
"""

import torch
from torch import Tensor

from .checks import check_number
from .loss import PolicyLoss, PolicyTokens, policy_loss, policy_tokens

_KL_EPSILON = 1e-8


def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """The policy gradient itself: a token's loss is `-A log_probs` (Williams, 1992; GPG, arXiv 2504.02546, eq. 7).

    No ratio: off policy it is biased unless `weights` hold the importance weights. `old_log_probs` is only measured.
    Metrics: `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
    """
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    return policy_loss(tokens, -tokens.advantages * tokens.log_probs, {})


def cispo(  # noqa: PLR0913 (the tensors of every policy loss, and two constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped importance weights on the policy gradient, CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    A token's loss is `-sg(clip(r, 1 - low, 1 + high)) A log_probs`, `r = exp(clamp(log_probs - old_log_probs, ±20))`
    and `sg` without gradient: every token keeps a gradient, of bounded weight. `low >= 1` is the paper's one-sided
    clip.

    Metrics: `actor/pg_clipfrac` (the ratio was clipped), `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        clip_ratio_low: >= 0.
        clip_ratio_high: >= 0.

    Raises:
        ConfigError: a clip ratio out of its bound.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    ratio = tokens.log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = -bounded * tokens.advantages * tokens.log_probs
    return policy_loss(tokens, losses, {"actor/pg_clipfrac": bounded != ratio})


def sapo(  # noqa: PLR0913 (the tensors of every policy loss, and two constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """A soft gate in place of the clip, SAPO (arXiv 2511.20347, eq. 5 and 6).

    A token's loss is `-A sigmoid(tau (r - 1)) 4 / tau`, with `tau_pos` where `A > 0`, else `tau_neg`, and
    `r = exp(clamp(log_probs - old_log_probs, ±20))`. On policy its slope is that of PPO, `-A`, and it fades with the
    distance. The paper averages each sequence first: the registry forces `seq-mean-token-mean`.

    Metrics: `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        tau_pos: > 0.
        tau_neg: > 0; above `tau_pos`, bad tokens fade faster.

    Raises:
        ConfigError: a temperature that is not > 0.
    """
    check_number("tau_pos", tau_pos, more_than=0)
    check_number("tau_neg", tau_neg, more_than=0)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    tau = torch.full_like(tokens.advantages, tau_neg).masked_fill(tokens.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1)) * (4 / tau)
    return policy_loss(tokens, -tokens.advantages * gate, {})


def dppo_tv(  # noqa: PLR0913 (the tensors of every policy loss, and three constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 20.0,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Divergence PPO with the binary total variation (arXiv 2602.04879).

    With `p`, `q` the probabilities of the token now and before, and `r = exp(clamp(log_probs - old_log_probs, ±20))`,
    a token's loss is `-A sg(min(r, c)) log_probs` while it is within the trust region: `p - q <= high` where `A > 0`,
    `p - q >= -low` elsewhere. Outside it the token's loss and gradient are 0. `sg` is without gradient.

    Metrics: `actor/pg_clipfrac` (the token is outside the region), `actor/ppo_kl`.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        clip_ratio_low: probability, >= 0.
        clip_ratio_high: probability, >= 0.
        clip_ratio_c: > 1, the most that a ratio can weigh.

    Raises:
        ConfigError: a clip ratio out of its bound.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    check_number("clip_ratio_c", clip_ratio_c, more_than=1)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    now, before = _probabilities(tokens)
    change = now - before
    inside = torch.where(tokens.advantages > 0, change <= clip_ratio_high, change >= -clip_ratio_low)
    return _within_region(tokens, inside, clip_ratio_c)


def dppo_kl(  # noqa: PLR0913 (the tensors of every policy loss, and three constants by name)
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.05,
    clip_ratio_high: float = 0.05,
    clip_ratio_c: float = 20.0,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Divergence PPO with the binary KL divergence (arXiv 2602.04879).

    As `dppo_tv`, with `KL = q (log q - log p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))` in nats: a token is
    within the region while `KL <= high` or `p <= q` where `A > 0`, and `KL <= low` or `p >= q` elsewhere, so a move
    back towards the old policy is never held up.

    Args:
        log_probs: this and the other tensors as in `policy_tokens`, which raises what it says there.
        clip_ratio_low: nats, >= 0.
        clip_ratio_high: nats, >= 0.
        clip_ratio_c: > 1, the most that a ratio can weigh.

    Raises:
        ConfigError: a clip ratio out of its bound.
    """
    check_number("clip_ratio_low", clip_ratio_low)
    check_number("clip_ratio_high", clip_ratio_high)
    check_number("clip_ratio_c", clip_ratio_c, more_than=1)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, response_mask, weights)
    now, before = _probabilities(tokens)
    others = ((1 - before + _KL_EPSILON) / (1 - now + _KL_EPSILON)).log()
    divergence = -before * tokens.log_ratio.detach() + (1 - before) * others
    inside = torch.where(
        tokens.advantages > 0,
        (divergence <= clip_ratio_high) | (now <= before),
        (divergence <= clip_ratio_low) | (now >= before),
    )
    return _within_region(tokens, inside, clip_ratio_c)


def _probabilities(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Of the sampled token, now and before, without gradient; a log-prob above 0 is rounding and means 1.

    Float64: in float32 `1 - p + 1e-8` of a near-certain token has no digit left.
    """
    now, before = tokens.log_probs.detach().double(), tokens.old_log_probs.double()
    return now.clamp(max=0.0).exp(), before.clamp(max=0.0).exp()


def _within_region(tokens: PolicyTokens, inside: Tensor, clip_ratio_c: float) -> PolicyLoss:
    weight = tokens.log_ratio.detach().exp().clamp(max=clip_ratio_c)
    losses = (-tokens.advantages * weight * tokens.log_probs).masked_fill(~inside, 0.0)
    return policy_loss(tokens, losses, {"actor/pg_clipfrac": ~inside})
