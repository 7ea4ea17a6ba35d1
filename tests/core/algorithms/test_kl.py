"""KL estimators against hand-computed numbers and derivatives."""

import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms import KL_ESTIMATORS, apply_kl_in_reward, kl_penalty
from moonshift.core.algorithms.checks import NonFiniteInputError
from moonshift.core.algorithms.kl import AdaptiveKlController, FixedKlController, full_kl
from moonshift.core.errors import ConfigError, MoonshiftError

LOG_PROBS = [[-1.0, -2.0]]
REFERENCE = [[-1.5, -1.5]]  # d = 0.5, -0.5
VALUES = {
    "k1": [0.5, -0.5],
    "abs": [0.5, 0.5],
    "k2": [0.125, 0.125],
    "k3": [0.10653065971263342, 0.14872127070012815],  # exp(-d) + d - 1
}
SLOPES = {
    "k1": [1.0, 1.0],
    "abs": [1.0, -1.0],
    "k2": [0.5, -0.5],
    "k3": [0.3934693402873666, -0.6487212707001282],  # 1 - exp(-d)
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def doubles(rows: list[list[float]], *, gradient: bool = False) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=gradient)


@pytest.mark.case("A06")
@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_value_and_slope_of_every_estimator(kind: str) -> None:
    log_probs = doubles(LOG_PROBS, gradient=True)
    value = kl_penalty(log_probs, doubles(REFERENCE), kind)
    (slope,) = torch.autograd.grad(value.sum(), log_probs)
    base = ALIASES.get(kind, kind).removesuffix("+")
    torch.testing.assert_close(value, doubles([VALUES[base]]), rtol=0, atol=1e-14)
    expected = SLOPES["k2"] if kind.endswith("+") else SLOPES[base]
    torch.testing.assert_close(slope, doubles([expected]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("base", ["k1", "abs", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_straight_through_has_exactly_the_value_of_its_base(base: str, dtype: torch.dtype) -> None:
    log_probs = torch.linspace(-700, -0.01, 41, dtype=dtype)[None]
    reference = log_probs.flip(1)
    assert torch.equal(kl_penalty(log_probs, reference, base + "+"), kl_penalty(log_probs, reference, base))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_the_derivative_is_that_of_the_value(kind: str) -> None:
    reference = doubles([[-1.0, -0.3, -2.0], [-4.0, -1.1, -0.2]])
    log_probs = doubles([[-0.4, -1.3, -2.5], [-3.0, -1.7, -0.9]], gradient=True)
    assert torch.autograd.gradcheck(lambda values: kl_penalty(values, reference, kind), (log_probs,))


def test_k3_is_clamped_twice() -> None:
    log_probs = doubles([[-1000.0, 0.0, -2.0, -3.0]], gradient=True)
    reference = doubles([[0.0, -1000.0, 0.0, 0.0]])  # -d = 1000, -1000, 2, 3
    value = kl_penalty(log_probs, reference, "k3")
    # exp(20) - 21 -> 10; exp(-20) + 19 -> 10; exp(2) - 3; exp(3) - 4 = 16.1 -> 10
    torch.testing.assert_close(value, doubles([[10.0, 10.0, math.exp(2) - 3, 10.0]]), rtol=0, atol=1e-13)
    (slope,) = torch.autograd.grad(value.sum(), log_probs)
    torch.testing.assert_close(slope, doubles([[0.0, 0.0, 1 - math.exp(2), 0.0]]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_no_estimator_overflows_at_a_log_ratio_of_a_thousand(kind: str) -> None:
    log_probs = torch.tensor([[0.0, -1000.0]], requires_grad=True)
    value = kl_penalty(log_probs, torch.tensor([[-1000.0, 0.0]]), kind)
    (slope,) = torch.autograd.grad(value.sum(), log_probs)
    assert bool(torch.isfinite(value).all() and torch.isfinite(slope).all())


def test_k3_keeps_its_digits_where_the_policies_are_close() -> None:
    value = kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.0 + 2**-10]]), "k3")
    assert abs(value.item() / (2**-21) - 1) < 1e-3


@pytest.mark.case("A09")
@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_the_reference_itself_is_at_distance_exactly_zero(kind: str) -> None:
    log_probs = -torch.rand(4, 9, generator=torch.Generator().manual_seed(3)) * 12
    assert not kl_penalty(log_probs, log_probs.clone(), kind).any()


def test_k1_and_k3_are_unbiased_for_the_divergence_of_two_distributions() -> None:
    policy, reference = doubles([[0.5, 0.3, 0.2]]), doubles([[0.2, 0.5, 0.3]])
    divergence = float((policy * (policy / reference).log()).sum())
    for kind in ("k1", "k3"):
        expected = (policy * kl_penalty(policy.log(), reference.log(), kind)).sum()
        assert abs(float(expected) - divergence) < 1e-14


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(KL_ESTIMATORS)), seed=st.integers(0, 2**16))
def test_tokens_outside_the_mask_are_zero_in_value_and_gradient(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs, reference = -torch.rand(2, 4, 6, generator=generator, dtype=torch.float64) * 5
    mask = torch.rand(4, 6, generator=generator) < 0.5
    plain = kl_penalty(log_probs, reference, kind)
    noisy = log_probs.masked_fill(~mask, math.nan).requires_grad_()
    value = kl_penalty(noisy, reference.masked_fill(~mask, -math.inf), kind, response_mask=mask)
    (slope,) = torch.autograd.grad(value.sum(), noisy)
    assert torch.equal(value, plain.masked_fill(~mask, 0.0))
    assert bool(torch.isfinite(slope).all()) and not slope[~mask].any()


def test_kl_in_the_reward_is_subtracted_inside_the_mask() -> None:
    rewards = doubles([[0.0, 1.0, 7.0]])
    log_probs, reference = doubles([[-1.0, -2.0, math.nan]]), doubles([[-1.5, -1.4, math.nan]])
    mask = torch.tensor([[True, True, False]])
    paid, mean_kl = apply_kl_in_reward(rewards, log_probs, reference, mask, 0.1, "kl")
    torch.testing.assert_close(paid, doubles([[-0.05, 1.06, 7.0]]), rtol=0, atol=1e-14)
    assert abs(mean_kl.item() - (0.5 - 0.6) / 2) < 1e-14
    assert rewards.tolist() == [[0.0, 1.0, 7.0]]


def test_the_mean_kl_is_over_tokens_not_over_sequences() -> None:
    log_probs = doubles([[-1.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
    reference = doubles([[-3.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, False, False, False], [True] * 4])
    _, mean_kl = apply_kl_in_reward(torch.zeros_like(log_probs), log_probs, reference, mask, 0.1, "k1")
    assert abs(mean_kl.item() - 0.4) < 1e-14


def test_a_missing_reward_stays_missing_and_an_empty_mask_costs_nothing() -> None:
    rewards, log_probs = doubles([[math.nan, 1.0]]), doubles([[-1.0, -2.0]])
    reference = doubles(REFERENCE)
    paid, _ = apply_kl_in_reward(rewards, log_probs, reference, torch.tensor([[True, True]]), 1.0, "k2")
    assert math.isnan(paid[0, 0].item()) and paid[0, 1].item() == 0.875
    paid, mean_kl = apply_kl_in_reward(
        doubles([[2.0, 1.0]]), log_probs, reference, torch.tensor([[False] * 2]), 1, "k2"
    )
    assert paid.tolist() == [[2.0, 1.0]] and mean_kl.item() == 0.0


def test_wrong_arguments_are_named() -> None:
    log_probs, reference, mask = doubles(LOG_PROBS), doubles(REFERENCE), torch.tensor([[True, True]])
    with pytest.raises(ConfigError, match=r"kind is 'full'; it must be one of .*k3"):
        kl_penalty(log_probs, reference, "full")
    with pytest.raises(ConfigError, match=r"kind is 'k4'"):
        apply_kl_in_reward(log_probs, log_probs, reference, mask, 0.1, "k4")
    with pytest.raises(ValueError, match=r"ref_log_probs is \[1, 1\]"):
        kl_penalty(log_probs, reference[:, :1], "k1")
    with pytest.raises(ConfigError, match=r"kl_coef is nan"):
        apply_kl_in_reward(log_probs, log_probs, reference, mask, math.nan, "k1")
    with pytest.raises(NonFiniteInputError, match=r"log_probs \[1, 2\] .* row 0, token 1: -inf"):
        kl_penalty(doubles([[-1.0, -math.inf]]), reference, "k1")


def test_the_error_for_a_non_finite_tensor_crosses_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteInputError("log_probs is bad")))
    assert isinstance(error, MoonshiftError) and str(error) == "log_probs is bad"


def distributions(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(dim=-1)


def test_full_kl_by_hand() -> None:
    policy, reference = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]).log(), torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]).log()
    expected = torch.tensor([[0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)]])
    torch.testing.assert_close(full_kl(policy, reference), expected, rtol=0, atol=1e-7)
    assert not full_kl(policy, policy.clone()).any()


def test_full_kl_is_what_k1_and_k3_estimate() -> None:
    policy, reference = distributions(1, 1, 1, 7), distributions(2, 1, 1, 7)
    divergence = full_kl(policy, reference)
    for kind in ("k1", "k3"):
        estimate = (policy[0].exp() * kl_penalty(policy[0], reference[0], kind)).sum()
        assert abs(float(estimate - divergence)) < 1e-12


def test_the_derivative_of_full_kl_through_a_softmax_is_the_true_one() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    reference = distributions(2, 2, 3, 5)
    assert torch.autograd.gradcheck(lambda values: full_kl(values.log_softmax(dim=-1), reference), (logits,))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_full_kl_is_zero_outside_the_mask_and_never_negative(seed: int) -> None:
    policy, reference = distributions(seed, 3, 4, 6), distributions(seed + 1, 3, 4, 6)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    noisy = policy.masked_fill(~mask[..., None], math.nan).requires_grad_()
    value = full_kl(noisy, reference.masked_fill(~mask[..., None], math.nan), response_mask=mask)
    (slope,) = torch.autograd.grad(value.sum(), noisy)
    assert torch.equal(value.detach(), full_kl(policy, reference).masked_fill(~mask, 0.0))
    assert bool((value > -1e-12).all() and torch.isfinite(slope).all()) and not slope[~mask].any()


def test_a_token_of_probability_zero_has_no_value_and_no_slope() -> None:
    policy = torch.tensor([[[0.25, 0.75, 0.0]]], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64).log()
    value = full_kl(policy, reference)
    (slope,) = torch.autograd.grad(value.sum(), policy)
    assert abs(float(value.detach()) - (0.25 * math.log(0.5) + 0.75 * math.log(1.5))) < 1e-14
    assert slope[0, 0, 2] == 0 and bool(torch.isfinite(slope).all())


def test_full_kl_names_what_is_wrong() -> None:
    policy = distributions(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"log_probs has the shape \[2, 3\] .* same \[B, T, V\]"):
        full_kl(policy[..., 0], policy)
    with pytest.raises(ValueError, match=r"ref_log_probs \[2, 3, 3\]"):
        full_kl(policy, policy[..., :3])
    with pytest.raises(ValueError, match=r"log_probs at row 0, token 0 has the log-sum-exp 1; .*log_softmax"):
        full_kl(policy + 1, policy)
    with pytest.raises(ValueError, match=r"response_mask is \[2, 3\] torch.float32"):
        full_kl(policy, policy, response_mask=torch.ones(2, 3))
    with pytest.raises(NonFiniteInputError, match=r"log_probs \[2, 3\] has 1 .* row 1, token 2: nan"):
        full_kl(torch.where(torch.arange(24).reshape(2, 3, 4) == 21, math.nan, policy), policy)
    possible_here_alone = torch.tensor([[[1.0, 0.0]]]).log()
    with pytest.raises(NonFiniteInputError, match=r"ref_log_probs \[1, 1\] .* row 0, token 0: -inf"):
        full_kl(torch.tensor([[[0.5, 0.5]]]).log(), possible_here_alone)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [(12.0, 0.101), (6.6, 0.1005), (6.0, 0.1), (5.4, 0.0995), (0.0, 0.099), (-3.0, 0.099), (1e300, 0.101)],
)
def test_the_adaptive_controller_follows_the_clipped_error(observed: float, expected: float) -> None:
    controller = AdaptiveKlController(value=0.1, target=6.0, horizon=10_000)
    following = controller.updated(observed, 500)
    assert following.value == pytest.approx(expected, rel=1e-12)
    assert (following.target, following.horizon, controller.value) == (6.0, 10_000, 0.1)


def test_the_adaptive_penalty_never_becomes_a_reward() -> None:
    controller = AdaptiveKlController(value=0.1, target=1.0, horizon=10)
    assert controller.updated(0.0, 1000).value == 0.05
    assert controller.updated(9.0, 1000).value == pytest.approx(0.1 * 21)
    assert controller.updated(9.0, 0).value == 0.1


def test_the_fixed_controller_stays() -> None:
    assert FixedKlController(value=0.2).updated(1e9, 64).value == 0.2


def test_a_controller_resumes_from_its_state() -> None:
    controller = AdaptiveKlController(value=0.1, target=6.0, horizon=10_000).updated(7.0, 96)
    state = json.loads(json.dumps(controller.state()))
    resumed = AdaptiveKlController.from_state(state)
    assert resumed == controller and resumed.updated(5.0, 96) == controller.updated(5.0, 96)
    fixed = FixedKlController(value=0.1)
    assert FixedKlController.from_state(fixed.state()) == fixed
    with pytest.raises(ConfigError, match=r"has value; AdaptiveKlController needs value, target, horizon"):
        AdaptiveKlController.from_state(fixed.state())


def test_a_controller_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"target is 0; .*> 0"):
        AdaptiveKlController(value=0.1, target=0, horizon=1)
    with pytest.raises(ConfigError, match=r"horizon is -1"):
        AdaptiveKlController(value=0.1, target=1, horizon=-1)
    with pytest.raises(ConfigError, match=r"value is nan"):
        FixedKlController(value=math.nan)
    controller = AdaptiveKlController(value=0.1, target=1, horizon=1)
    with pytest.raises(NonFiniteInputError, match=r"observed_kl is nan"):
        controller.updated(math.nan, 1)
    with pytest.raises(ConfigError, match=r"num_samples is -1"):
        controller.updated(1.0, -1)
