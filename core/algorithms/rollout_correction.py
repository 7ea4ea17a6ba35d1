"""Correction for the gap between the engine that sampled the tokens and the one that trains on them.

The training engine never computes quite the log-probs under which the inference engine sampled. Importance weights
repair the expectation, rejection leaves out what no weight can repair, and the gap is measured whether or not it is
corrected. Two forms, by what is handed in as `log_probs`:
- three policies (decoupled): those of the policy before the step's first update, recomputed by the training engine, on
  the whole batch; the loss then compares the current policy with it, under these weights.
- two policies (bypass): the current policy's, detached, micro-batch by micro-batch, while the loss takes the rollout's
  as `old_log_probs`. PPO's ratio then is the importance weight already: give it rejection alone. `reinforce` has no
  ratio: give it the weights.

Nothing outside the mask is read, and all results are 0 (false) there. A missing rollout log-prob (NaN) gets ratio 1 and
is counted. `B` is the number of sequences, `T` the padded response width in tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from .checks import check_finite, check_number, check_shapes
from .loss import clamped

REJECTION_KINDS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""Whose statistic, and of what: `k1` is `-l` (rollout less training, as in `kl`), `k2` `l² / 2`, `k3` `exp(l) - 1 - l`,
with `l` the log-ratio of `rollout_correction`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionRule:
    """What to correct; by default nothing, and the gap is only measured.

    Example: `CorrectionRule(rollout_is="token", rollout_is_threshold="0.5_2", rollout_rs="seq_mean_k1,token_k3",
    rollout_rs_threshold="1.001,0.5")` weighs tokens by their ratio, those outside [0.5, 2] by 0 (IcePop); drops every
    sequence whose geometric mean ratio is outside [1 / 1.001, 1.001], and every token whose k3 is above 0.5.

    Raises:
        ConfigError: an unknown name, or a threshold that is missing, malformed or out of its bound.
    """

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights by the token's ratio, or by the product of the ratios of its sequence; None: all 1."""
    rollout_is_threshold: float | str = 2.0
    """A number `c` caps the weight at `c` (truncated importance sampling); `"lo_hi"` sets it to 0 outside (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the tokens (sequences, where a sequence has one weight) of the call, after
    the threshold and before rejection. Then the call must see the whole mini-batch."""
    rollout_rs: str | None = None
    """Names in `REJECTION_KINDS`, separated by commas; what any of them rejects is rejected."""
    rollout_rs_threshold: float | str | None = None
    """One for all, or one for each, separated by commas. k1: `lo_hi` bounds of the ratio rollout / training (the
    inverse of the weight, as verl has it), a single `u` means `1 / u` to `u`; k2 and k3: an upper bound in nats.
    Bounds are inclusive."""
    denominator: Literal["all", "kept"] = "all"
    """Whether rejected tokens count in the mean of the loss.

    `all`: they stay in it with weight 0, so a step shrinks with the rejected fraction (always in the metrics). It is
    the sum over all that was sampled, and needs no knowledge of the other micro-batches.
    `kept`: the mean is over the kept tokens, so a step keeps its size, and few tokens can own it. Then `keep` must be
    known, and counted, for the whole mini-batch before its first micro-batch is differentiated."""

    def __post_init__(self) -> None:
        _check_one_of("rollout_is", self.rollout_is, (None, "token", "sequence"))
        _check_one_of("denominator", self.denominator, ("all", "kept"))
        _interval("rollout_is_threshold", self.rollout_is_threshold, smallest=0.0)
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ConfigError(
                "rollout_is_batch_normalize is True; without rollout_is there are no weights to normalise."
            )
        if self.rollout_rs_threshold is not None and self.rollout_rs is None:
            raise ConfigError(
                f"rollout_rs_threshold is {self.rollout_rs_threshold!r}; without rollout_rs it does nothing."
            )
        self.rejections()

    def rejections(self) -> dict[str, tuple[float, float]]:
        """Each rejection's inclusive interval, in nats, by its kind."""
        if self.rollout_rs is None:
            return {}
        kinds = [kind.strip() for kind in self.rollout_rs.split(",")]
        thresholds = str(self.rollout_rs_threshold).split(",")
        for kind in kinds:
            _check_one_of("rollout_rs", kind, REJECTION_KINDS)
        if len(set(kinds)) != len(kinds):
            raise ConfigError(f"rollout_rs is {self.rollout_rs!r}; it must not name a kind twice.")
        if self.rollout_rs_threshold is None or len(thresholds) not in (1, len(kinds)):
            raise ConfigError(
                f"rollout_rs_threshold is {self.rollout_rs_threshold!r}; rollout_rs {self.rollout_rs!r} needs one for "
                f"all or {len(kinds)}, separated by commas."
            )
        intervals = {}
        for kind, text in zip(kinds, thresholds * (len(kinds) if len(thresholds) == 1 else 1), strict=True):
            if kind.endswith("k1"):
                low, high = _interval("rollout_rs_threshold", text, smallest=None)
                intervals[kind] = (math.log(low), math.log(high))
            else:
                bound = _number("rollout_rs_threshold", text)
                check_number("rollout_rs_threshold", bound)
                intervals[kind] = (-math.inf, bound)
        return intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrection:
    """What a correction gives back; nothing in it carries a gradient."""

    weights: Tensor
    """`[B, T]`, for the `weights` of a policy loss: 0 where rejected and outside the mask."""
    keep: Tensor
    """`[B, T]` bool, the response tokens that were not rejected."""
    loss_mask: Tensor
    """`[B, T]` bool, over which to take the loss and to count tokens and sequences: the response mask under the
    denominator `all`, `keep` under `kept`."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """Name to (sum, count), float64 scalars; adding those of the micro-batches gives those of the whole.

    Under `rollout_corr/`, of tokens whose rollout log-prob is there, with `l` the clamped log-ratio:
    - `kl` (`-l`) and `k3_kl` (`exp(l) - 1 - l`): estimates of KL(rollout || training) in nats; `chi2_token`
      (`exp(2 l) - 1`), `chi2_seq` (the same of `Σ l`, clamped).
    - per sequence, with the mean negative log-prob of its tokens: `training_log_ppl`, `rollout_log_ppl`, their
      exponentials `training_ppl`, `rollout_ppl`; `log_ppl_diff` (training less rollout), `log_ppl_abs_diff` and
      `ppl_ratio`, its exponential; extremes `log_ppl_diff_max`, `log_ppl_diff_min`.
    - `missing_fraction` and `rollout_rs_masked_fraction` (rejected), of all response tokens;
      `rollout_rs_seq_masked_fraction`, of the sequences, by any token; `rollout_rs_<kind>_masked_fraction` by kind.
    - with weights, over all response tokens, after the threshold: `rollout_is_mean`, `rollout_is_square` (from which
      `correction_metrics` makes `rollout_is_std` and `rollout_is_eff_sample_size`), extremes `rollout_is_max`,
      `rollout_is_min`; `rollout_is_ratio_fraction_high` and `_low`, of ratios beyond the threshold."""
    extremes: dict[str, Tensor]
    """Name to float64 scalar, combined by max where the name ends in `_max` and by min in `_min`; {} without tokens."""


def rollout_correction(
    log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, rule: CorrectionRule
) -> RolloutCorrection:
    """Weigh and reject by `l = clamp(log_probs - rollout_log_probs, ±20)`, and measure it.

    Weights: `w = exp(l)`, or `exp(clamp(Σ l, ±20))` of the sequence, thresholded (truncated importance sampling, Yao
    et al., 2025; IcePop, arXiv 2510.18855, §2.3.2). Rejection as in `CorrectionRule`; a sequence's statistic is over
    its response tokens, and rejects the whole sequence. Both read the same `l`: neither sees what the other did.
    Statistics are float64.

    The metrics are always there, described at `RolloutCorrection.metrics`.

    Example: log-probs -0.1, -0.2, -0.3 against a rollout's -0.1, NaN, -0.5 have ratios 1, 1, 1.221403.

    Args:
        log_probs: `[B, T]`, float32 or float64, in nats; see the module for whose.
        rollout_log_probs: `[B, T]` of the inference engine, in nats; NaN where it gave none.
        response_mask: `[B, T]` bool.
        rule: what to correct.

    Raises:
        ValueError: wrong shape, type or device.
        NonFiniteInputError: inside the mask a log-prob is NaN or infinite, or a rollout log-prob infinite.
    """
    check_shapes(response_mask, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    present = response_mask & ~rollout_log_probs.isnan()
    check_finite(response_mask, log_probs=log_probs)
    check_finite(present, rollout_log_probs=rollout_log_probs)
    training = log_probs.detach().double().masked_fill(~present, 0.0)
    rollout = rollout_log_probs.detach().double().masked_fill(~present, 0.0)
    log_ratio = clamped(training - rollout)  # 0 where the rollout's is missing: ratio 1

    weights, metrics, extremes = _importance(log_ratio, response_mask, rule)
    keep, rejected = _rejection(log_ratio, response_mask, rule)
    mismatch, mismatch_extremes = _mismatch(training, rollout, log_ratio, present)
    missing = _share(response_mask & ~present, response_mask)
    return RolloutCorrection(
        weights=weights.masked_fill(~keep, 0.0).to(log_probs.dtype),
        keep=keep,
        loss_mask=keep if rule.denominator == "kept" else response_mask,
        metrics={
            f"rollout_corr/{name}": value
            for name, value in (mismatch | metrics | rejected | {"missing_fraction": missing}).items()
        },
        extremes={f"rollout_corr/{name}": value for name, value in (mismatch_extremes | extremes).items()},
    )


def correction_metrics(parts: Sequence[RolloutCorrection]) -> dict[str, float]:
    """The metrics of a whole batch from those of its parts, however it was split.

    Sums over counts, and extremes over all; where there are weights also `rollout_is_std` (ddof 0) and
    `rollout_is_eff_sample_size` (`(Σ w)² / (n Σ w²)`, a fraction, 1 for equal weights). What nothing was counted for
    is left out.
    """
    totals: dict[str, tuple[float, float]] = {}
    result: dict[str, float] = {}
    for part in parts:
        for name, (value, count) in part.metrics.items():
            earlier = totals.get(name, (0.0, 0.0))
            totals[name] = (earlier[0] + float(value), earlier[1] + float(count))
        for name, value in part.extremes.items():
            combine = max if name.endswith("_max") else min
            result[name] = combine(result.get(name, float(value)), float(value))
    result |= {name: value / count for name, (value, count) in totals.items() if count > 0}
    square = result.pop("rollout_corr/rollout_is_square", None)
    if square is not None:
        mean = result["rollout_corr/rollout_is_mean"]
        result["rollout_corr/rollout_is_std"] = math.sqrt(max(0.0, square - mean**2))
        result["rollout_corr/rollout_is_eff_sample_size"] = mean**2 / square if square > 0 else 0.0
    return result


_Sums = dict[str, tuple[Tensor, Tensor]]


def _importance(log_ratio: Tensor, mask: Tensor, rule: CorrectionRule) -> tuple[Tensor, _Sums, dict[str, Tensor]]:
    """Weights `[B, T]` float64 before rejection, their sums and extremes."""
    if rule.rollout_is is None:
        return torch.ones_like(log_ratio), {}, {}
    if rule.rollout_is == "token":
        ratio = log_ratio.exp()
    else:
        ratio = clamped(log_ratio.sum(dim=1, keepdim=True)).exp().expand_as(log_ratio)
    low, high = _interval("rollout_is_threshold", rule.rollout_is_threshold, smallest=0.0)
    too_low, too_high = ratio < low, ratio > high
    if isinstance(rule.rollout_is_threshold, str) and "_" in rule.rollout_is_threshold:
        weights = ratio.masked_fill(too_low | too_high, 0.0)
    else:
        weights = ratio.clamp(max=high)
    sums = {
        "rollout_is_mean": _share(weights, mask),
        "rollout_is_square": _share(weights.square(), mask),
        "rollout_is_ratio_fraction_high": _share(too_high, mask),
        "rollout_is_ratio_fraction_low": _share(too_low, mask),
    }
    within = weights[mask]
    extremes = {"rollout_is_max": within.max(), "rollout_is_min": within.min()} if len(within) else {}
    if rule.rollout_is_batch_normalize:
        counted = mask if rule.rollout_is == "token" else mask & (mask.cumsum(dim=1) == 1)  # or each row's first token
        mean = weights[counted].sum() / counted.sum().clamp(min=1)
        weights = weights / torch.where(mean > 0, mean, 1.0)  # all 0 stays all 0
    return weights, sums, extremes


def _rejection(log_ratio: Tensor, mask: Tensor, rule: CorrectionRule) -> tuple[Tensor, _Sums]:
    """The kept tokens `[B, T]`, and what was rejected."""
    keep, sums = mask, {}
    for kind, (low, high) in rule.rejections().items():
        statistic = _statistic(kind, log_ratio, mask)
        accepted = mask & (statistic >= low) & (statistic <= high)
        sums[f"rollout_rs_{kind}_masked_fraction"] = _share(~accepted, mask)
        keep = keep & accepted
    rejected = mask & ~keep
    sums["rollout_rs_masked_fraction"] = _share(rejected, mask)
    sums["rollout_rs_seq_masked_fraction"] = _share(rejected.any(dim=1), mask.any(dim=1))
    return keep, sums


def _statistic(kind: str, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` of tokens or `[B, 1]` of sequences, in nats."""
    level, _, divergence = kind.rpartition("_")
    if divergence == "k1":
        values = -log_ratio
    elif divergence == "k2":
        values = 0.5 * log_ratio.square()
    else:
        values = _k3(log_ratio)
    if level == "token":
        return values
    values = values.masked_fill(~mask, 0.0)
    if level == "seq_max":  # k2 and k3 are >= 0, so what stands outside the mask is never the largest
        return torch.cat([values, values.new_zeros(len(values), 1)], dim=1).amax(dim=1, keepdim=True)
    total = values.sum(dim=1, keepdim=True)
    return total if level == "seq_sum" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _mismatch(training: Tensor, rollout: Tensor, log_ratio: Tensor, present: Tensor) -> tuple[_Sums, dict[str, Tensor]]:
    rows, count_B = present.any(dim=1), present.sum(dim=1).clamp(min=1)
    training_B, rollout_B = -training.sum(dim=1) / count_B, -rollout.sum(dim=1) / count_B
    difference_B = training_B - rollout_B
    sums = {
        "kl": _share(-log_ratio, present),
        "k3_kl": _share(_k3(log_ratio), present),
        "chi2_token": _share(torch.expm1(2 * log_ratio), present),
        "chi2_seq": _share(torch.expm1(2 * clamped(log_ratio.sum(dim=1))), rows),
        "training_log_ppl": _share(training_B, rows),
        "rollout_log_ppl": _share(rollout_B, rows),
        "training_ppl": _share(clamped(training_B).exp(), rows),
        "rollout_ppl": _share(clamped(rollout_B).exp(), rows),
        "log_ppl_diff": _share(difference_B, rows),
        "log_ppl_abs_diff": _share(difference_B.abs(), rows),
        "ppl_ratio": _share(clamped(difference_B).exp(), rows),
    }
    within = difference_B[rows]
    extremes = {"log_ppl_diff_max": within.max(), "log_ppl_diff_min": within.min()} if len(within) else {}
    return sums, extremes


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _share(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    return values.masked_fill(~where, 0).sum(dtype=torch.float64), where.sum(dtype=torch.float64)


def _interval(argument: str, threshold: float | str, *, smallest: float | None) -> tuple[float, float]:
    """`lo_hi`, or a single `u`: from `smallest`, or from `1 / u` where that is None."""
    low_text, separator, high_text = str(threshold).partition("_")
    low = _number(argument, low_text)
    high = _number(argument, high_text) if separator else low
    if not separator:
        check_number(argument, high, more_than=0)
        low = 1 / high if smallest is None else smallest
    elif smallest is None:
        check_number(argument, low, more_than=0)
    else:
        check_number(argument, low, at_least=smallest)
    check_number(argument, high, at_least=low)
    return low, high


def _number(argument: str, text: str) -> float:
    try:
        return float(text.replace("_", "?"))  # Python reads 0.1_2 as 0.12
    except ValueError:
        raise ConfigError(f"{argument} has {text!r}; it must be a number, or lo_hi such as 0.5_2 for bounds.") from None


def _check_one_of(argument: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{argument} is {value!r}; it must be one of {', '.join(map(str, allowed))}.")
