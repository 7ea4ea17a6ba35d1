"""The critic's loss against hand-computed numbers and derivatives, and how its parts add up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms.aggregate import aggregate
from moonshift.core.algorithms.value import explained_variance, value_loss
from moonshift.core.errors import ConfigError, NonFiniteError


def doubles(rows: list[list[float]], *, gradient: bool = False) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=gradient)


def test_value_and_slope_by_hand() -> None:
    # moved towards the return and past the range; away from it; inside the range; below it
    values = doubles([[2.0, -2.0, 0.25, -2.0]], gradient=True)
    old, returns = doubles([[0.0] * 4]), doubles([[3.0, 3.0, 3.0, -3.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    loss = value_loss(values, old, returns, mask, cliprange_value=0.5)
    (slope,) = torch.autograd.grad(loss.token_losses.sum(), values)
    assert loss.token_losses.tolist() == [[3.125, 12.5, 0.5 * 2.75**2, 3.125]]
    assert slope.tolist() == [[0.0, -5.0, -2.75, 0.0]]
    metrics = {name: (float(total), float(count)) for name, (total, count) in loss.metrics.items()}
    assert metrics == {"critic/vf_clipfrac": (2.0, 4.0), "critic/vpred_mean": (-1.75, 4.0)}


def test_at_the_old_values_the_loss_is_half_the_squared_error() -> None:
    values = doubles([[0.5, 1.0]], gradient=True)
    for cliprange in (0.0, 0.5, 1e9):
        loss = value_loss(
            values, values.detach(), doubles([[1.0, 3.0]]), torch.tensor([[True, True]]), cliprange_value=cliprange
        )
        (slope,) = torch.autograd.grad(loss.token_losses.sum(), values)
        assert loss.token_losses.tolist() == [[0.125, 2.0]] and slope.tolist() == [[-0.5, -2.0]]
        assert loss.metrics["critic/vf_clipfrac"][0] == 0


def test_the_derivative_is_that_of_the_value() -> None:
    generator = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.8

    def losses(inputs: Tensor) -> Tensor:
        return value_loss(inputs, old, returns, mask, cliprange_value=0.3).token_losses

    assert torch.autograd.gradcheck(losses, (values.requires_grad_(),))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 6))
def test_micro_batches_add_up_and_tokens_outside_are_never_read(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.6
    counts = {"num_tokens": int(mask.sum()), "num_sequences": 6}
    whole = value_loss(values, old, returns, mask)
    expected = aggregate(whole.token_losses, mask, "token-mean", **counts)

    noisy = values.masked_fill(~mask, math.nan).requires_grad_()
    old, returns = old.masked_fill(~mask, math.inf), returns.masked_fill(~mask, math.nan)
    parts = torch.randperm(6, generator=generator).split(size)
    losses = [value_loss(noisy[rows], old[rows], returns[rows], mask[rows]) for rows in parts]
    shares = [
        aggregate(loss.token_losses, mask[rows], "token-mean", **counts)
        for loss, rows in zip(losses, parts, strict=True)
    ]
    total = torch.stack(shares).sum()
    (slope,) = torch.autograd.grad(total, noisy)
    torch.testing.assert_close(total.detach(), expected, rtol=0, atol=1e-12)
    assert bool(torch.isfinite(slope).all()) and not slope[~mask].any()
    for name, pair in whole.metrics.items():
        for index in (0, 1):
            part_sum = torch.stack([loss.metrics[name][index] for loss in losses]).sum()
            torch.testing.assert_close(part_sum, pair[index], rtol=0, atol=1e-12)


def test_without_a_token_loss_and_gradient_are_zero() -> None:
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    loss = value_loss(values, values, values, torch.zeros(1, 2, dtype=torch.bool))
    loss.token_losses.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[0.0, 0.0]]
    assert loss.token_losses.tolist() == [[0.0, 0.0]]
    assert all(float(part) == 0 for pair in loss.metrics.values() for part in pair)


def test_explained_variance_by_hand() -> None:
    returns, mask = doubles([[1, 2, 3, math.nan]]), torch.tensor([[True, True, True, False]])
    for values, expected in (([1, 2, 2], 2 / 3), ([1, 2, 3], 1.0), ([11, 12, 13], 1.0), ([0, 0, 0], 0.0)):
        actual = explained_variance(doubles([[*values, math.inf]]), returns, mask)
        assert float(actual) == pytest.approx(expected, rel=0, abs=1e-12)
    assert float(explained_variance(doubles([[3, 2, 1, 0]]), returns, mask)) == pytest.approx(-3)


def test_equal_returns_leave_nothing_to_explain() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0]])
    assert float(explained_variance(values, torch.full((1, 3), 0.1), torch.ones(1, 3).bool())) == 0.0
    assert float(explained_variance(values, values, torch.zeros(1, 3).bool())) == 0.0


def test_wrong_arguments_are_named() -> None:
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"cliprange_value is -0.5; .*>= 0"):
        value_loss(zeros, zeros, zeros, mask, cliprange_value=-0.5)
    with pytest.raises(ValueError, match=r"old_values is \[3, 2\] torch.float32 .* \[2, 3\]"):
        value_loss(zeros, zeros.T, zeros, mask)
    with pytest.raises(NonFiniteError, match=r"returns \[2, 3\] has 6 .* row 0, token 0: nan"):
        value_loss(zeros, zeros, zeros + math.nan, mask)
    with pytest.raises(ValueError, match=r"values is \[2, 3\] torch.bfloat16"):
        explained_variance(zeros.bfloat16(), zeros, mask)
