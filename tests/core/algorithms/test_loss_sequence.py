"""GSPO and GMPO against numbers by hand, and against their objectives by sequence."""

import math

import pytest
import torch
from torch import Tensor

from moonshift.core.algorithms import aggregate
from moonshift.core.algorithms.sequence_losses import geo_mean, gspo

OLD = torch.full((2, 3), -1.0, dtype=torch.float64)
LOG_RATIO = torch.tensor([[0.3, -0.1, 9.0], [0.2, 0.2, -0.7]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])
ADVANTAGES = torch.tensor([[1.0] * 3, [-2.0] * 3], dtype=torch.float64)


def numeric_slope(objective: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(objective, leaf)[0]


def test_gspo_has_one_ratio_a_sequence_over_its_own_tokens() -> None:
    # mean log-ratios 0.2 / 2 = 0.1 and -0.3 / 3 = -0.1
    loss = gspo(OLD + LOG_RATIO, OLD, ADVANTAGES, MASK, clip_ratio_low=0.5, clip_ratio_high=0.5)
    up, down = math.exp(0.1), math.exp(-0.1)
    expected = [-up, -up, 0.0, 2 * down, 2 * down, 2 * down]
    assert loss.token_losses.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    assert loss.metrics["actor/pg_clipfrac"][0].item() == 0.0


def test_gspo_clips_the_whole_sequence() -> None:
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    loss = gspo(log_probs, OLD, ADVANTAGES, MASK, clip_ratio_low=0.05, clip_ratio_high=0.06)
    assert loss.token_losses.flatten().tolist() == pytest.approx([-1.06, -1.06, 0.0] + [1.9] * 3, abs=1e-12)
    assert not torch.autograd.grad(loss.token_losses.sum(), log_probs)[0].any()
    assert [float(value) for value in loss.metrics["actor/pg_clipfrac"]] == [5.0, 5.0]


def test_gspo_has_the_gradient_of_the_objective_by_sequence() -> None:
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    loss = gspo(log_probs, OLD, ADVANTAGES, MASK, clip_ratio_low=0.5, clip_ratio_high=0.5)
    counts = {"num_tokens": 5, "num_sequences": 2}
    total = aggregate(loss.token_losses, MASK, "seq-mean-token-mean", **counts)
    means = torch.stack([(log_probs - OLD)[0, :2].mean(), (log_probs - OLD)[1].mean()])
    by_sequence = -(means.exp() * ADVANTAGES[:, 0]).mean()
    assert total.item() == pytest.approx(by_sequence.item(), abs=1e-12)
    torch.testing.assert_close(numeric_slope(total, log_probs), numeric_slope(by_sequence, log_probs))


def test_gspo_stops_at_the_clamp_of_the_mean_and_not_of_a_token() -> None:
    log_ratio = torch.tensor([[40.0, -38.0]], dtype=torch.float64)  # mean 1
    args = (torch.zeros(1, 2).double(), torch.ones(1, 2).double(), torch.ones(1, 2, dtype=torch.bool))
    loss = gspo(log_ratio, *args, clip_ratio_high=9.0)
    assert loss.token_losses.flatten().tolist() == pytest.approx([-math.e, -math.e], abs=1e-12)


def test_geo_mean_clips_in_log_space_and_in_the_direction_of_the_advantage() -> None:
    # row 0, A = 1: min(0.3, 0.2), -0.1: mean 0.05; row 1, A = -2: 0.2, 0.2, max(-0.7, -0.4): mean 0
    loss = geo_mean(OLD + LOG_RATIO, OLD, ADVANTAGES, MASK, clip_ratio_low=0.4, clip_ratio_high=0.2)
    expected = [-math.exp(0.05)] * 2 + [0.0] + [2.0] * 3
    assert loss.token_losses.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    assert [float(value) for value in loss.metrics["actor/pg_clipfrac"]] == [2.0, 5.0]


def test_geo_mean_spreads_its_sequences_loss_so_that_the_mean_of_means_gives_it_back() -> None:
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    loss = geo_mean(log_probs, OLD, ADVANTAGES, MASK, clip_ratio_low=0.4, clip_ratio_high=0.2)
    total = aggregate(loss.token_losses, MASK, "seq-mean-token-mean", num_tokens=5, num_sequences=2)
    assert total.item() == pytest.approx((-math.exp(0.05) + 2.0) / 2, abs=1e-12)
    slope = numeric_slope(total, log_probs)
    # -A R / (length x sequences) where unclipped
    expected = [0.0, -math.exp(0.05) / 4, 0.0, 2 / 6, 2 / 6, 0.0]
    assert slope.flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_geo_mean_takes_the_mean_advantage_and_a_token_without_one_stands_still() -> None:
    advantages = torch.tensor([[3.0, 0.0, -1.0]], dtype=torch.float64)
    log_ratio = torch.tensor([[0.1, 0.3, -0.2]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = geo_mean(OLD[:1] + log_ratio, OLD[:1], advantages, mask)
    expected = -(2 / 3) * math.exp((0.1 + 0.0 - 0.2) / 3)
    assert loss.token_losses.flatten().tolist() == pytest.approx([expected] * 3, abs=1e-12)


def test_geo_mean_weighs_a_sequence_by_the_geometric_mean() -> None:
    weights = torch.tensor([[2.0, 8.0, 5.0], [1.0, 0.0, 3.0]], dtype=torch.float64)
    plain = geo_mean(OLD + LOG_RATIO, OLD, ADVANTAGES, MASK).token_losses
    weighed = geo_mean(OLD + LOG_RATIO, OLD, ADVANTAGES, MASK, weights=weights).token_losses
    torch.testing.assert_close(weighed[0], 4 * plain[0], rtol=0, atol=1e-12)
    assert not weighed[1].any()
