"""Advantages measured along a sequence: rewards that are still to come, against a critic, a greedy answer, or nothing.

Arguments, results, errors and missing rewards are those of `advantage`; `groups` is not read. Tokens outside the mask
(padding, and what a tool or a user wrote in between) are skipped: the token after them follows directly on the one
before, and after the last response token come value 0 and reward 0. A response cut off at the length limit ends
there as well. No Python loop over tokens: sums of a geometric weight are doubled in length log2(T) times.
`B` is the number of sequences, `T` the padded response width in tokens.
"""

import math

import torch
from torch import Tensor

from ..errors import ConfigError
from .advantage import counted_rewards, row_values
from .checks import check_finite, check_shapes
from .whitening import whiten


def gae(  # noqa: PLR0913 (the three tensors of every estimator, and four options by name)
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor | None = None,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 11 and 16), whitened over the batch.

    `δ_t = r_t + γ V_{t+1} - V_t`, `A_t = δ_t + γ λ A_{t+1}`. The returns, which the critic learns, are `A_t + V_t`
    before whitening; the advantages are `whiten(A)` over the response tokens of valid samples (ddof 1, epsilon 1e-8
    inside the root), so a batch must not be split before. There are no groups, so no rule for groups of one.
    A sample that is not valid gets advantage 0, and its old values as returns: the critic learns nothing from it.

    Example: rewards 0, 0, 1, values 0.5, 0.6, 0.7, γ = 1, λ = 0.95 give A = 0.46575, 0.385, 0.3 before whitening and
    returns 0.96575, 0.985, 1.

    Args:
        values: `[B, T]`, float32 or float64, of the critic before the update.
        gamma: discount of a token's reward, 0 to 1.
        lam: 0 trusts the critic one token ahead, 1 the rewards alone.
    """
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    rewards, valid = counted_rewards(token_rewards, response_mask, valid)
    check_shapes(response_mask, values=values)
    counted = response_mask & valid[:, None]
    check_finite(response_mask, values=values)

    known = values.detach().double().masked_fill(~response_mask, 0.0)
    order = _responses_first(response_mask)
    value, reward = known.gather(1, order), rewards.gather(1, order)
    delta = reward + gamma * _later(value, 1) - value
    raw = torch.zeros_like(known).scatter(1, order, _discounted_sum(delta, gamma * lam))
    raw = raw.masked_fill(~counted, 0.0)
    return whiten(raw, counted).to(token_rewards.dtype), (raw + known).to(token_rewards.dtype)


def reinforce_plus_plus(
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor | None = None,
    *,
    gamma: float = 1.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++: the discounted reward to go, whitened over the batch (arXiv 2501.03262).

    `G_t = r_t + γ G_{t+1}`; the returns are `G`, the advantages `whiten(G)` over the response tokens of valid samples
    (ddof 1, epsilon 1e-8 inside the root), so a batch must not be split before. There are no groups, so no rule for
    groups of one. `gamma` is from 0 to 1. A sample that is not valid gets 0 in both.

    Example: rewards 0, 1 with γ = 0.5 give returns 0.5, 1 and advantages -0.707107, 0.707107.
    """
    check_fraction("gamma", gamma)
    rewards, valid = counted_rewards(token_rewards, response_mask, valid)
    returns = reward_to_go(rewards, response_mask, gamma)
    advantages = whiten(returns, response_mask & valid[:, None])
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


def remax(
    token_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor | None = None,
    *,
    baseline_scores: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ReMax: the undiscounted reward to go, less the score of the greedy answer (arXiv 2310.10505, §4).

    No whitening, no std, no epsilon. There are no groups, so no rule for groups of one: the baseline comes from
    elsewhere. The returns are the reward to go. A sample that is not valid gets 0 in both.

    Example: rewards 0, 1 and the baseline 0.25 give advantages 0.75, 0.75 and returns 1, 1.

    Args:
        baseline_scores: `[B]`, float32 or float64: the score of the greedy answer to each row's prompt.
    """
    rewards, valid = counted_rewards(token_rewards, response_mask, valid)
    baseline = row_values("baseline_scores", baseline_scores, valid)
    returns = reward_to_go(rewards, response_mask, 1.0)
    counted = response_mask & valid[:, None]
    advantages = (returns - baseline[:, None]).masked_fill(~counted, 0.0)
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


def reward_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + γ G_{t+1}` `[B, T]` float64, 0 outside the mask; `rewards` is 0 there already."""
    order = _responses_first(response_mask)
    sums = _discounted_sum(rewards.gather(1, order), gamma)
    return torch.zeros_like(rewards).scatter(1, order, sums).masked_fill(~response_mask, 0.0)


def check_fraction(argument: str, value: float) -> None:
    """Refuse what is not a number from 0 to 1 with a ConfigError that names `argument`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= 1:
        raise ConfigError(f"{argument} is {value!r}; it must be a number from 0 to 1.")


def _responses_first(response_mask: Tensor) -> Tensor:
    """For each row the places of its response tokens, in order, then the others; `[B, T]` int64."""
    return torch.argsort(~response_mask, dim=1, stable=True)


def _discounted_sum(terms: Tensor, factor: float) -> Tensor:
    """`x_t = terms_t + factor · x_{t+1}` along each row, `[B, T]`.

    After the pass of width w, each entry holds the sum of its next 2w terms: `x_t ← x_t + factor^w · x_{t+w}`.
    """
    width, sums = 1, terms
    while width < terms.shape[1]:
        sums = sums + factor**width * _later(sums, width)
        width *= 2
    return sums


def _later(values: Tensor, width: int) -> Tensor:
    """What stands `width` places later in the row, 0 behind its end."""
    return torch.nn.functional.pad(values[:, width:], (0, min(width, values.shape[1])))
