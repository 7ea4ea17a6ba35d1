"""Clip-Cov and KL-Cov against numbers by hand, and the choice of their tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms.covariance_losses import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from moonshift.core.errors import ConfigError

# means -2 and 0.5; covariances (A - 0.5)(lp + 2): 1.5, -1.5, 0.0, 0.0, 2.5, -2.5, of 6 tokens; a seventh is outside
LOG_PROBS = torch.tensor([[-1.0, -1.0, -2.0, -9.0], [-2.0, -3.0, -3.0, -9.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, -1.0, 0.5, 90.0], [0.5, -2.0, 3.0, 90.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]] * 2)


def test_kl_cov_takes_the_highest_covariances() -> None:
    for ratio, expected in ((0.0, [[1, 1]]), (0.34, [[0, 0], [1, 1]]), (0.17, [[1, 1]])):
        selected = select_kl_cov(LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK, kl_cov_ratio=ratio)
        assert selected.nonzero().tolist() == expected
    assert torch.equal(select_kl_cov(LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK, kl_cov_ratio=1.0), MASK)


def test_kl_cov_takes_the_first_of_equals() -> None:
    flat = torch.zeros(2, 4, dtype=torch.float64)
    selected = select_kl_cov(flat, flat, flat, MASK, kl_cov_ratio=0.5)
    assert selected.nonzero().tolist() == [[0, 0], [0, 1], [0, 2]]


def test_clip_cov_draws_from_the_tokens_between_the_bounds() -> None:
    args = (LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)
    options = {"clip_cov_ratio": 1.0, "seed": 0}
    assert select_clip_cov(*args, clip_cov_lb=1.0, clip_cov_ub=5.0, **options).nonzero().tolist() == [[0, 0], [1, 1]]
    assert select_clip_cov(*args, clip_cov_lb=1.5, clip_cov_ub=5.0, **options).nonzero().tolist() == [[1, 1]]
    assert select_clip_cov(*args, clip_cov_lb=1.0, clip_cov_ub=2.5, **options).nonzero().tolist() == [[0, 0]]
    assert not select_clip_cov(*args, clip_cov_lb=2.5, clip_cov_ub=5.0, **options).any()


def test_clip_cov_leaves_alone_what_the_clip_holds_already() -> None:
    old = LOG_PROBS.clone()
    old[0, 0] -= 1.0  # a good token, ratio e: clipped
    old[1, 1] -= 1.0  # a bad token, ratio e: free
    selected = select_clip_cov(LOG_PROBS, old, ADVANTAGES, MASK, seed=0, clip_cov_ratio=1.0)
    assert selected.nonzero().tolist() == [[1, 1]]


def random_batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(8, 50, generator=generator, dtype=torch.float64) - 2
    advantages = 2 * torch.randn(8, 50, generator=generator, dtype=torch.float64)
    return log_probs, log_probs.clone(), advantages, torch.rand(8, 50, generator=generator) < 0.8


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), ratio=st.floats(0.0, 0.2), width=st.integers(0, 3))
def test_the_draw_has_its_size_and_depends_on_the_seed_alone(seed: int, ratio: float, width: int) -> None:
    args = random_batch(seed)
    torch.manual_seed(seed + width)
    first = select_clip_cov(*args, seed=seed, clip_cov_ratio=ratio)
    torch.rand(3)
    new, old, gain = (torch.cat([value, torch.full_like(value[:, :width], math.nan)], 1) for value in args[:3])
    mask = torch.cat([args[3], torch.zeros_like(args[3][:, :width])], 1)
    again = select_clip_cov(new, old, gain, mask, seed=seed, clip_cov_ratio=ratio)
    assert torch.equal(again[:, :50], first) and not again[:, 50:].any()

    log_probs, _, advantages, inside = args
    centred = (advantages - advantages[inside].mean()) * (log_probs - log_probs[inside].mean())
    candidates = inside & (centred > 1) & (centred < 5)
    assert not (first & ~candidates).any()
    assert int(first.sum()) == min(int(candidates.sum()), max(1, int(ratio * int(inside.sum()))))
    highest = select_kl_cov(*args, kl_cov_ratio=ratio)
    assert int(highest.sum()) == max(1, int(ratio * int(inside.sum()))) and not (highest & ~inside).any()
    assert centred[highest].min() >= centred[inside & ~highest].max()


def test_another_seed_draws_other_tokens() -> None:
    draws = [select_clip_cov(*random_batch(1), seed=seed, clip_cov_ratio=0.05) for seed in range(2)]
    assert not torch.equal(*draws)


def test_without_a_token_nothing_is_selected() -> None:
    nothing = torch.zeros_like(MASK)
    assert not select_clip_cov(LOG_PROBS, LOG_PROBS, ADVANTAGES, nothing, seed=0).any()
    assert not select_kl_cov(LOG_PROBS, LOG_PROBS, ADVANTAGES, nothing).any()


def losses_at(ratios: list[float], advantages: list[float], selected: list[bool], loss: str) -> list[list[float]]:
    old = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    log_probs = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    mask, marks = torch.ones_like(old, dtype=torch.bool), torch.tensor([selected])
    tensors = (log_probs, old, torch.tensor([advantages], dtype=torch.float64), mask)
    found = clip_cov(*tensors, selected=marks) if loss == "clip" else kl_cov(*tensors, selected=marks, ppo_kl_coef=0.5)
    (slope,) = torch.autograd.grad(found.token_losses.sum(), log_probs)
    assert found.metrics["actor/cov_selected"][0].item() == sum(selected)
    return [found.token_losses[0].tolist(), slope[0].tolist()]


def test_a_token_that_clip_cov_selects_has_neither_loss_nor_gradient() -> None:
    losses, slopes = losses_at([1.5, 1.1, 1.1, 9.0], [1.0, 1.0, 1.0, -1.0], [False, False, True, False], "clip")
    assert losses == pytest.approx([-1.2, -1.1, 0.0, 9.0], abs=1e-12)  # no dual clip
    assert slopes == pytest.approx([0.0, -1.1, 0.0, 9.0], abs=1e-12)


def test_a_token_that_kl_cov_selects_is_pulled_back_from_both_sides() -> None:
    losses, slopes = losses_at([1.5, 1.5, 0.5], [1.0] * 3, [False, True, True], "kl")
    expected = [-1.5, -1.5 + 0.5 * math.log(1.5), -0.5 + 0.5 * math.log(2)]
    assert losses == pytest.approx(expected, abs=1e-12)
    assert slopes == pytest.approx([-1.5, -1.5 + 0.5, -0.5 - 0.5], abs=1e-12)


def test_wrong_arguments_are_named() -> None:
    args = (LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)
    for loss in (clip_cov, kl_cov):
        with pytest.raises(ValueError, match=r"selected is \[2, 3\] torch.bool .* \[2, 4\] torch.bool"):
            loss(*args, selected=MASK[:, :3])
        with pytest.raises(ValueError, match=r"selected is \[2, 4\] torch.int64"):
            loss(*args, selected=MASK.long())
    with pytest.raises(ConfigError, match=r"kl_cov_ratio is 1.5; .*within \[0, 1\]"):
        select_kl_cov(*args, kl_cov_ratio=1.5)
    with pytest.raises(ConfigError, match=r"clip_cov_ub is 1.0; .*> 2"):
        select_clip_cov(*args, seed=0, clip_cov_lb=2.0, clip_cov_ub=1.0)
    with pytest.raises(ConfigError, match=r"clip_ratio_low is -1.0; .*>= 0"):
        select_clip_cov(*args, seed=0, clip_ratio_low=-1.0)
