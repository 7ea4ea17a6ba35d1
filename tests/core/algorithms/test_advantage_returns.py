"""GAE, REINFORCE++ and ReMax against hand-computed numbers and plain loops, and whitening by itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms.estimators import ADVANTAGE_ESTIMATORS
from moonshift.core.algorithms.return_advantages import gae, reinforce_plus_plus, remax
from moonshift.core.algorithms.whitening import whiten
from moonshift.core.errors import ConfigError, NonFiniteError

ALONG_SEQUENCES = ("gae", "reinforce_plus_plus", "remax")


def doubles(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor | list[list[float]], tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def raw_gae(rewards: Tensor, mask: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """The advantages before whitening: what the returns hold beside the values."""
    _, returns = gae(rewards, mask, values=values, gamma=gamma, lam=lam)
    return (returns - values.masked_fill(~mask, 0.0)).masked_fill(~mask, 0.0)


def by_name(name: str, rewards: Tensor, mask: Tensor, values: Tensor, valid: Tensor | None = None) -> list[Tensor]:
    extra = {"gae": {"values": values}, "remax": {"baseline_scores": values.masked_fill(~mask, 0.0).sum(1)}}
    options = {} if name == "remax" else {"gamma": 0.9}
    return list(ADVANTAGE_ESTIMATORS[name].compute(rewards, mask, None, valid=valid, **extra.get(name, {}), **options))


@pytest.mark.case("A03")
def test_a_value_behind_the_mask_does_not_leak() -> None:
    mask = torch.tensor([[True, True, False]])
    for behind in (0.0, 100.0, math.nan, math.inf):
        close(raw_gae(doubles([[0, 1, 0]]), mask, doubles([[0, 0, behind]])), [[0.95, 1.0, 0.0]])


@pytest.mark.case("A04")
def test_gae_by_hand_to_the_last_token() -> None:
    rewards, values = doubles([[0, 0, 1]]), doubles([[0.5, 0.6, 0.7]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = gae(rewards, mask, values=values, gamma=1.0, lam=0.95)
    close(returns, [[0.96575, 0.985, 1.0]])
    close(raw_gae(rewards, mask, values), [[0.46575, 0.385, 0.3]])
    # mean 0.38358333, ddof 1: std of (0.46575, 0.385, 0.3) is 0.08288408
    close(advantages, [[0.991337, 0.017092, -1.008429]], 1e-5)


def test_discount_and_trace_enter_where_they_belong() -> None:
    rewards, values = doubles([[1, 2, 4]]), doubles([[0.5, 0.25, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    # γ = 0.5: δ = 1 + 0.125 - 0.5, 2 + 0.5 - 0.25, 4 - 1; γ λ = 0.4
    close(raw_gae(rewards, mask, values, gamma=0.5, lam=0.8), [[0.625 + 0.4 * 3.45, 2.25 + 1.2, 3.0]])
    close(raw_gae(rewards, mask, values, gamma=0.5, lam=0.0), [[0.625, 2.25, 3.0]])
    close(raw_gae(rewards, mask, values, gamma=1.0, lam=1.0), [[6.5, 5.75, 3.0]])


def test_tokens_of_a_tool_are_skipped() -> None:
    rewards, values = doubles([[0, 9, 9, 0, 1]]), doubles([[0.5, 50, 60, 0.6, 0.7]])
    mask = torch.tensor([[True, False, False, True, True]])
    close(raw_gae(rewards, mask, values), [[0.46575, 0, 0, 0.385, 0.3]])


def test_a_missing_reward_teaches_the_critic_nothing() -> None:
    rewards, values = doubles([[0, 1], [0, math.nan]]), doubles([[0.25, 0.5], [0.5, 0.75]])
    mask, valid = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False])
    advantages, returns = gae(rewards, mask, values=values, lam=0.0, valid=valid)
    close(returns, [[0.5, 1.0], [0.5, 0.75]])
    close(advantages, [[-math.sqrt(0.5), math.sqrt(0.5)], [0, 0]], 1e-6)


def test_reinforce_plus_plus_discounts_the_reward_to_go() -> None:
    rewards, mask = doubles([[0, 1, 7], [2, 0, 4]]), torch.tensor([[True, True, False], [True, False, True]])
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.5)
    close(returns, [[0.5, 1, 0], [4, 0, 4]])
    # of 0.5, 1, 4, 4: mean 2.375, squares 3.515625 + 1.890625 + 2 · 2.640625, over 3
    std = math.sqrt(10.6875 / 3)
    close(advantages, [[-1.875 / std, -1.375 / std, 0], [1.625 / std, 0, 1.625 / std]], 1e-6)


def test_remax_takes_the_greedy_score_off() -> None:
    rewards, mask = doubles([[0, 1, 7], [0.5, 0, 1]]), torch.tensor([[True, True, False], [True] * 3])
    advantages, returns = remax(rewards, mask, baseline_scores=torch.tensor([0.25, 2.0]))
    close(returns, [[1, 1, 0], [1.5, 1, 1]])
    close(advantages, [[0.75, 0.75, 0], [-0.5, -1, -1]])


def test_remax_gives_a_sample_without_a_score_nothing() -> None:
    rewards, baseline = doubles([[1.0, 1.0], [2.0, 1.0]]), torch.tensor([math.nan, 1.0])
    valid = torch.tensor([False, True])
    advantages, returns = remax(rewards, torch.ones(2, 2).bool(), baseline_scores=baseline, valid=valid)
    close(advantages, [[0, 0], [2, 0]])
    close(returns, [[0, 0], [3, 1]])


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The recursion by Python floats, from the last token back."""
    advantages, later_advantage, later_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later_advantage = reward + gamma * later_value - value + gamma * lam * later_advantage
        later_value = value
        advantages.insert(0, later_advantage)
    return advantages


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    width=st.integers(1, 40),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_the_sums_without_a_loop_are_those_of_the_loop(seed: int, width: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, width, generator=generator) < 0.7
    actual = raw_gae(rewards, mask, values, gamma, lam)
    _, returns = reinforce_plus_plus(rewards, mask, gamma=gamma)
    for row in range(3):
        reward, value = rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist()
        expected = plain_gae(reward, value, gamma, lam)
        assert actual[row][mask[row]].tolist() == pytest.approx(expected, rel=0, abs=1e-9)
        to_go = plain_gae(reward, [0.0] * len(reward), gamma, 1.0)
        assert returns[row][mask[row]].tolist() == pytest.approx(to_go, rel=0, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(ALONG_SEQUENCES), seed=st.integers(0, 2**16), padding=st.integers(0, 5))
def test_row_order_and_tokens_outside_do_not_matter(name: str, seed: int, padding: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    expected = by_name(name, rewards, mask, values)

    order, wide = torch.randperm(6, generator=generator), torch.nn.functional.pad(mask, (0, padding))
    noise = torch.full((6, padding), math.nan)
    noisy = [torch.cat([tensor.masked_fill(~mask, math.inf), noise], dim=1) for tensor in (rewards, values)]
    actual = by_name(name, noisy[0][order], wide[order], noisy[1][order])
    for one, other in zip(actual, expected, strict=True):
        close(one[:, :5], other[order], 1e-7)
        assert not one[~wide[order]].any()


@pytest.mark.case("R02")
@pytest.mark.parametrize("name", ALONG_SEQUENCES)
def test_a_missing_reward_changes_nothing_for_the_others(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    mask, valid = torch.ones(4, 3, dtype=torch.bool), torch.tensor([True, False, True, True])
    rewards[1] = math.nan
    actual, expected = (
        by_name(name, rewards, mask, values, valid),
        by_name(name, rewards[valid], mask[valid], values[valid]),
    )
    for one, other in zip(actual, expected, strict=True):
        close(one[valid], other, 1e-12)
    assert not actual[0][1].any()


@pytest.mark.parametrize("name", ALONG_SEQUENCES)
def test_nothing_in_gives_nothing_out(name: str) -> None:
    for shape in ((0, 4), (3, 4), (3, 0)):
        zeros = torch.zeros(shape)
        advantages, returns = by_name(name, zeros, zeros.bool(), zeros)
        assert advantages.shape == returns.shape == shape and not advantages.any() and not returns.any()


@pytest.mark.parametrize("name", ALONG_SEQUENCES)
def test_arguments_are_not_changed_and_no_gradient_flows(name: str) -> None:
    rewards, values = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    before = (rewards.detach().clone(), values.detach().clone())
    advantages, returns = by_name(name, rewards, torch.ones(3, 4).bool(), values)
    returns += 1
    advantages += 1
    assert not advantages.requires_grad and advantages.dtype == torch.float32
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1])


@pytest.mark.case("A05")
def test_one_token_is_not_whitened_and_none_is_zero() -> None:
    assert whiten(doubles([[0.7, 5.0]]), torch.tensor([[True, False]])).tolist() == [[0.7, 0.0]]
    assert whiten(doubles([[0.7, 5.0]]), torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]
    assert whiten(torch.zeros(0, 2), torch.zeros(0, 2).bool()).shape == (0, 2)


@pytest.mark.case("A05")
def test_whitening_takes_the_unbiased_variance_under_the_mask() -> None:
    mask = torch.tensor([[True, True, True, False]])
    for outside in (100.0, math.nan, -math.inf):
        close(whiten(doubles([[1, 2, 3, outside]]), mask), [[-1, 0, 1, 0]], 1e-7)


@pytest.mark.case("A02")
@pytest.mark.parametrize("size", [2, 6, 7, 11])
def test_equal_tokens_are_whitened_to_exactly_zero(size: int) -> None:
    for value in (0.1, 0.6, 0.35, 1e20):
        assert not whiten(torch.full((size, 1), value), torch.ones(size, 1).bool()).any()


def test_the_epsilon_of_whitening_stands_inside_the_root() -> None:
    values = doubles([[1e-4, -1e-4]])  # ddof 1: variance 2e-8
    expected = 1e-4 / math.sqrt(2e-8 + 1e-8)
    close(whiten(values, torch.ones(1, 2).bool()), [[expected, -expected]], 1e-12)


def test_wrong_arguments_are_named() -> None:
    rewards, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"gamma is 1.5; it must be a number from 0 to 1"):
        gae(rewards, mask, values=rewards, gamma=1.5)
    with pytest.raises(ConfigError, match=r"lam is nan"):
        gae(rewards, mask, values=rewards, lam=math.nan)
    with pytest.raises(ConfigError, match=r"gamma is -1"):
        reinforce_plus_plus(rewards, mask, gamma=-1)
    with pytest.raises(ValueError, match=r"values is \[3, 2\] torch.float32 .* \[2, 3\]"):
        gae(rewards, mask, values=rewards.T)
    with pytest.raises(NonFiniteError, match=r"values \[2, 3\] has 6 .* row 0, token 0: nan"):
        gae(rewards, mask, values=rewards + math.nan)
    with pytest.raises(NonFiniteError, match=r"token_rewards \[2, 3\] has 6"):
        reinforce_plus_plus(rewards + math.inf, mask)
    with pytest.raises(ValueError, match=r"baseline_scores has the shape \[2, 1\]; it must be \[B\] = \[2\]"):
        remax(rewards, mask, baseline_scores=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"baseline_scores is \[3, 1\]"):
        remax(rewards, mask, baseline_scores=torch.zeros(3))
    with pytest.raises(NonFiniteError, match=r"baseline_scores .* row 1, token 0: inf"):
        remax(rewards, mask, baseline_scores=torch.tensor([0.0, math.inf]))
    with pytest.raises(ValueError, match=r"mask is \[2, 3\] torch.float32"):
        whiten(rewards, mask.float())
