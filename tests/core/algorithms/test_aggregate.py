"""Aggregation against hand-computed numbers, and its one promise: the split does not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms import LOSS_AGG_MODES, aggregate
from moonshift.core.errors import ConfigError, NonFiniteError

WIDTH = 8
LENGTHS = (2, 2, 6)
EXPECTED = {
    "token-mean": 0.8,
    "token-sum": 8.0,
    "seq-mean-token-mean": 4 / 3,
    "seq-mean-token-sum": 8 / 3,
    "seq-mean-token-sum-norm": 1 / 3,
}
SLOPE_PER_TOKEN = {  # d loss / d token loss, for the three sequences
    "token-mean": [1 / 10] * 3,
    "token-sum": [1.0] * 3,
    "seq-mean-token-mean": [1 / 6, 1 / 6, 1 / 18],
    "seq-mean-token-sum": [1 / 3] * 3,
    "seq-mean-token-sum-norm": [1 / 24] * 3,
}
SPLITS = ([[0, 1], [2]], [[0], [1], [2]], [[0, 1, 2]], [[2, 0], [1]])


def case_b01() -> tuple[Tensor, Tensor]:
    losses = torch.zeros(3, WIDTH, dtype=torch.float64)
    losses[0, :2], losses[1, :2] = 1.0, 3.0
    losses[:, 7] = 100.0  # behind every response
    return losses, torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]


def in_parts(loss: Tensor, mask: Tensor, mode: str, parts: list[list[int]]) -> Tensor:
    counts = {"num_tokens": int(mask.sum()), "num_sequences": len(mask), "scale_factor": float(WIDTH)}
    return torch.stack([aggregate(loss[part], mask[part], mode, **counts) for part in parts]).sum()


def test_every_mode_has_a_number_by_hand() -> None:
    assert set(EXPECTED) == set(LOSS_AGG_MODES)


@pytest.mark.case("B01")
@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("parts", SPLITS)
def test_the_split_into_micro_batches_changes_neither_loss_nor_gradient(mode: str, parts: list[list[int]]) -> None:
    losses, mask = case_b01()
    losses.requires_grad_()
    loss = in_parts(losses, mask, mode, parts)
    (slope,) = torch.autograd.grad(loss, losses)
    assert abs(loss.item() - EXPECTED[mode]) < 1e-12
    expected = torch.tensor(SLOPE_PER_TOKEN[mode], dtype=torch.float64)[:, None] * mask
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)


@pytest.mark.case("B02")
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_nothing_is_divided_twice(num_micro_batches: int) -> None:
    weight = torch.tensor(1.0, requires_grad=True)
    mask = torch.ones(4, 3, dtype=torch.bool)
    for rows in torch.arange(4).chunk(num_micro_batches):
        loss = (weight * 2.0).expand(len(rows), 3)
        aggregate(loss, mask[rows], "token-mean", num_tokens=12, num_sequences=4).backward()
    assert weight.grad is not None and abs(weight.grad.item() - 2.0) < 1e-6


@pytest.mark.case("B09")
@settings(max_examples=100, deadline=None)
@given(
    mode=st.sampled_from(sorted(EXPECTED)),
    seed=st.integers(0, 99),
    size=st.integers(1, 17),
    padding=st.sampled_from([0, 5]),
    lengths=st.lists(st.integers(0, 9), min_size=17, max_size=17),
)
def test_order_padding_and_split_do_not_matter(
    mode: str, seed: int, size: int, padding: int, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(17, 9, generator=generator) / (100 if mode == "token-sum" else 1)
    mask = torch.arange(9)[None] < torch.tensor(lengths)[:, None]
    whole = in_parts(losses, mask, mode, [list(range(17))])

    order = torch.randperm(17, generator=generator)
    padded = torch.cat([losses.masked_fill(~mask, math.nan), torch.full((17, padding), math.inf)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(17, padding, dtype=torch.bool)], dim=1)
    parts = [part.tolist() for part in order.split(size)]
    assert abs(in_parts(padded, wide_mask, mode, parts).item() - whole.item()) < 1e-6


@pytest.mark.case("G03")
@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("counts", [(0, 0), (0, 2), (10, 4)])
def test_without_a_token_loss_and_gradient_are_zero(mode: str, counts: tuple[int, int]) -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, math.nan]], requires_grad=True)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    loss = aggregate(losses, mask, mode, num_tokens=counts[0], num_sequences=counts[1], scale_factor=8.0)
    loss.backward()
    assert loss.item() == 0.0 and losses.grad is not None and losses.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_batch_without_rows_is_zero_too(mode: str) -> None:
    empty = torch.zeros(0, 3)
    assert aggregate(empty, empty.bool(), mode, num_tokens=4, num_sequences=2, scale_factor=8).item() == 0.0


@pytest.mark.parametrize("mode", EXPECTED)
def test_the_gradient_is_that_of_the_value(mode: str) -> None:
    losses, mask = case_b01()
    losses.requires_grad_()
    assert torch.autograd.gradcheck(lambda values: in_parts(values, mask, mode, [[0, 2], [1]]), (losses,))


def test_wrong_arguments_are_named() -> None:
    losses, mask = case_b01()
    with pytest.raises(ConfigError, match=r"mode is 'mean'; it must be one of .*token-mean"):
        aggregate(losses, mask, "mean", num_tokens=10, num_sequences=3)
    with pytest.raises(ConfigError, match=r"scale_factor is None; seq-mean-token-sum-norm"):
        aggregate(losses, mask, "seq-mean-token-sum-norm", num_tokens=10, num_sequences=3)
    with pytest.raises(ConfigError, match=r"scale_factor is 0; .*> 0"):
        aggregate(losses, mask, "token-sum", num_tokens=10, num_sequences=3, scale_factor=0)
    with pytest.raises(ValueError, match=r"num_tokens is 0 .* has 10 tokens"):
        aggregate(losses, mask, "token-mean", num_tokens=0, num_sequences=3)
    with pytest.raises(ConfigError, match=r"num_tokens is -1; .*>= 0"):
        aggregate(losses, mask, "token-sum", num_tokens=-1, num_sequences=3)
    with pytest.raises(ValueError, match=r"mask is \[3, 8\] torch.float64"):
        aggregate(losses, mask.double(), "token-mean", num_tokens=10, num_sequences=3)
    with pytest.raises(ValueError, match=r"loss is \[3, 7\] .* \[3, 8\]"):
        aggregate(losses[:, :7], mask, "token-mean", num_tokens=10, num_sequences=3)
    losses[2, 5] = math.inf
    with pytest.raises(NonFiniteError, match=r"loss \[3, 8\] has 1 .* row 2, token 5: inf"):
        aggregate(losses, mask, "token-mean", num_tokens=10, num_sequences=3)
