"""GRPO's advantages against hand-computed numbers, and what must not change them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms.advantage import grpo
from moonshift.core.algorithms.checks import lookup
from moonshift.core.algorithms.estimators import ADVANTAGE_ESTIMATORS
from moonshift.core.errors import ConfigError, NonFiniteError


def advantages_of(
    rewards: list[float],
    groups: list[int],
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    dtype: torch.dtype = torch.float64,
    valid: list[bool] | None = None,
) -> Tensor:
    """One advantage a sequence; three response tokens each, the reward on the last, as the score stage leaves it."""
    token_rewards = torch.zeros(len(rewards), 3, dtype=dtype)
    token_rewards[:, 2] = torch.tensor(rewards, dtype=dtype)
    mask = torch.ones(len(rewards), 3, dtype=torch.bool)
    advantages, returns = grpo(
        token_rewards,
        mask,
        torch.tensor(groups),
        norm_by_std=norm_by_std,
        epsilon=epsilon,
        valid=None if valid is None else torch.tensor(valid),
    )
    assert advantages.dtype == dtype and torch.equal(advantages, returns)
    assert torch.equal(advantages, advantages[:, :1].expand(-1, 3))
    return advantages[:, 0]


def close(actual: Tensor, expected: list[float], tolerance: float = 1e-6) -> bool:
    return torch.allclose(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


@pytest.mark.case("A01")
def test_rewards_are_normalised_within_their_group() -> None:
    expected = [1.499997, -0.499999, -0.499999, -0.499999, 0.499999, 0.499999, 0.499999, -1.499997]
    assert close(advantages_of([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4), expected)


@pytest.mark.case("A01")
def test_without_the_std_only_the_mean_is_taken_off() -> None:
    actual = advantages_of([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, norm_by_std=False)
    assert actual.tolist() == [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]


def test_epsilon_stands_outside_the_root() -> None:
    # mean 2, squares 1 + 0 + 1, ddof 1: std 1
    assert close(advantages_of([1, 2, 3], [0, 0, 0], epsilon=0.25), [-0.8, 0.0, 0.8], 1e-12)


@pytest.mark.case("A02")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.6, 0.1, 0.3, 0.35, 0.7, -1e30])
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, dtype: torch.dtype, norm_by_std: bool) -> None:
    for size in (6, 7, 11):
        for epsilon in (1e-6, 0.0):
            actual = advantages_of([reward] * size, [0] * size, dtype=dtype, norm_by_std=norm_by_std, epsilon=epsilon)
            assert actual.tolist() == [0.0] * size


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_one_has_no_signal(norm_by_std: bool) -> None:
    actual = advantages_of([5.0, 1.0, 0.0], [7, 2, 2], norm_by_std=norm_by_std, epsilon=0.0)
    half = 1 / math.sqrt(2) if norm_by_std else 0.5
    assert close(actual, [0.0, half, -half], 1e-12)


@pytest.mark.case("D06")
def test_two_rows_with_the_same_text_stay_two_groups() -> None:
    # rows a, b hold the same prompt; their uids are groups 0 and 1. ddof 1 of (1, 0): std 1/sqrt(2)
    assert close(advantages_of([1, 0, 1, 1], [0, 0, 1, 1], epsilon=0.0), [0.707107, -0.707107, 0.0, 0.0])


@pytest.mark.case("R02")
@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf, 1e30])
def test_a_missing_reward_is_left_out(missing: float) -> None:
    actual = advantages_of([1.0, missing, 0.0, 1.0], [0] * 4, epsilon=0.0, valid=[True, False, True, True])
    assert close(actual, [0.57735, 0.0, -1.154701, 0.57735])


def test_a_group_with_one_reward_left_has_no_signal() -> None:
    actual = advantages_of([3.0, math.nan, 1.0, 2.0], [0, 0, 1, 1], norm_by_std=False, valid=[True, False, True, True])
    assert actual.tolist() == [0.0, 0.0, -0.5, 0.5]


def test_no_reward_at_all_gives_zero() -> None:
    assert advantages_of([math.nan] * 3, [0, 0, 1], epsilon=0.0, valid=[False] * 3).tolist() == [0.0] * 3


def test_rewards_far_from_zero_keep_their_digits() -> None:
    # 2**40 + (0, 1, 2): mean and differences are exact in float64, E[x²] - E[x]² would not be
    assert close(advantages_of([2**40, 2**40 + 1, 2**40 + 2], [0, 0, 0], epsilon=0.0), [-1.0, 0.0, 1.0], 1e-12)


def test_token_rewards_of_a_sequence_are_summed_inside_the_mask() -> None:
    token_rewards = torch.tensor([[0.5, 0.5, math.nan], [0.25, 9.0, -0.25]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    advantages, _ = grpo(token_rewards, mask, torch.tensor([0, 0]), norm_by_std=False)
    assert advantages.tolist() == [[0.5, 0.5, 0.0], [-0.5, 0.0, -0.5]]


def test_an_empty_batch_is_answered_with_an_empty_batch() -> None:
    empty = torch.zeros(0, 4)
    advantages, returns = grpo(empty, empty.bool(), torch.zeros(0, dtype=torch.int64))
    assert advantages.shape == returns.shape == (0, 4)


def test_arguments_are_not_changed_and_no_gradient_flows() -> None:
    token_rewards = torch.tensor([[1.0], [0.0]], requires_grad=True)
    before = token_rewards.detach().clone()
    advantages, returns = grpo(token_rewards, torch.ones(2, 1, dtype=torch.bool), torch.tensor([0, 0]))
    returns += 1
    assert not advantages.requires_grad and advantages[0, 0] > 0 > advantages[1, 0]
    assert torch.equal(token_rewards, before)


def plain_grpo(rewards: list[float], groups: list[int], epsilon: float) -> list[float]:
    """The same by Python floats, one sample at a time."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [other for other, its_group in zip(rewards, groups, strict=True) if its_group == group]
        if max(peers) == min(peers):
            advantages.append(0.0)
            continue
        mean = math.fsum(peers) / len(peers)
        std = math.sqrt(math.fsum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
        advantages.append((reward - mean) / (std + epsilon))
    return advantages


SAMPLES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-2, 4)), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, shift=st.integers(-50, 50), seed=st.integers(0, 2**16))
def test_order_shift_and_names_of_groups_do_not_matter(samples: list[tuple[int, int]], shift: int, seed: int) -> None:
    rewards, groups = [float(reward) for reward, _ in samples], [group for _, group in samples]
    expected = torch.tensor(plain_grpo(rewards, groups, 1e-6), dtype=torch.float64)
    actual = advantages_of([reward + shift for reward in rewards], [group * 1000 - 7 for group in groups])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)

    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = advantages_of([rewards[row] for row in order], [groups[row] for row in order])
    torch.testing.assert_close(shuffled, expected[order], rtol=0, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), width=st.integers(0, 4))
def test_tokens_outside_the_mask_and_padding_do_not_matter(seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    token_rewards = torch.randn(8, 5, generator=generator)
    mask = torch.rand(8, 5, generator=generator) < 0.6
    groups = torch.randint(0, 3, (8,), generator=generator)
    expected, _ = grpo(token_rewards.masked_fill(~mask, 0.0), mask, groups)

    noisy = torch.cat([token_rewards.masked_fill(~mask, math.nan), torch.full((8, width), math.inf)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(8, width, dtype=torch.bool)], dim=1)
    actual, _ = grpo(noisy, wide_mask, groups)
    torch.testing.assert_close(actual[:, :5], expected, rtol=0, atol=1e-5)
    assert not actual[~wide_mask].any()


def test_an_unknown_estimator_is_named_with_those_that_exist() -> None:
    assert lookup("algorithm.adv_estimator", "grpo", ADVANTAGE_ESTIMATORS).compute is grpo
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator is 'gropo'; it must be one of .*grpo"):
        lookup("algorithm.adv_estimator", "gropo", ADVANTAGE_ESTIMATORS)


def test_a_wrong_argument_is_named_with_its_shape() -> None:
    rewards, mask, groups = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"token_rewards is \[2, 4\] torch.float32 .* \[2, 3\]"):
        grpo(torch.zeros(2, 4), mask, groups)
    with pytest.raises(ValueError, match=r"token_rewards is \[2, 3\] torch.int64"):
        grpo(rewards.long(), mask, groups)
    with pytest.raises(ValueError, match=r"response_mask is \[2, 3\] torch.float32 .*torch.bool"):
        grpo(rewards, mask.float(), groups)
    with pytest.raises(ValueError, match=r"groups is \[3\] torch.int64 .* \[2\] torch.int64"):
        grpo(rewards, mask, torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"valid is \[2\] torch.int64 .* \[2\] torch.bool"):
        grpo(rewards, mask, groups, valid=torch.tensor([1, 0]))
    with pytest.raises(ConfigError, match=r"epsilon is -1; .*>= 0"):
        grpo(rewards, mask, groups, epsilon=-1)


def test_a_reward_that_is_not_finite_is_found_by_row_and_token() -> None:
    rewards = torch.tensor([[0.0, 0.0], [0.0, math.nan]])
    mask, groups = torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 0])
    with pytest.raises(NonFiniteError, match=r"token_rewards \[2, 2\] has 1 .* row 1, token 1: nan") as caught:
        grpo(rewards, mask, groups)
    assert isinstance(caught.value, ValueError)
