"""The policy losses by name, each with what its caller must know: options, aggregation, and mini-batch statistic."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .covariance_losses import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from .gradient_losses import cispo, dppo_kl, dppo_tv, reinforce, sapo
from .loss import PolicyLoss, ppo_clip
from .sequence_losses import geo_mean, gspo

_CLIP = frozenset({"clip_ratio_low", "clip_ratio_high"})
_DUAL_CLIP = _CLIP | {"clip_ratio_c"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One policy loss: `compute(log_probs, old_log_probs, advantages, response_mask, *, weights=None, **options)`.

    Example: `POLICY_LOSSES["clip_cov"]` has `select`; call it on the whole mini-batch with its `select_options`, then
    `compute` on each micro-batch with `selected=` its rows of the answer.
    """

    compute: Callable[..., PolicyLoss]
    options: frozenset[str] = frozenset()
    """Keyword options of `compute` that the configuration sets."""
    agg_mode: str | None = None
    """The one mode of `aggregate` with which it is the paper's loss, or None where any will do."""
    select: Callable[..., Tensor] | None = None
    """The statistic over the whole mini-batch's detached tensors, `[M, T]` bool, whose rows `compute` wants."""
    select_options: frozenset[str] = frozenset()
    """Keyword options of `select`; `seed` among them is the caller's to draw, the others the configuration's."""


POLICY_LOSSES: dict[str, Loss] = {
    "vanilla": Loss(compute=ppo_clip, options=_DUAL_CLIP),
    "gspo": Loss(compute=gspo, options=_CLIP, agg_mode="seq-mean-token-mean"),
    "cispo": Loss(compute=cispo, options=_CLIP),
    "sapo": Loss(compute=sapo, options=frozenset({"tau_pos", "tau_neg"}), agg_mode="seq-mean-token-mean"),
    # GPG differs from REINFORCE by its advantages alone
    "gpg": Loss(compute=reinforce),
    "clip_cov": Loss(
        compute=clip_cov,
        options=_CLIP,
        select=select_clip_cov,
        select_options=_CLIP | {"seed", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
    ),
    "kl_cov": Loss(
        compute=kl_cov,
        options=frozenset({"ppo_kl_coef"}),
        select=select_kl_cov,
        select_options=frozenset({"kl_cov_ratio"}),
    ),
    "geo_mean": Loss(compute=geo_mean, options=_CLIP, agg_mode="seq-mean-token-mean"),
    "dppo_tv": Loss(compute=dppo_tv, options=_DUAL_CLIP),
    "dppo_kl": Loss(compute=dppo_kl, options=_DUAL_CLIP),
    "reinforce": Loss(compute=reinforce),
}
"""By the name in `actor.policy_loss.loss_mode`."""
