"""The PPO loss against hand-computed numbers, at its edges, and put together with the other pieces."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms import aggregate, grpo, kl_penalty, lookup, ppo_clip
from moonshift.core.algorithms.policy_losses import POLICY_LOSSES
from moonshift.core.errors import ConfigError, NonFiniteError

RATIOS = [0.5, 0.9, 1.0, 1.3, 1.5]


def at_ratios(
    ratios: list[float], advantage: float, *, clip_ratio_high: float = 0.2
) -> tuple[list[float], list[float], dict[str, tuple[float, float]]]:
    """Losses, their slopes with respect to the log-prob, and the metrics, of one row with these ratios."""
    old = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    log_probs = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones_like(old, dtype=torch.bool)
    loss = ppo_clip(log_probs, old, torch.full_like(old, advantage), mask, clip_ratio_high=clip_ratio_high)
    (slope,) = torch.autograd.grad(loss.token_losses.sum(), log_probs)
    metrics = {name: (total.item(), count.item()) for name, (total, count) in loss.metrics.items()}
    return loss.token_losses[0].tolist(), slope[0].tolist(), metrics


@pytest.mark.case("A07")
def test_a_good_token_is_clipped_above() -> None:
    losses, slopes, metrics = at_ratios(RATIOS, 1.0)
    assert losses == pytest.approx([-0.5, -0.9, -1.0, -1.2, -1.2], abs=1e-12)
    assert slopes == pytest.approx([-0.5, -0.9, -1.0, 0.0, 0.0], abs=1e-12)  # d(-A r) / d log-prob = -A r
    assert metrics["actor/pg_clipfrac"] == (2.0, 5.0)
    assert metrics["actor/pg_clipfrac_lower"] == (0.0, 5.0)
    assert metrics["actor/ppo_kl"] == pytest.approx((-sum(map(math.log, RATIOS)), 5.0), abs=1e-12)


@pytest.mark.case("A07")
def test_a_bad_token_is_clipped_below() -> None:
    losses, slopes, metrics = at_ratios(RATIOS, -1.0)
    assert losses == pytest.approx([0.8, 0.9, 1.0, 1.3, 1.5], abs=1e-12)
    assert slopes == pytest.approx([0.0, 0.9, 1.0, 1.3, 1.5], abs=1e-12)
    assert metrics["actor/pg_clipfrac"] == (1.0, 5.0)


@pytest.mark.case("A07")
def test_clip_higher_moves_the_upper_bound_alone() -> None:
    losses, _, _ = at_ratios(RATIOS, 1.0, clip_ratio_high=0.28)
    assert losses == pytest.approx([-0.5, -0.9, -1.0, -1.28, -1.28], abs=1e-12)


@pytest.mark.case("A07")
def test_the_dual_clip_holds_for_bad_tokens_alone() -> None:
    losses, slopes, metrics = at_ratios([5.0, 2.9], -1.0)
    assert losses == pytest.approx([3.0, 2.9], abs=1e-12) and slopes == pytest.approx([0.0, 2.9], abs=1e-12)
    assert metrics["actor/pg_clipfrac_lower"] == (1.0, 2.0)
    losses, _, metrics = at_ratios([5.0, 2.9], 1.0, clip_ratio_high=9.0)
    assert losses == pytest.approx([-5.0, -2.9], abs=1e-12)
    assert metrics["actor/pg_clipfrac_lower"] == (0.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [2.5, -2.5, 0.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_a_log_ratio_of_a_thousand_stays_finite(dtype: torch.dtype, advantage: float, log_ratio: float) -> None:
    log_probs = torch.full((1, 1), log_ratio, dtype=dtype, requires_grad=True)
    zeros = torch.zeros(1, 1, dtype=dtype)
    loss = ppo_clip(log_probs, zeros, zeros + advantage, torch.ones(1, 1, dtype=torch.bool))
    (slope,) = torch.autograd.grad(loss.token_losses.sum(), log_probs)
    assert slope.item() == 0.0
    good = 1.2 if log_ratio > 0 else math.exp(-20)
    bad = 3.0 if log_ratio > 0 else 0.8
    expected = -advantage * (good if advantage > 0 else bad)
    assert loss.token_losses.item() == pytest.approx(expected, rel=1e-6)
    assert loss.metrics["actor/ppo_kl"][0].item() == -math.copysign(20.0, log_ratio)


@pytest.mark.case("A09")
def test_exactly_on_policy_the_loss_is_minus_the_advantage() -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs = (-torch.rand(3, 4, generator=generator) * 10).requires_grad_()
    advantages = torch.randn(3, 4, generator=generator)
    loss = ppo_clip(log_probs, log_probs, advantages, torch.ones(3, 4, dtype=torch.bool))
    (slope,) = torch.autograd.grad(loss.token_losses.sum(), log_probs)
    assert torch.equal(loss.token_losses, -advantages) and torch.equal(slope, -advantages)
    assert [float(total) for total, _ in loss.metrics.values()] == [0.0, 0.0, 0.0]


def test_the_gradient_is_that_of_the_value() -> None:
    generator = torch.Generator().manual_seed(11)
    old = -torch.rand(2, 5, generator=generator, dtype=torch.float64)
    log_probs = (old + torch.randn(2, 5, generator=generator, dtype=torch.float64) * 0.5).requires_grad_()
    advantages = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 5, generator=generator) < 0.8
    assert torch.autograd.gradcheck(lambda values: ppo_clip(values, old, advantages, mask).token_losses, (log_probs,))


def test_no_gradient_flows_to_the_advantages_or_the_old_policy() -> None:
    log_probs, old, advantages = torch.zeros(3, 1, 2, dtype=torch.float64).requires_grad_().unbind()
    for tensor in (log_probs, old, advantages):
        tensor.retain_grad()
    ppo_clip(log_probs, old, advantages + 1, torch.ones(1, 2, dtype=torch.bool)).token_losses.sum().backward()
    assert log_probs.grad is not None and old.grad is None and advantages.grad is None


def plain_ppo(log_prob: float, old: float, advantage: float) -> float:
    """arXiv 1707.06347 eq. 7 and 1912.09729 eq. 5 for one token, as written: an objective, negated."""
    ratio = math.exp(log_prob - old)
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    return -max(objective, 3.0 * advantage) if advantage < 0 else -objective


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 6))
def test_split_order_and_outside_tokens_change_neither_losses_nor_metrics(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs, old, advantages = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.6
    whole = ppo_clip(log_probs, old, advantages, mask)
    for row, token in mask.nonzero().tolist():
        expected = plain_ppo(float(log_probs[row, token]), float(old[row, token]), float(advantages[row, token]))
        assert whole.token_losses[row, token].item() == pytest.approx(expected, abs=1e-12)

    noisy = [tensor.masked_fill(~mask, math.nan) for tensor in (log_probs, old, advantages)]
    order = torch.randperm(6, generator=generator)
    parts = [ppo_clip(noisy[0][rows], noisy[1][rows], noisy[2][rows], mask[rows]) for rows in order.split(size)]
    assert torch.equal(torch.cat([part.token_losses for part in parts]), whole.token_losses[order])
    for name, (total, count) in whole.metrics.items():
        assert sum(part.metrics[name][0].item() for part in parts) == pytest.approx(total.item(), abs=1e-12)
        assert sum(part.metrics[name][1].item() for part in parts) == count.item() == int(mask.sum())


def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient() -> None:
    log_probs = torch.tensor([[-1.0, math.nan, math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    garbage = torch.tensor([[-1.0, math.inf, math.nan]])
    loss = ppo_clip(log_probs, garbage, garbage, mask).token_losses
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.tolist() == [[1.0, 0.0, 0.0]] and slope.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.case("G03")
def test_a_fully_truncated_batch_gives_zero_and_counts_nothing() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    loss = ppo_clip(log_probs, log_probs.detach() - 1, torch.ones(2, 2), mask)
    aggregate(loss.token_losses, mask, "token-mean", num_tokens=0, num_sequences=2).backward()
    assert log_probs.grad is not None and not log_probs.grad.any()
    assert all(total.item() == count.item() == 0.0 for total, count in loss.metrics.values())


def slope_of_a_group(rewards: list[float], *, kl_coef: float, keep: list[bool]) -> Tensor:
    """d loss / d log-prob of a GRPO step with a k3 loss of about 0.1 a token; `keep` drops whole sequences."""
    log_probs = torch.full((len(rewards), 2), -1.0, dtype=torch.float64, requires_grad=True)
    reference = torch.full_like(log_probs, -1.4867).detach()  # k3 = 0.1
    mask = torch.ones(len(rewards), 2, dtype=torch.bool)
    token_rewards = torch.tensor(rewards, dtype=torch.float64)[:, None] * torch.tensor([[0.0, 1.0]])
    groups = torch.arange(len(rewards)) // 2
    advantages, _ = grpo(token_rewards, mask, groups)
    mask = mask & torch.tensor(keep)[:, None]
    loss = ppo_clip(log_probs, log_probs.detach(), advantages, mask).token_losses
    loss = loss + kl_coef * kl_penalty(log_probs, reference, "k3", response_mask=mask)
    aggregate(loss, mask, "token-mean", num_tokens=int(mask.sum()), num_sequences=sum(keep)).backward()
    assert log_probs.grad is not None
    return log_probs.grad


@pytest.mark.case("A15")
def test_the_kl_term_still_pulls_on_a_group_without_signal() -> None:
    slope = slope_of_a_group([1.0, 1.0], kl_coef=0.1, keep=[True, True])
    expected = 0.1 * (1 - math.exp(-0.4867)) / 4
    torch.testing.assert_close(slope, torch.full_like(slope, expected), rtol=0, atol=1e-12)


@pytest.mark.case("A15")
def test_without_kl_a_group_without_signal_has_gradient_exactly_zero() -> None:
    assert not slope_of_a_group([1.0, 1.0], kl_coef=0.0, keep=[True, True]).any()


@pytest.mark.case("A15")
def test_a_group_dropped_by_mask_and_count_leaves_the_others_as_if_alone() -> None:
    slope = slope_of_a_group([1.0, 1.0, 1.0, 0.0], kl_coef=0.1, keep=[False, False, True, True])
    alone = slope_of_a_group([1.0, 0.0], kl_coef=0.1, keep=[True, True])
    assert not slope[:2].any() and torch.equal(slope[2:], alone)


def test_wrong_arguments_are_named() -> None:
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"loss_mode is 'ppo'; it must be one of .*vanilla"):
        lookup("actor.policy_loss.loss_mode", "ppo", POLICY_LOSSES)
    with pytest.raises(ValueError, match=r"old_log_probs is \[3, 2\] torch.float32 .* \[2, 3\]"):
        ppo_clip(zeros, zeros.T, zeros, mask)
    with pytest.raises(ValueError, match=r"advantages is \[2\] torch.float32"):
        ppo_clip(zeros, zeros, torch.zeros(2), mask)
    with pytest.raises(ValueError, match=r"log_probs is \[2, 3\] torch.bfloat16"):
        ppo_clip(zeros.bfloat16(), zeros, zeros, mask)
    with pytest.raises(ConfigError, match=r"clip_ratio_c is 1.0; .*> 1"):
        ppo_clip(zeros, zeros, zeros, mask, clip_ratio_c=1.0)
    with pytest.raises(ConfigError, match=r"clip_ratio_low is -0.1; .*>= 0"):
        ppo_clip(zeros, zeros, zeros, mask, clip_ratio_low=-0.1)
    with pytest.raises(NonFiniteError, match=r"advantages \[2, 3\] has 6 .* row 0, token 0: nan"):
        ppo_clip(zeros, zeros, zeros + math.nan, mask)
