"""The oracles of the policy losses and of rollout correction can tell right from wrong: each wrong variant fails one.

A mutant is a module of the package with one piece of its text replaced, run from memory; no file is changed.
"""

import inspect
import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.mutation
PACKAGE = "moonshift.core.algorithms"
LN2 = math.log(2)


def doubles(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual.detach().flatten(), doubles([expected])[0].to(actual.dtype), rtol=0, atol=1e-5)


def slopes(loss: Callable[..., Any], ratios: list[float], advantages: list[float], **options: Any) -> Tensor:
    """d Σ token losses / d log-prob, old log-probs ln 0.5 (or `old`)."""
    old = torch.full((1, len(ratios)), options.pop("old", -LN2), dtype=torch.float64)
    log_probs = (old + doubles([ratios]).log()).requires_grad_()
    found = loss(log_probs, old, doubles([advantages]), torch.ones_like(old, dtype=torch.bool), **options)
    return torch.autograd.grad(found.token_losses.sum(), log_probs)[0]


def weights_oracle(module: ModuleType) -> None:
    tensors = (doubles([[0.0, 0.0]]), doubles([[0.0, 0.0]]), doubles([[1.0, 1.0]]), torch.tensor([[True, False]]))
    weights = doubles([[0.5, 3.0]]).requires_grad_()
    found = module.ppo_clip(*tensors, weights=weights)
    same(found.token_losses, [-0.5, 0.0])
    assert not found.token_losses.requires_grad
    wrong = None
    try:
        module.ppo_clip(*tensors, weights=doubles([[-1.0, 1.0]]))
    except ValueError as error:
        wrong = error
    assert wrong is not None


def sequence_oracle(module: ModuleType) -> None:
    old, mask = torch.full((1, 3), -1.0, dtype=torch.float64), torch.tensor([[True, True, False]])
    log_probs = (old + doubles([[0.3, -0.1, 9.0]])).requires_grad_()
    ones = torch.ones_like(old)
    loss = module.gspo(log_probs, old, ones, mask, clip_ratio_low=0.5, clip_ratio_high=0.5)
    same(loss.token_losses, [-math.exp(0.1)] * 2 + [0.0])
    same(torch.autograd.grad(loss.token_losses.sum(), log_probs)[0], [-math.exp(0.1)] * 2 + [0.0])
    same(module.gspo(log_probs, old, ones, mask, clip_ratio_high=0.06).token_losses, [-1.06, -1.06, 0.0])
    same(module.gspo(log_probs, old, -ones, mask, clip_ratio_high=0.06).token_losses, [math.exp(0.1)] * 2 + [0.0])
    loss = module.geo_mean(log_probs, old, ones, mask, clip_ratio_high=0.2)
    same(loss.token_losses, [-math.exp(0.05)] * 2 + [0.0])
    assert loss.metrics["actor/pg_clipfrac"][0].item() == 1.0
    same(module.geo_mean(log_probs, old, -ones, mask, clip_ratio_high=0.2).token_losses, [math.exp(0.1)] * 2 + [0.0])
    weighed = module.geo_mean(log_probs, old, ones, mask, clip_ratio_high=0.2, weights=doubles([[2.0, 8.0, 9.0]]))
    same(weighed.token_losses, [-4 * math.exp(0.05)] * 2 + [0.0])
    uneven = module.geo_mean(old, old, doubles([[3.0, 1.0, 7.0]]), mask)
    same(uneven.token_losses, [-2.0, -2.0, 0.0])
    still = module.geo_mean(log_probs, old, doubles([[2.0, 0.0, 0.0]]), mask)
    same(still.token_losses, [-math.exp(0.15)] * 2 + [0.0])


def gradient_oracle(module: ModuleType) -> None:
    same(slopes(module.reinforce, [0.5, 1.5], [3.0, -1.0]), [-3.0, 1.0])
    same(slopes(module.cispo, [0.5, 1.1, 1.5], [1.0] * 3, clip_ratio_high=0.28), [-0.8, -1.1, -1.28])
    same(slopes(module.sapo, [1.0, 2.0], [1.0, -1.0], tau_neg=2.0, old=-1.0), [-1.0, 0.839949])
    same(slopes(module.sapo, [2.0], [1.0], tau_neg=2.0, old=-1.0), [-1.572896])
    tv = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    same(slopes(module.dppo_tv, [0.5, 1.5, 1.8], [1.0] * 3, **tv), [-0.5, -1.5, 0.0])
    same(slopes(module.dppo_tv, [0.5, 0.7, 1.8], [-1.0] * 3, **tv), [0.0, 0.7, 1.8])
    same(slopes(module.dppo_tv, [30.0], [1.0], old=-12.0), [-20.0])
    kl = {"clip_ratio_low": 9.0, "clip_ratio_high": 0.1}
    same(slopes(module.dppo_kl, [0.5, 1.2, 1.5], [1.0] * 3, **kl), [-0.5, -1.2, 0.0])
    kl = {"clip_ratio_low": 0.1, "clip_ratio_high": 9.0}
    same(slopes(module.dppo_kl, [0.5, 0.9, 1.5], [-1.0] * 3, **kl), [0.0, 0.9, 1.5])


def covariance_oracle(module: ModuleType) -> None:
    # means -2 and 0.5 inside; covariances 1.5, -1.5, 0, 0, 2.5, -2.5
    log_probs = doubles([[-1.0, -1.0, -2.0, -9.0], [-2.0, -3.0, -3.0, -9.0]])
    advantages = doubles([[2.0, -1.0, 0.5, 90.0], [0.5, -2.0, 3.0, 90.0]])
    mask = torch.tensor([[True, True, True, False]] * 2)
    args = (log_probs, log_probs, advantages, mask)
    assert module.select_kl_cov(*args, kl_cov_ratio=0.34).nonzero().tolist() == [[0, 0], [1, 1]]
    assert module.select_kl_cov(*args, kl_cov_ratio=0.0).nonzero().tolist() == [[1, 1]]
    assert module.select_clip_cov(*args, seed=0, clip_cov_ratio=1.0).nonzero().tolist() == [[0, 0], [1, 1]]
    assert module.select_clip_cov(*args, seed=0, clip_cov_ratio=1.0, clip_cov_ub=2.0).nonzero().tolist() == [[0, 0]]
    assert len(module.select_clip_cov(*args, seed=0).nonzero()) == 1
    off = log_probs - doubles([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    held = module.select_clip_cov(log_probs, off, advantages, mask, seed=0, clip_cov_ratio=1.0)
    assert held.nonzero().tolist() == [[1, 1]]
    many = (*torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(1)).unbind(), torch.ones(4, 50).bool())
    draws = [module.select_clip_cov(*many, seed=5, clip_cov_lb=0.0, clip_cov_ratio=0.05) for _ in range(2)]
    assert torch.equal(*draws)
    marks = torch.tensor([[False, False, True]])
    same(slopes(module.clip_cov, [1.5, 1.1, 1.1], [1.0] * 3, selected=marks), [0.0, -1.1, 0.0])
    same(slopes(module.kl_cov, [1.5, 1.5, 0.5], [1.0] * 3, selected=marks, ppo_kl_coef=0.5), [-1.5, -1.5, -1.0])


def correction_oracle(module: ModuleType) -> None:
    rollout = doubles([[-1.0, -1.0, math.nan, -9.0], [-1.0, -1.0, -1.0, -9.0]])
    training = doubles([[-1 + LN2, -1 - 2 * LN2, -5.0, 0.0], [-1 + LN2, -1.0, -1.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]] * 2)

    def found(**rule: Any) -> Any:
        return module.rollout_correction(training, rollout, mask, module.CorrectionRule(**rule))

    same(found(rollout_is="token", rollout_is_threshold=1.5).weights, [1.5, 0.25, 1, 0, 1.5, 1, 1, 0])
    same(found(rollout_is="token", rollout_is_threshold="0.5_2.5").weights, [2, 0, 1, 0, 2, 1, 1, 0])
    same(found(rollout_is="sequence").weights, [0.5, 0.5, 0.5, 0, 2, 2, 2, 0])
    normal = found(rollout_is="token", rollout_is_batch_normalize=True).weights
    same(normal[1], [2 * 6 / 7.25, 6 / 7.25, 6 / 7.25, 0])
    kept = {  # the second row's: k1 of the first token is -ln 2
        ("token_k1", "0.4_3"): [True, False, True, True, True, True],
        ("token_k1", "0.6_5"): [False, True, True, False, True, True],
        ("token_k2", "0.25"): [True, False, True, True, True, True],
        ("token_k3", "0.31"): [True, False, True, True, True, True],
        ("seq_sum_k1", "0.4_1.9"): [False] * 3 + [True] * 3,
        ("seq_mean_k1", "0.79_1.5"): [True] * 6,
        ("seq_mean_k2", "0.2"): [False] * 3 + [True] * 3,
        ("seq_max_k3", "0.5"): [False] * 3 + [True] * 3,
    }
    for (kind, threshold), expected in kept.items():
        result = found(rollout_rs=kind, rollout_rs_threshold=threshold)
        assert result.keep[:, :3].flatten().tolist() == expected, kind
        assert not result.weights[~result.keep].any() and not result.keep[:, 3].any()
        assert torch.equal(result.loss_mask, mask)
    narrow = found(rollout_rs="token_k2", rollout_rs_threshold=0.25, denominator="kept")
    assert torch.equal(narrow.loss_mask, narrow.keep) and narrow.keep.sum() == 5
    measured = {key.removeprefix("rollout_corr/"): value for key, value in module.correction_metrics([narrow]).items()}
    assert measured["kl"] == pytest.approx(0.0) and measured["missing_fraction"] == pytest.approx(1 / 6)
    assert measured["k3_kl"] == pytest.approx((1 - LN2 + (-0.75 + 2 * LN2) + 1 - LN2) / 5)
    assert measured["rollout_rs_masked_fraction"] == pytest.approx(1 / 6)
    assert measured["log_ppl_diff_max"] == pytest.approx(LN2 / 2)
    assert measured["chi2_token"] == pytest.approx((3 - 15 / 16 + 3) / 5)
    parts = [
        module.rollout_correction(training[i], rollout[i], mask[i], module.CorrectionRule(rollout_is="token"))
        for i in ([0], [1])
    ]
    deviation = torch.tensor([2, 0.25, 1, 2, 1, 1]).std(correction=0)
    assert module.correction_metrics(parts)["rollout_corr/rollout_is_std"] == pytest.approx(float(deviation))
    assert module.correction_metrics(parts)["rollout_corr/rollout_is_min"] == pytest.approx(0.25)


ORACLES: dict[str, Callable[[ModuleType], None]] = {
    "loss": weights_oracle,
    "sequence_losses": sequence_oracle,
    "gradient_losses": gradient_oracle,
    "covariance_losses": covariance_oracle,
    "rollout_correction": correction_oracle,
}

LOSS, SEQUENCE, GRADIENT, COVARIANCE, CORRECTION = ORACLES
MUTANTS = [  # what is wrong, the module, its text, what stands there instead
    ("no weights", LOSS, "token_losses * tokens.weights", "token_losses"),
    ("gradient to the weights", LOSS, "weights.detach()", "weights.clone()"),
    ("negative weights pass", LOSS, "(weights < 0).any()", "(weights < -9).any()"),
    ("GSPO sums the log-ratios", SEQUENCE, "/ mask.sum(dim=1).clamp(min=1)", ""),
    ("mean over padding", SEQUENCE, "mask.sum(dim=1).clamp(min=1)", "mask.shape[1]"),
    ("GSPO without a gradient", SEQUENCE, "(tokens.log_probs - tokens.log_probs.detach())", "0 * tokens.log_probs"),
    ("GSPO optimistic", SEQUENCE, "torch.maximum(free, clipped)", "torch.minimum(free, clipped)"),
    ("GMPO clips the wrong side", SEQUENCE, "torch.where(advantage > 0,", "torch.where(advantage < 0,"),
    ("GMPO moves without an advantage", SEQUENCE, "torch.where(advantage == 0, 0.0, bounded)", "bounded"),
    ("GMPO takes a token's advantage", SEQUENCE, "-_token_means(advantage, response_mask)", "-advantage[:, 0]"),
    (
        "arithmetic mean of weights",
        SEQUENCE,
        "_token_means(tokens.weights.log(), response_mask).exp()",
        "_token_means(tokens.weights, response_mask)",
    ),
    (
        "REINFORCE backwards",
        GRADIENT,
        "-tokens.advantages * tokens.log_probs, {}",
        "tokens.advantages * tokens.log_probs, {}",
    ),
    (
        "CISPO with a gradient through the weight",
        GRADIENT,
        "tokens.log_ratio.detach().exp()\n    bounded",
        "tokens.log_ratio.exp()\n    bounded",
    ),
    ("CISPO unclipped", GRADIENT, "-bounded * tokens", "-ratio * tokens"),
    ("SAPO with one temperature", GRADIENT, ".masked_fill(tokens.advantages > 0, tau_pos)", ""),
    ("SAPO without its scale", GRADIENT, " * (4 / tau)", " * 4"),
    ("TV of the ratio", GRADIENT, "change = now - before", "change = tokens.log_ratio.detach().exp() - 1"),
    (
        "TV on the wrong side",
        GRADIENT,
        "torch.where(tokens.advantages > 0, change",
        "torch.where(tokens.advantages < 0, change",
    ),
    ("ratio uncapped", GRADIENT, ".exp().clamp(max=clip_ratio_c)", ".exp()"),
    ("KL holds the way back", GRADIENT, " | (now <= before)", ""),
    ("KL the other way round", GRADIENT, "-before * tokens", "before * tokens"),
    ("KL without the other tokens", GRADIENT, " + (1 - before) * others", ""),
    (
        "covariance of padding",
        COVARIANCE,
        "_covariances(tokens)[response_mask]",
        "_covariances(tokens).roll(1)[response_mask]",
    ),
    ("covariance not centred", COVARIANCE, "(advantages - advantages.sum() / count)", "advantages"),
    ("mean over padding too", COVARIANCE, "tokens.response_mask.sum().clamp(min=1)", "tokens.response_mask.numel()"),
    ("the lowest covariances", COVARIANCE, "descending=True", "descending=False"),
    ("no upper bound", COVARIANCE, " & (covariance < clip_cov_ub)", ""),
    ("clipped ones are drawn", COVARIANCE, " & ~(clipped > free)", ""),
    ("all are drawn", COVARIANCE, "return max(1, int(ratio * int(mask.sum())))", "return int(mask.sum())"),
    ("none where the share is small", COVARIANCE, "return max(1, int", "return max(0, int"),
    ("drawn from the global state", COVARIANCE, ", generator=torch.Generator().manual_seed(seed)", ""),
    ("selected ones still pull", COVARIANCE, ".masked_fill(selected, 0.0)", ""),
    (
        "all are pulled back",
        COVARIANCE,
        "torch.where(selected, ppo_kl_coef * tokens.log_ratio.abs(), 0.0)",
        "ppo_kl_coef * tokens.log_ratio.abs()",
    ),
    ("pulled one way", COVARIANCE, "tokens.log_ratio.abs()", "tokens.log_ratio"),
    ("inverse weights", CORRECTION, "clamped(training - rollout)", "clamped(rollout - training)"),
    ("truncation drops", CORRECTION, "ratio.clamp(max=high)", "ratio.masked_fill(too_high, 0.0)"),
    ("IcePop one-sided", CORRECTION, "too_low | too_high", "too_high"),
    ("sequence mean for product", CORRECTION, "log_ratio.sum(dim=1, keepdim=True)", "log_ratio.mean(1, keepdim=True)"),
    ("normalised by the sum", CORRECTION, "/ counted.sum().clamp(min=1)", ""),
    (
        "missing as certain",
        CORRECTION,
        "training = log_probs.detach().double().masked_fill(~present",
        "training = log_probs.detach().double().masked_fill(~response_mask",
    ),
    ("k1 of the other ratio", CORRECTION, "values = -log_ratio", "values = log_ratio"),
    ("k2 without the half", CORRECTION, "0.5 * log_ratio.square()", "log_ratio.square()"),
    ("k3 of the other ratio", CORRECTION, "torch.expm1(log_ratio) - log_ratio", "torch.expm1(-log_ratio) + log_ratio"),
    ("sum for mean", CORRECTION, 'total if level == "seq_sum" else', 'total if level != "token" else'),
    ("any for max", CORRECTION, ".amax(dim=1, keepdim=True)", ".amin(dim=1, keepdim=True)"),
    ("one bound alone", CORRECTION, "mask & (statistic >= low) & (statistic <= high)", "mask & (statistic <= high)"),
    ("rejected ones weigh", CORRECTION, "weights.masked_fill(~keep, 0.0)", "weights.masked_fill(~response_mask, 0.0)"),
    ("always over the kept", CORRECTION, 'keep if rule.denominator == "kept" else response_mask', "keep"),
    ("rejection uncounted", CORRECTION, "rejected = mask & ~keep", "rejected = mask & keep"),
    ("mean of means", CORRECTION, "earlier[1] + float(count)", "max(earlier[1], float(count))"),
    ("extremes mixed up", CORRECTION, 'max if name.endswith("_max") else min', "max"),
]


@pytest.mark.parametrize("name", ORACLES)
def test_the_sources_as_they_are_pass_their_oracle(name: str) -> None:
    ORACLES[name](import_module(f"{PACKAGE}.{name}"))


@pytest.mark.parametrize(
    ("name", "right", "wrong"), [mutant[1:] for mutant in MUTANTS], ids=[row[0] for row in MUTANTS]
)
def test_a_wrong_variant_is_found_out(name: str, right: str, wrong: str) -> None:
    source = inspect.getsource(import_module(f"{PACKAGE}.{name}"))
    assert source.count(right) == 1, "the mutant no longer fits the source: change its text"
    mutant = ModuleType(f"{PACKAGE}.{name}_mutant")
    mutant.__package__ = PACKAGE
    exec(compile(source.replace(right, wrong), mutant.__name__, "exec"), mutant.__dict__)
    with pytest.raises(AssertionError):
        ORACLES[name](mutant)
