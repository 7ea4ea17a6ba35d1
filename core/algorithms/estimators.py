"""The advantage estimators by name, with what each must be given beyond rewards and mask."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .advantage import grpo
from .group_advantages import gdpo, gpg, grpo_passk, opo, reinforce_plus_plus_baseline, rloo
from .return_advantages import gae, reinforce_plus_plus, remax


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """How advantages are computed, and what the caller must bring.

    Example: `gae` needs `{"values"}`, a keyword argument, and may be given `gamma` and `lam`; `grpo` needs
    `{"groups"}`, the third argument, which for estimators that do not need it may be None.
    """

    compute: Callable[..., tuple[Tensor, Tensor]]
    """`f(token_rewards, response_mask, groups, *, valid=None, **needs, **options) -> (advantages, returns)`."""
    needs: frozenset[str]
    """Out of `groups`, `values`, `baseline_scores`, `reward_components`."""
    options: frozenset[str] = frozenset()
    """Keyword arguments that a configuration may set."""


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(compute=gae, needs=frozenset({"values"}), options=frozenset({"gamma", "lam"})),
    "gdpo": Estimator(
        compute=gdpo,
        needs=frozenset({"groups", "reward_components"}),
        options=frozenset({"weights", "epsilon"}),
    ),
    "gpg": Estimator(compute=gpg, needs=frozenset({"groups"}), options=frozenset({"f_norm"})),
    "grpo": Estimator(compute=grpo, needs=frozenset({"groups"}), options=frozenset({"norm_by_std", "epsilon"})),
    "grpo_passk": Estimator(
        compute=grpo_passk, needs=frozenset({"groups"}), options=frozenset({"norm_by_std", "epsilon"})
    ),
    "opo": Estimator(compute=opo, needs=frozenset({"groups"})),
    "reinforce_plus_plus": Estimator(compute=reinforce_plus_plus, needs=frozenset(), options=frozenset({"gamma"})),
    "reinforce_plus_plus_baseline": Estimator(compute=reinforce_plus_plus_baseline, needs=frozenset({"groups"})),
    "remax": Estimator(compute=remax, needs=frozenset({"baseline_scores"})),
    "rloo": Estimator(compute=rloo, needs=frozenset({"groups"})),
}
"""By the name in `algorithm.adv_estimator`."""
