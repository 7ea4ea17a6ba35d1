"""REINFORCE, CISPO, SAPO and DPPO against numbers by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moonshift.core.algorithms import PolicyLoss
from moonshift.core.algorithms.gradient_losses import cispo, dppo_kl, dppo_tv, reinforce, sapo


def at_ratios(
    loss: Callable[..., PolicyLoss], ratios: list[float], advantage: float, *, old: float = -1.0, **options: Any
) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses, their slopes and the metrics' sums, of one row whose old log-probs are `old`."""
    before = torch.full((1, len(ratios)), old, dtype=torch.float64)
    log_probs = (before + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones_like(before, dtype=torch.bool)
    found = loss(log_probs, before, torch.full_like(before, advantage), mask, **options)
    (slope,) = torch.autograd.grad(found.token_losses.sum(), log_probs)
    metrics = {name: value.item() for name, (value, _) in found.metrics.items()}
    return found.token_losses[0].tolist(), slope[0].tolist(), metrics


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    losses, slopes, metrics = at_ratios(reinforce, [0.5, 2.0], 3.0)
    assert losses == pytest.approx([3 * (1 + math.log(2)), 3 * (1 - math.log(2))], abs=1e-12)
    assert slopes == [-3.0, -3.0] and metrics == {"actor/ppo_kl": pytest.approx(0.0, abs=1e-12)}


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    for advantage in (1.0, -1.0):
        losses, slopes, metrics = at_ratios(cispo, [0.5, 1.0, 1.25, 2.0], advantage, clip_ratio_high=0.28)
        weights, log_probs = [0.8, 1.0, 1.25, 1.28], [-1 + math.log(r) for r in (0.5, 1.0, 1.25, 2.0)]
        expected = [-advantage * w * lp for w, lp in zip(weights, log_probs, strict=True)]
        assert losses == pytest.approx(expected, abs=1e-12)
        assert slopes == pytest.approx([-advantage * weight for weight in weights], abs=1e-12)
        assert metrics["actor/pg_clipfrac"] == 2.0


def test_cispo_with_a_low_ratio_of_one_has_no_lower_clip() -> None:
    _, slopes, metrics = at_ratios(cispo, [1e-6, 0.5], 1.0, clip_ratio_low=1.0)
    assert slopes == pytest.approx([-1e-6, -0.5], abs=1e-12) and metrics["actor/pg_clipfrac"] == 0.0


def test_sapo_fades_with_the_distance_and_has_its_own_temperature_for_bad_tokens() -> None:
    # tau 1: 4 sigmoid(0) = 2, 4 sigmoid(1) = 2.924234; slope -A r 4 s (1 - s): 1 and 2 x 4 x 0.196612
    losses, slopes, metrics = at_ratios(sapo, [1.0, 2.0], 1.0)
    assert losses == pytest.approx([-2.0, -2.924234], abs=1e-6) and slopes == pytest.approx([-1.0, -1.572896], abs=1e-5)
    assert set(metrics) == {"actor/ppo_kl"}
    # tau 2: 2 sigmoid(0) = 1, 2 sigmoid(2) = 1.761594; slope r 4 s (1 - s) = 2 x 4 x 0.104994
    losses, slopes, _ = at_ratios(sapo, [1.0, 2.0], -1.0, tau_neg=2.0)
    assert losses == pytest.approx([1.0, 1.761594], abs=1e-6) and slopes == pytest.approx([1.0, 0.839949], abs=1e-5)


def test_total_variation_holds_a_token_by_its_probability_and_not_by_its_ratio() -> None:
    # q = 0.5: p = 0.25, 0.5, 0.75, 0.9; p - q = -0.25, 0, 0.25, 0.4
    half, ratios = math.log(0.5), [0.5, 1.0, 1.5, 1.8]
    _, slopes, metrics = at_ratios(dppo_tv, ratios, 1.0, old=half, clip_ratio_high=0.3)
    assert slopes == pytest.approx([-0.5, -1.0, -1.5, 0.0], abs=1e-12) and metrics["actor/pg_clipfrac"] == 1.0
    losses, slopes, metrics = at_ratios(dppo_tv, ratios, -1.0, old=half, clip_ratio_low=0.2)
    assert slopes == pytest.approx([0.0, 1.0, 1.5, 1.8], abs=1e-12) and metrics["actor/pg_clipfrac"] == 1.0
    assert losses == pytest.approx([0.0, half, 1.5 * math.log(0.75), 1.8 * math.log(0.9)], abs=1e-12)
    # a rare token may grow tenfold: q = 1e-4, p = 1e-3
    _, slopes, metrics = at_ratios(dppo_tv, [10.0], 1.0, old=math.log(1e-4), clip_ratio_high=0.01)
    assert slopes == pytest.approx([-10.0], abs=1e-9) and metrics["actor/pg_clipfrac"] == 0.0


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_a_ratio_weighs_no_more_than_its_cap(loss: Callable[..., PolicyLoss]) -> None:
    _, slopes, _ = at_ratios(loss, [30.0, 4.0], 1.0, old=math.log(1e-5))
    assert slopes == pytest.approx([-20.0, -4.0], abs=1e-9)
    _, slopes, _ = at_ratios(loss, [30.0, 4.0], 1.0, old=math.log(1e-5), clip_ratio_c=3.0)
    assert slopes == pytest.approx([-3.0, -3.0], abs=1e-9)


def test_binary_kl_holds_a_token_on_its_way_out_and_never_on_its_way_back() -> None:
    # q = 0.5; KL for p = 0.25: 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.143841; p = 0.6: 0.020411; p = 0.75: 0.143841
    half, ratios = math.log(0.5), [0.5, 1.2, 1.5]
    _, slopes, metrics = at_ratios(dppo_kl, ratios, 1.0, old=half, clip_ratio_low=9.0)
    assert slopes == pytest.approx([-0.5, -1.2, 0.0], abs=1e-12) and metrics["actor/pg_clipfrac"] == 1.0
    _, slopes, metrics = at_ratios(dppo_kl, ratios, -1.0, old=half, clip_ratio_high=9.0)
    assert slopes == pytest.approx([0.0, 1.2, 1.5], abs=1e-12) and metrics["actor/pg_clipfrac"] == 1.0
    for bound, slope in ((0.1438, 0.0), (0.1439, -1.5)):
        assert at_ratios(dppo_kl, [1.5], 1.0, old=half, clip_ratio_high=bound)[1] == pytest.approx([slope], abs=1e-12)


def test_a_token_once_certain_can_be_left() -> None:
    # q = 1: the 1e-8 keeps log((1 - q) / (1 - p)) finite, KL = log(1 / 0.5)
    log_probs = torch.tensor([[math.log(0.5)]], requires_grad=True)
    loss = dppo_kl(log_probs, torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert loss.token_losses.item() == pytest.approx(0.5 * math.log(2), abs=1e-6)
