"""What every policy loss promises, whichever it is: split, order, mask, weights, clamps, borders."""

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms import LOSS_AGG_MODES, PolicyLoss, aggregate
from moonshift.core.algorithms.policy_losses import POLICY_LOSSES
from moonshift.core.errors import ConfigError, NonFiniteError

NAMES = sorted(POLICY_LOSSES)
SMOOTH = ["clip_cov", "geo_mean", "gpg", "kl_cov", "reinforce", "sapo", "vanilla"]  # no stop-gradient, kinks apart


def case(seed: int, rows: int = 6, width: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, advantages and mask; the last row has no token."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    log_probs = old + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[-1] = False
    return log_probs, old, advantages, mask


def selection(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
    loss = POLICY_LOSSES[name]
    if loss.select is None:
        return {}
    options: dict[str, float] = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2, "seed": 3}
    chosen = {key: value for key, value in options.items() if key in loss.select_options}
    return {"selected": loss.select(log_probs, old, advantages, mask, **chosen)}


def computed(name: str, tensors: tuple[Tensor, Tensor, Tensor, Tensor], **options: Any) -> PolicyLoss:
    return POLICY_LOSSES[name].compute(*tensors, **(selection(name, *tensors) | options))


def test_the_names_are_those_of_the_configuration() -> None:
    clipped, others = {"vanilla", "gspo", "geo_mean", "clip_cov"}, {"kl_cov", "reinforce", "gpg", "cispo", "sapo"}
    assert set(NAMES) == clipped | others | {"dppo_tv", "dppo_kl"}


@pytest.mark.parametrize("name", NAMES)
def test_the_options_are_exactly_the_keywords(name: str) -> None:
    loss = POLICY_LOSSES[name]
    keywords = set(inspect.signature(loss.compute).parameters) - {
        *("log_probs", "old_log_probs", "advantages", "response_mask", "weights"),
    }
    assert keywords == loss.options | ({"selected"} if loss.select else set())
    if loss.select is not None:
        assert set(list(inspect.signature(loss.select).parameters)[4:]) == loss.select_options
    assert loss.agg_mode is None or loss.agg_mode in LOSS_AGG_MODES


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 2**16),
    size=st.integers(1, 6),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
)
def test_split_order_padding_and_outside_tokens_change_nothing(name: str, seed: int, size: int, mode: str) -> None:
    tensors = case(seed)
    mask = tensors[3]
    counts = {"num_tokens": int(mask.sum()), "num_sequences": len(mask)}
    mode = POLICY_LOSSES[name].agg_mode or mode
    chosen = selection(name, *tensors)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1

    leaf = tensors[0].clone().requires_grad_()
    whole = POLICY_LOSSES[name].compute(leaf, *tensors[1:], weights=weights, **chosen)
    total = aggregate(whole.token_losses, mask, mode, **counts)
    (slope,) = torch.autograd.grad(total, leaf)

    noisy = [
        torch.cat([value.masked_fill(~mask, math.nan), value.new_full((6, 2), math.inf)], 1)
        for value in (*tensors[:3], weights)
    ]
    wide = torch.cat([mask, torch.zeros(6, 2, dtype=torch.bool)], 1)
    marks = {key: torch.cat([value, torch.ones(6, 2, dtype=torch.bool)], 1) for key, value in chosen.items()}
    other = noisy[0].clone().requires_grad_()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    sums: dict[str, list[float]] = {}
    parts = []
    for rows in order.split(size):
        part = POLICY_LOSSES[name].compute(
            other[rows],
            noisy[1][rows],
            noisy[2][rows],
            wide[rows],
            weights=noisy[3][rows],
            **{key: value[rows] for key, value in marks.items()},
        )
        assert not part.token_losses[~wide[rows]].any()
        parts.append(aggregate(part.token_losses, wide[rows], mode, **counts))
        for key, values in part.metrics.items():
            sums.setdefault(key, []).append(values[0].item())
    (other_slope,) = torch.autograd.grad(torch.stack(parts).sum(), other)
    assert torch.stack(parts).sum().item() == pytest.approx(total.item(), abs=1e-12)
    torch.testing.assert_close(other_slope[:, :5], slope, rtol=0, atol=1e-12)
    assert not other_slope[~wide].any()
    for key, (value, count) in whole.metrics.items():
        assert sum(sums[key]) == pytest.approx(value.item(), abs=1e-12) and count.item() == int(mask.sum())


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_slope_of_the_policy_gradient(name: str) -> None:
    log_probs, _, advantages, mask = case(4)
    advantages = advantages[:, :1].expand(6, 5)  # one a sequence
    leaf = log_probs.clone().requires_grad_()
    options = {"selected": torch.zeros_like(mask)} if POLICY_LOSSES[name].select else {}
    loss = POLICY_LOSSES[name].compute(leaf, leaf, advantages, mask, **options)
    total = aggregate(loss.token_losses, mask, "seq-mean-token-mean", num_tokens=int(mask.sum()), num_sequences=6)
    (slope,) = torch.autograd.grad(total, leaf)
    expected = -advantages * mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / 6
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)
    assert not any(value.item() for value, _ in loss.metrics.values())


@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    tensors = case(11)
    options = selection(name, *tensors)
    leaf = tensors[0].clone().requires_grad_()
    weights = torch.rand(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    assert torch.autograd.gradcheck(
        lambda values: POLICY_LOSSES[name].compute(values, *tensors[1:], weights=weights, **options).token_losses,
        (leaf,),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_a_log_ratio_of_a_thousand_stays_finite(name: str, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([[1000.0, -1000.0, 1000.0, -1000.0], [1000.0] * 4, [-1000.0] * 4], dtype=dtype)
    advantages = torch.tensor([[2.5, 2.5, -2.5, -2.5], [-2.5, 2.5, 0.0, 1.0], [-2.5, 2.5, 0.0, 1.0]], dtype=dtype)
    for new, old in ((log_probs, torch.zeros(3, 4, dtype=dtype)), (torch.zeros(3, 4, dtype=dtype), log_probs)):
        leaf = new.clone().requires_grad_()
        loss = computed(name, (leaf, old, advantages, torch.ones(3, 4, dtype=torch.bool)))
        (slope,) = torch.autograd.grad(loss.token_losses.sum(), leaf)
        assert loss.token_losses.dtype == slope.dtype == dtype
        assert bool(torch.isfinite(loss.token_losses).all()) and bool(torch.isfinite(slope).all())
        assert all(math.isfinite(value.item()) for value, _ in loss.metrics.values())


@pytest.mark.case("G03")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 2), (0, 3), (2, 0)])
def test_without_a_token_loss_and_gradient_are_zero(name: str, shape: tuple[int, int]) -> None:
    leaf = torch.full(shape, math.nan, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    loss = computed(name, (leaf, leaf.detach(), leaf.detach(), mask), weights=leaf.detach())
    total = aggregate(loss.token_losses, mask, "seq-mean-token-mean", num_tokens=0, num_sequences=shape[0])
    (slope,) = torch.autograd.grad(total, leaf)
    assert total.item() == 0.0 and not slope.any()
    assert all(value.item() == count.item() == 0.0 for value, count in loss.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_weights_multiply_the_token_losses_and_not_the_metrics(name: str) -> None:
    tensors = case(7)
    plain, doubled = computed(name, tensors), computed(name, tensors, weights=torch.full((6, 5), 2.0).double())
    torch.testing.assert_close(doubled.token_losses, 2 * plain.token_losses, rtol=1e-12, atol=1e-12)
    assert doubled.metrics == plain.metrics
    assert not computed(name, tensors, weights=torch.zeros(6, 5).double()).token_losses.any()
    if name != "geo_mean":
        weights = torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert torch.equal(computed(name, tensors, weights=weights).token_losses, plain.token_losses * weights)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_goes_to_the_log_probs_alone_and_no_argument_changes(name: str) -> None:
    log_probs, old, advantages, mask = case(5)
    weights = torch.ones_like(old)
    leaves = [value.clone().requires_grad_() for value in (log_probs, old, advantages, weights)]
    loss = computed(name, (leaves[0], leaves[1], leaves[2], mask), weights=leaves[3])
    loss.token_losses.sum().backward()
    assert leaves[0].grad is not None and leaves[0].grad.any()
    assert all(leaf.grad is None for leaf in leaves[1:])
    assert all(torch.equal(a, b) for a, b in zip(leaves, (log_probs, old, advantages, weights), strict=True))
    assert not any(value.requires_grad for value, _ in loss.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments_are_named(name: str) -> None:
    log_probs, old, advantages, mask = case(6)
    with pytest.raises(ValueError, match=r"old_log_probs is \[5, 6\] torch.float64 .* \[6, 5\]"):
        computed_plainly(name, log_probs, old.T, advantages, mask)
    with pytest.raises(ValueError, match=r"log_probs is \[6, 5\] torch.float16"):
        computed_plainly(name, log_probs.half(), old, advantages, mask)
    with pytest.raises(ValueError, match=r"response_mask is \[6, 5\] torch.float64 .*torch.bool"):
        computed_plainly(name, log_probs, old, advantages, mask.double())
    with pytest.raises(NonFiniteError, match=r"advantages \[6, 5\] has .* non-finite"):
        computed_plainly(name, log_probs, old, advantages * math.inf, mask)
    with pytest.raises(ValueError, match=r"weights is \[6\] torch.float64"):
        computed_plainly(name, log_probs, old, advantages, mask, weights=old[:, 0])
    with pytest.raises(NonFiniteError, match=r"weights \[6, 5\] has .* non-finite"):
        computed_plainly(name, log_probs, old, advantages, mask, weights=old / 0)
    with pytest.raises(ValueError, match=r"weights \[6, 5\] has -2.0; .*>= 0"):
        computed_plainly(name, log_probs, old, advantages, mask, weights=torch.full_like(old, -2.0))
    for option in POLICY_LOSSES[name].options:
        with pytest.raises(ConfigError, match=rf"{option} is -0.5; .*finite number >"):
            computed_plainly(name, log_probs, old, advantages, mask, **{option: -0.5})


def computed_plainly(name: str, *tensors: Tensor, **options: Any) -> PolicyLoss:
    selected = {"selected": torch.zeros(6, 5, dtype=torch.bool)} if POLICY_LOSSES[name].select else {}
    return POLICY_LOSSES[name].compute(*tensors, **selected, **options)
