"""Which correction of the rollouts a config asks for, and where it is made.

Three policies (decoupled): the weights are computed once, from the old log-probs, and stored in the redo log. Two
policies (`bypass_mode`): the rollout's log-probs stand in for the old ones, and the update weighs by its own policy.
"""

from collections.abc import Sequence

import torch

from ..algorithms import CorrectionRule, RolloutCorrection
from ..config.schema import Config
from ..errors import ConfigError
from .ranks import Ranks

MEASURE_ONLY = CorrectionRule()


def correction_rule(config: Config) -> CorrectionRule:
    """The rule as the config has it; by default it corrects nothing and measures.

    Raises:
        ConfigError: thresholds or names that do not fit, under the keys of `algorithm.rollout_correction`.
    """
    settings = config.algorithm.rollout_correction
    try:
        rule = CorrectionRule(
            rollout_is=settings.rollout_is,
            rollout_is_threshold=settings.rollout_is_threshold,
            rollout_is_batch_normalize=settings.rollout_is_batch_normalize,
            rollout_rs=settings.rollout_rs,
            rollout_rs_threshold=settings.rollout_rs_threshold,
            denominator=settings.denominator,
        )
    except ConfigError as error:
        raise ConfigError(f"algorithm.rollout_correction: {error}") from error
    whole = rule.rollout_is_batch_normalize or rule.denominator == "kept"
    if settings.bypass_mode and whole:
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode weighs micro-batch by micro-batch; rollout_is_batch_normalize "
            "and denominator=kept need the whole mini-batch. Set bypass_mode to false, or them to false and all."
        )
    if settings.bypass_mode and rule.rollout_is and config.actor_rollout_ref.actor.policy_loss.loss_mode != "reinforce":
        raise ConfigError(
            "algorithm.rollout_correction.rollout_is with bypass_mode is for policy_loss.loss_mode=reinforce: the "
            "other losses' own ratio is the weight already. Leave rollout_is out, or set loss_mode to reinforce."
        )
    return rule


def corrects(config: Config) -> bool:
    """Whether weights or rejections are asked for, beside the measuring that is always done."""
    settings = config.algorithm.rollout_correction
    return settings.rollout_is is not None or settings.rollout_rs is not None


def bypass_rule(config: Config) -> CorrectionRule | None:
    """The rule that the update applies by itself: with two policies only."""
    return correction_rule(config) if config.algorithm.rollout_correction.bypass_mode else None


def needs_old_log_probs(config: Config, on_policy: bool) -> bool:
    """Whether the policy's own log-probs are computed before the update."""
    if config.algorithm.rollout_correction.bypass_mode:
        return False
    return not on_policy or corrects(config) or config.algorithm.use_kl_in_reward


def corrections_of_all(ranks: Ranks, parts: Sequence[RolloutCorrection]) -> Sequence[RolloutCorrection]:
    """The parts of every rank, without their tokens: what `correction_metrics` needs."""
    if ranks.alone:
        return parts
    own = [
        [
            {name: [float(total), float(count)] for name, (total, count) in part.metrics.items()},
            {name: float(value) for name, value in part.extremes.items()},
        ]
        for part in parts
    ]
    none = torch.zeros(0, 0)
    return [
        RolloutCorrection(
            weights=none,
            keep=none.bool(),
            loss_mask=none.bool(),
            metrics={name: (torch.tensor(total), torch.tensor(count)) for name, (total, count) in metrics.items()},
            extremes={name: torch.tensor(value) for name, value in extremes.items()},
        )
        for told in ranks.gather(own)
        for metrics, extremes in told
    ]
