"""The weight of the KL in the reward, step by step: from the config, or the adaptive controller's."""

from moonshift.core.algorithms import AdaptiveKlController
from moonshift.core.config.schema import Config

from .commits import StageLookup
from .origin import Origin

WEIGHT = "actor/reward_kl_penalty_coeff"
KL = "actor/reward_kl_penalty"


def kl_weight(ledger: StageLookup, run_id: str, config: Config, origin: Origin, step: int) -> float | None:
    """Weight of the KL in the reward of `step`; None where there is none.

    The adaptive controller's value is kept in the ledger alone: it follows from the weight and the KL that the step
    before committed, so a resumed run has the one that the unbroken run had, and a fork goes on from its parent's.
    """
    settings = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return None
    if settings.type == "fixed":
        return settings.kl_coef
    before = ledger.stage(run_id, step - 1, "advantage")
    if before is None:
        return settings.kl_coef if origin.kl_coef is None else origin.kl_coef
    controller = AdaptiveKlController(value=before.metrics[WEIGHT], target=settings.target_kl, horizon=settings.horizon)
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return controller.updated(before.metrics[KL], samples).value
