"""Rollout correction against numbers by hand: weights, rejection, what is missing, what is measured, and the split."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms import aggregate
from moonshift.core.algorithms.gradient_losses import reinforce
from moonshift.core.algorithms.rollout_correction import (
    REJECTION_KINDS,
    CorrectionRule,
    RolloutCorrection,
    correction_metrics,
    rollout_correction,
)
from moonshift.core.errors import ConfigError, NonFiniteError

LOG = math.log


def corrected(ratios: list[list[float]], mask: list[list[bool]] | None = None, **rule: Any) -> RolloutCorrection:
    """The correction of a training engine whose probabilities are `ratios` times the rollout's exp(-1)."""
    rollout = torch.full((len(ratios), len(ratios[0])), -1.0, dtype=torch.float64)
    log_probs = rollout + torch.tensor(ratios, dtype=torch.float64).log()
    inside = torch.ones_like(rollout, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return rollout_correction(log_probs, rollout, inside, CorrectionRule(**rule))


def rows(values: Tensor) -> list[list[float]]:
    return [[round(value, 10) for value in row] for row in values.tolist()]


@pytest.mark.case("G04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_missing_log_prob_gets_ratio_one_and_is_counted(dtype: torch.dtype) -> None:
    training = torch.tensor([[-0.1, -0.2, -0.3]], dtype=dtype)
    rollout = torch.tensor([[-0.1, math.nan, -0.5]], dtype=dtype)
    mask = torch.ones(1, 3, dtype=torch.bool)
    found = rollout_correction(training, rollout, mask, CorrectionRule(rollout_is="token"))
    assert found.weights.dtype == dtype
    assert found.weights[0].tolist() == pytest.approx([1.0, 1.0, 1.221403], abs=1e-6)
    assert [float(value) for value in found.metrics["rollout_corr/missing_fraction"]] == [1.0, 3.0]
    # what is missing is in no measure of the gap: k1 (0 + 0.2) over two tokens
    kl, count = found.metrics["rollout_corr/kl"]
    assert float(kl) == pytest.approx(-0.2, abs=1e-6) and float(count) == 2.0
    # a sequence's mean log-ratio counts it as 0: 0.2 / 3
    for bound, kept in ((1.0689, False), (1.0690, True)):
        rule = CorrectionRule(rollout_rs="seq_mean_k1", rollout_rs_threshold=bound)
        assert bool(rollout_correction(training, rollout, mask, rule).keep.all()) is kept


def test_by_default_nothing_is_corrected_and_the_gap_is_measured() -> None:
    found = corrected([[2.0, 0.5, 9.0], [4.0, 4.0, 4.0]], [[True, True, False], [True, False, False]])
    assert rows(found.weights) == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert found.keep.tolist() == found.loss_mask.tolist() == [[True, True, False], [True, False, False]]
    measured = {name.removeprefix("rollout_corr/"): value for name, value in correction_metrics([found]).items()}
    # log-ratios ln 2, -ln 2 and 2 ln 2; the negative log-probs' means are 1 and 1 - 2 ln 2
    ppl = [1.0, 1 - 2 * LOG(2)]
    assert measured == pytest.approx(
        {
            "kl": -2 * LOG(2) / 3,
            "k3_kl": ((2 - 1 - LOG(2)) + (0.5 - 1 + LOG(2)) + (4 - 1 - 2 * LOG(2))) / 3,
            "chi2_token": (3 - 0.75 + 15) / 3,
            "chi2_seq": (0 + 15) / 2,
            "training_log_ppl": sum(ppl) / 2,
            "rollout_log_ppl": 1.0,
            "training_ppl": (math.exp(ppl[0]) + math.exp(ppl[1])) / 2,
            "rollout_ppl": math.e,
            "log_ppl_diff": -LOG(2),
            "log_ppl_abs_diff": LOG(2),
            "log_ppl_diff_max": 0.0,
            "log_ppl_diff_min": -2 * LOG(2),
            "ppl_ratio": (1 + 0.25) / 2,
            "missing_fraction": 0.0,
            "rollout_rs_masked_fraction": 0.0,
            "rollout_rs_seq_masked_fraction": 0.0,
        },
        abs=1e-12,
    )


def test_equal_engines_have_no_gap_and_weights_of_exactly_one() -> None:
    found = corrected([[1.0, 1.0]], rollout_is="sequence", rollout_rs="token_k3", rollout_rs_threshold=0.0)
    assert found.weights.tolist() == [[1.0, 1.0]] and bool(found.keep.all())
    assert all(correction_metrics([found])[f"rollout_corr/{name}"] == 0.0 for name in ("kl", "k3_kl", "chi2_seq"))


def test_truncation_caps_the_weight_and_icepop_drops_it() -> None:
    ratios = [[0.25, 0.5, 1.5, 2.0, 8.0]]
    assert rows(corrected(ratios, rollout_is="token", rollout_is_threshold=2).weights) == [[0.25, 0.5, 1.5, 2.0, 2.0]]
    popped = corrected(ratios, rollout_is="token", rollout_is_threshold="0.4_3")
    assert rows(popped.weights) == [[0.0, 0.5, 1.5, 2.0, 0.0]]
    assert bool(popped.keep.all()), "IcePop weighs; it does not reject"
    measured = correction_metrics([popped])
    assert measured["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(0.2)
    assert measured["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(0.2)
    assert measured["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert measured["rollout_corr/rollout_is_min"] == 0.0
    weights = [0.0, 0.5, 1.5, 2.0, 0.0]
    assert measured["rollout_corr/rollout_is_mean"] == pytest.approx(0.8)
    deviation = math.sqrt(sum((weight - 0.8) ** 2 for weight in weights) / 5)
    assert measured["rollout_corr/rollout_is_std"] == pytest.approx(deviation)
    assert measured["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(16 / (5 * 6.5))


def test_a_sequence_has_the_product_of_its_ratios() -> None:
    mask = [[True, True, False], [True, True, True]]
    found = corrected([[2.0, 3.0, 7.0], [0.5, 0.5, 1.0]], mask, rollout_is="sequence", rollout_is_threshold=5.0)
    assert rows(found.weights) == [[5.0, 5.0, 0.0], [0.25, 0.25, 0.25]]
    popped = corrected([[2.0, 3.0, 7.0], [0.5, 0.5, 1.0]], mask, rollout_is="sequence", rollout_is_threshold="0.1_5")
    assert rows(popped.weights) == [[0.0, 0.0, 0.0], [0.25, 0.25, 0.25]]


def test_normalised_weights_have_mean_one_over_tokens_or_over_sequences() -> None:
    mask = [[True, True, True], [True, False, False], [False, False, False]]
    ratios = [[1.0, 1.0, 2.0], [4.0, 9.0, 9.0], [5.0, 5.0, 5.0]]
    options = {"rollout_is_threshold": 100.0, "rollout_is_batch_normalize": True}
    tokens = corrected(ratios, mask, rollout_is="token", **options)
    assert rows(tokens.weights) == [[0.5, 0.5, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    sequences = corrected(ratios, mask, rollout_is="sequence", **options)  # 2 and 4: mean 3
    expected = [[2 / 3] * 3, [4 / 3, 0.0, 0.0], [0.0] * 3]
    assert rows(sequences.weights) == [[round(value, 10) for value in row] for row in expected]
    assert correction_metrics([tokens])["rollout_corr/rollout_is_mean"] == pytest.approx(2.0)
    options["rollout_is_threshold"] = "50_60"
    assert rows(corrected(ratios, mask, rollout_is="token", **options).weights) == [[0.0] * 3] * 3


# one row of ratios 2, 0.5, 1, another of 1.1, 1, 1; k2 of ln 2 is 0.240227, k3 of 2 is 0.306853, of 1/2 0.193147
REJECTIONS = [
    ("token_k1", "0.6_1.9", [[0, 0, 1], [1, 1, 1]]),
    ("token_k1", "0.4_1.9", [[1, 0, 1], [1, 1, 1]]),
    ("token_k1", 1.9, [[0, 0, 1], [1, 1, 1]]),
    ("token_k1", 2.1, [[1, 1, 1], [1, 1, 1]]),
    ("token_k2", 0.24, [[0, 0, 1], [1, 1, 1]]),
    ("token_k2", 0.241, [[1, 1, 1], [1, 1, 1]]),
    ("token_k3", 0.2, [[0, 1, 1], [1, 1, 1]]),
    ("token_k3", 0.19, [[0, 0, 1], [1, 1, 1]]),
    ("seq_sum_k1", 1.09, [[1, 1, 1], [0, 0, 0]]),
    ("seq_sum_k1", 1.11, [[1, 1, 1], [1, 1, 1]]),
    ("seq_sum_k2", 0.48, [[0, 0, 0], [1, 1, 1]]),
    ("seq_sum_k2", 0.481, [[1, 1, 1], [1, 1, 1]]),
    ("seq_sum_k3", 0.499, [[0, 0, 0], [1, 1, 1]]),
    ("seq_sum_k3", 0.501, [[1, 1, 1], [1, 1, 1]]),
    ("seq_mean_k1", 1.03, [[1, 1, 1], [0, 0, 0]]),
    ("seq_mean_k1", 1.04, [[1, 1, 1], [1, 1, 1]]),
    ("seq_mean_k2", 0.16, [[0, 0, 0], [1, 1, 1]]),
    ("seq_mean_k2", 0.161, [[1, 1, 1], [1, 1, 1]]),
    ("seq_mean_k3", 0.166, [[0, 0, 0], [1, 1, 1]]),
    ("seq_mean_k3", 0.167, [[1, 1, 1], [1, 1, 1]]),
    ("seq_max_k2", 0.24, [[0, 0, 0], [1, 1, 1]]),
    ("seq_max_k2", 0.241, [[1, 1, 1], [1, 1, 1]]),
    ("seq_max_k3", 0.3, [[0, 0, 0], [1, 1, 1]]),
    ("seq_max_k3", 0.307, [[1, 1, 1], [1, 1, 1]]),
]


@pytest.mark.parametrize(("kind", "threshold", "kept"), REJECTIONS)
def test_rejection_by_token_and_by_sequence(kind: str, threshold: float | str, kept: list[list[int]]) -> None:
    mask = [[True, True, True, False]] * 2
    ratios = [[2.0, 0.5, 1.0, 99.0], [1.1, 1.0, 1.0, 99.0]]
    found = corrected(ratios, mask, rollout_rs=kind, rollout_rs_threshold=threshold)
    assert found.keep[:, :3].int().tolist() == kept and not found.keep[:, 3].any()
    assert torch.equal(found.weights, found.keep.double())
    rejected = 6 - sum(map(sum, kept))
    assert [float(value) for value in found.metrics[f"rollout_corr/rollout_rs_{kind}_masked_fraction"]] == [rejected, 6]
    assert [float(value) for value in found.metrics["rollout_corr/rollout_rs_masked_fraction"]] == [rejected, 6]


def test_every_kind_has_a_case_by_hand() -> None:
    assert {case[0] for case in REJECTIONS} == set(REJECTION_KINDS)


def test_what_any_rule_rejects_is_rejected_and_weighs_nothing() -> None:
    found = corrected(
        [[2.0, 1.0], [1.0, 1.0], [1.0, 1.5]],
        rollout_is="token",
        rollout_is_threshold=9.0,
        rollout_rs="token_k1, seq_max_k3",
        rollout_rs_threshold="0.7_2,0.25",
    )
    assert found.keep.tolist() == [[False, False], [True, True], [True, False]]
    assert found.weights.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    measured = correction_metrics([found])
    assert measured["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(2 / 6)
    assert measured["rollout_corr/rollout_rs_seq_max_k3_masked_fraction"] == pytest.approx(2 / 6)
    assert measured["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 6)
    assert measured["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("denominator", "scale"), [("all", 0.5), ("kept", 1.0)])
def test_the_denominator_decides_whether_rejection_shrinks_the_step(denominator: str, scale: float) -> None:
    found = corrected(
        [[1.0, 5.0], [1.0, 5.0]], rollout_rs="token_k1", rollout_rs_threshold=2.0, denominator=denominator
    )
    log_probs = torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(2, 2, dtype=torch.float64)
    loss = reinforce(log_probs, log_probs, ones, found.loss_mask, weights=found.weights)
    for mode in ("token-mean", "seq-mean-token-mean"):
        counts = {"num_tokens": int(found.loss_mask.sum()), "num_sequences": 2}
        total = aggregate(loss.token_losses, found.loss_mask, mode, **counts)
        (slope,) = torch.autograd.grad(total, log_probs, retain_graph=True)
        assert slope.tolist() == [[-0.5 * scale, 0.0]] * 2


KINDS = st.lists(st.sampled_from(REJECTION_KINDS), max_size=3, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 6),
    level=st.sampled_from([None, "token", "sequence"]),
    threshold=st.sampled_from([1.5, "0.6_1.7"]),
    kinds=KINDS,
    denominator=st.sampled_from(["all", "kept"]),
)
def test_split_order_and_outside_tokens_change_neither_results_nor_metrics(
    seed: int, size: int, level: Any, threshold: float | str, kinds: list[str], denominator: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(6, 4, generator=generator, dtype=torch.float64)
    training = rollout + 0.4 * torch.randn(6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    rollout = rollout.masked_fill(torch.rand(6, 4, generator=generator) < 0.1, math.nan)
    rule = CorrectionRule(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_rs=",".join(kinds) or None,
        rollout_rs_threshold=1.3 if kinds else None,
        denominator=denominator,
    )
    whole = rollout_correction(training, rollout, mask, rule)
    assert not (whole.keep & ~mask).any() and not whole.weights[~whole.keep].any()

    noisy = (training.masked_fill(~mask, math.inf), rollout.masked_fill(~mask, -math.inf))
    order = torch.randperm(6, generator=generator)
    parts = [rollout_correction(noisy[0][some], noisy[1][some], mask[some], rule) for some in order.split(size)]
    for name in ("weights", "keep", "loss_mask"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)[order])
    assert correction_metrics(parts) == pytest.approx(correction_metrics([whole]), abs=1e-9)


@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_log_ratio_of_a_thousand_stays_finite(level: Any, sign: float) -> None:
    rule = CorrectionRule(
        rollout_is=level, rollout_is_threshold=1e30, rollout_rs=",".join(REJECTION_KINDS), rollout_rs_threshold=1e6
    )
    training = torch.full((2, 3), sign * 1000.0)
    found = rollout_correction(training, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), rule)
    assert bool(torch.isfinite(found.weights).all())
    assert all(math.isfinite(value) for value in correction_metrics([found]).values())


@pytest.mark.case("G03")
@pytest.mark.parametrize("shape", [(2, 2), (0, 3), (2, 0)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_a_token_there_is_nothing_to_measure(shape: tuple[int, int], level: Any) -> None:
    rule = CorrectionRule(
        rollout_is=level,
        rollout_is_batch_normalize=True,
        rollout_rs=",".join(REJECTION_KINDS),
        rollout_rs_threshold=2.0,
    )
    nan = torch.full(shape, math.nan)
    found = rollout_correction(nan, nan, torch.zeros(shape, dtype=torch.bool), rule)
    assert not found.weights.any() and not found.keep.any() and correction_metrics([found]) == {}


def test_no_gradient_flows_and_no_argument_changes() -> None:
    training = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    rollout = torch.tensor([[-1.5, math.nan]])
    found = rollout_correction(
        training, rollout, torch.ones(1, 2, dtype=torch.bool), CorrectionRule(rollout_is="token")
    )
    assert not found.weights.requires_grad and not any(v.requires_grad for v, _ in found.metrics.values())
    assert training.tolist() == [[-1.0, -3.0]] and rollout[0, 0].item() == -1.5 and math.isnan(rollout[0, 1].item())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rollout_is": "tokens"}, r"rollout_is is 'tokens'; it must be one of None, token, sequence"),
        ({"denominator": "some"}, r"denominator is 'some'; it must be one of all, kept"),
        ({"rollout_is_threshold": "a_b"}, r"rollout_is_threshold has 'a'; it must be a number, or lo_hi"),
        ({"rollout_is_threshold": 0.0}, r"rollout_is_threshold is 0.0; .*> 0"),
        ({"rollout_is_threshold": "2_0.5"}, r"rollout_is_threshold is 0.5; .*>= 2"),
        ({"rollout_is_threshold": math.nan}, r"rollout_is_threshold is nan"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, r"rollout_rs is 'token_k4'; .*token_k1"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1}, r"rollout_rs is 'seq_max_k1'"),
        ({"rollout_rs": "token_k1"}, r"rollout_rs_threshold is None; rollout_rs 'token_k1' needs"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, r"rollout_rs_threshold is '1,2'; .* all or 1"),
        (
            {"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": 2},
            r"rollout_rs is .* must not name a kind twice",
        ),
        ({"rollout_rs_threshold": 2}, r"rollout_rs_threshold is 2; without rollout_rs"),
        ({"rollout_is_batch_normalize": True}, r"rollout_is_batch_normalize is True; without rollout_is"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0_2"}, r"rollout_rs_threshold is 0.0; .*> 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, r"rollout_rs_threshold is 0.5; .*>= 2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"}, r"rollout_rs_threshold has '0.1_2'"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": -1.0}, r"rollout_rs_threshold is -1.0; .*>= 0"),
    ],
)
def test_a_wrong_rule_is_named_with_what_is_allowed(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CorrectionRule(**rule)


def test_wrong_arguments_are_named() -> None:
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"rollout_log_probs is \[3, 2\] torch.float32 .* \[2, 3\]"):
        rollout_correction(zeros, zeros.T, mask, CorrectionRule())
    with pytest.raises(NonFiniteError, match=r"rollout_log_probs \[2, 3\] has 6 .* -inf"):
        rollout_correction(zeros, zeros - math.inf, mask, CorrectionRule())
    with pytest.raises(NonFiniteError, match=r"log_probs \[2, 3\] has 6 .* nan"):
        rollout_correction(zeros + math.nan, zeros, mask, CorrectionRule())
