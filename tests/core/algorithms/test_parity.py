"""The same inputs through a peer's own functions give the same numbers; without the peer there is nothing to compare.

Peers: verl (`pip install verl` and what it imports), and Liger-Kernel, whose `chunked_loss` is the GRPO loss that TRL
runs (`pip install liger-kernel trl`). Neither is a dependency.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moonshift.core.algorithms import PolicyLoss, aggregate
from moonshift.core.algorithms.policy_losses import POLICY_LOSSES
from moonshift.core.algorithms.rollout_correction import (
    REJECTION_KINDS,
    CorrectionRule,
    correction_metrics,
    rollout_correction,
)

TOLERANCE = 1e-5


def peer(module: str) -> ModuleType:
    return pytest.importorskip(module, reason=f"{module} is not installed, so its numbers cannot be had")


def case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, advantages (one a sequence) and mask; every row has a token."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(8, 12, generator=generator, dtype=torch.float64) - 0.01
    log_probs = (old + 0.3 * torch.randn(8, 12, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64).expand(8, 12).contiguous()
    mask = torch.arange(12)[None] < torch.randint(1, 13, (8, 1), generator=generator)
    return log_probs, old, advantages, mask


def ours(name: str, tensors: tuple[Tensor, Tensor, Tensor, Tensor], mode: str, **options: Any) -> tuple[float, Tensor]:
    leaf = tensors[0].clone().requires_grad_()
    loss: PolicyLoss = POLICY_LOSSES[name].compute(leaf, *tensors[1:], **options)
    mask = tensors[3]
    total = aggregate(loss.token_losses, mask, mode, num_tokens=int(mask.sum()), num_sequences=len(mask))
    return total.item(), torch.autograd.grad(total, leaf)[0]


def same(ours: tuple[float, Tensor], peers: Tensor, leaf: Tensor) -> None:
    (slope,) = torch.autograd.grad(peers, leaf)
    assert ours[0] == pytest.approx(peers.item(), abs=TOLERANCE)
    torch.testing.assert_close(ours[1], slope, rtol=0, atol=TOLERANCE)


VERL = {  # the peer's settings, our options, our options of the selection
    "vanilla": ({}, {"clip_ratio_c": 3.0}, {}),
    "dppo_tv": ({}, {"clip_ratio_c": 3.0}, {}),
    "dppo_kl": ({}, {"clip_ratio_c": 3.0}, {}),
    "gspo": ({}, {}, {}),
    "cispo": ({}, {}, {}),
    "geo_mean": ({}, {}, {}),
    "sapo": ({"tau_pos": 1.0, "tau_neg": 1.3}, {"tau_pos": 1.0, "tau_neg": 1.3}, {}),
    "gpg": ({}, None, {}),
    "clip_cov": (
        {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}},
        {},
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0, "seed": 0},  # all of them: nothing is drawn
    ),
    "kl_cov": ({"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}}, None, {"kl_cov_ratio": 0.2}),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", VERL)
def test_verl_has_the_same_losses_and_gradients(name: str, seed: int, weighted: bool) -> None:
    algorithms = peer("verl.trainer.ppo.core_algos")
    configs = import_module("verl.workers.config")
    settings, given, select_options = VERL[name]
    settings = dict(settings)
    if "policy_loss" in settings:
        settings["policy_loss"] = configs.PolicyLossConfig(**settings["policy_loss"])
    config = configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.15,
        clip_ratio_high=0.25,
        **settings,
    )
    tensors = case(seed)
    weights = torch.rand(8, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    weights = weights if weighted else None
    if given is not None and name != "sapo":
        given = given | {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25}
    options: dict[str, Any] = {**(given or {}), "weights": weights}
    if name == "kl_cov":
        options["ppo_kl_coef"] = 0.5
    loss = POLICY_LOSSES[name]
    if loss.select is not None:
        options["selected"] = loss.select(
            *tensors,
            **select_options,
            **({"clip_ratio_low": 0.15, "clip_ratio_high": 0.25} if name == "clip_cov" else {}),
        )
    leaf = tensors[0].clone().requires_grad_()
    theirs, _ = algorithms.get_policy_loss_fn(name)(
        old_log_prob=tensors[1],
        log_prob=leaf,
        advantages=tensors[2],
        response_mask=tensors[3].double(),
        loss_agg_mode=loss.agg_mode or "token-mean",
        config=config,
        rollout_is_weights=weights,
    )
    same(ours(name, tensors, loss.agg_mode or "token-mean", **options), theirs, leaf)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.5, "0.7_1.6"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_verl_has_the_same_weights_rejection_and_metrics(
    level: Any, threshold: float | str, normalize: bool, kind: str
) -> None:
    helper = peer("verl.trainer.ppo.rollout_corr_helper")
    training, rollout, _, mask = case(3)
    bound = "0.8_1.3" if kind.endswith("k1") else 0.05
    rule = CorrectionRule(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs=kind,
        rollout_rs_threshold=bound,
    )
    found = rollout_correction(training, rollout, mask, rule)
    weights, keep, metrics = helper.compute_rollout_correction_and_rejection_mask(
        training,
        rollout,
        mask.double(),
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs=kind,
        rollout_rs_threshold=bound,
    )
    assert torch.equal(found.keep, keep.bool())
    expected = weights.batch["rollout_is_weights"] * found.keep
    torch.testing.assert_close(found.weights, expected, rtol=0, atol=TOLERANCE)
    measured = correction_metrics([found])
    names = "kl k3_kl training_ppl rollout_ppl training_log_ppl rollout_log_ppl log_ppl_diff log_ppl_abs_diff"
    names += " log_ppl_diff_max log_ppl_diff_min ppl_ratio chi2_token chi2_seq rollout_rs_masked_fraction"
    names += f" rollout_rs_seq_masked_fraction rollout_rs_{kind}_masked_fraction rollout_is_mean"
    for name in names.split():
        theirs = metrics[f"rollout_corr/{name}"]
        assert measured[f"rollout_corr/{name}"] == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE), name


LIGER = {  # the peer's loss type and level, our aggregation
    "vanilla": ("dapo", "token", "token-mean"),
    "gspo": ("grpo", "sequence", "seq-mean-token-mean"),
    "sapo": ("sapo", "token", "seq-mean-token-mean"),
    "cispo": ("cispo", "token", "token-mean"),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LIGER)
def test_the_grpo_loss_of_trl_in_liger_is_the_same(name: str, seed: int) -> None:
    liger = peer("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
    kind, level, mode = LIGER[name]
    tensors = case(seed)
    leaf = tensors[0].clone().requires_grad_()
    weights = torch.rand(8, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    if name == "gspo":  # TRL spreads a token's weight over its sequence, we (and verl) leave it with the token
        weights = weights[:, :1].expand(8, 12)
    mask = tensors[3].double()
    # TRL's CISPO takes the bound itself, and has no lower one
    high = 1.25 if name == "cispo" else 0.25
    theirs, _ = liger.ppo_loss_fn(
        leaf,
        mask,
        tensors[2][:, 0],
        mask,
        old_per_token_logps=tensors[1],
        epsilon_low=0.15,
        epsilon_high=high,
        beta=0.0,
        loss_type=kind,
        importance_sampling_level=level,
        vllm_is_ratio=weights,
    )
    options: dict[str, Any] = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25}
    if name == "vanilla":
        options["clip_ratio_c"] = 1e9  # TRL has no dual clip
    elif name == "cispo":
        options["clip_ratio_low"] = 1.0
    elif name == "sapo":
        options = {}
    same(ours(name, tensors, mode, weights=weights, **options), theirs, leaf)
