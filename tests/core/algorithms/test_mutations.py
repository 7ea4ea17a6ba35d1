"""The oracles can tell right from wrong: each deliberately wrong variant of the sources fails one of them.

A mutant is a module of the package with one piece of its text replaced, run from memory; no file is changed.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.mutation
PACKAGE = "moonshift.core.algorithms"


def doubles(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual.flatten(), torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=1e-5)


def advantage_oracle(module: ModuleType) -> None:
    rewards = doubles([[1.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [0.0]])
    groups = torch.tensor([0] * 4 + [1] * 4)
    advantages, _ = module.grpo(rewards, torch.ones(8, 1, dtype=torch.bool), groups)
    same(advantages, [1.499997, -0.499999, -0.499999, -0.499999, 0.499999, 0.499999, 0.499999, -1.499997])
    tenths = torch.full((11, 1), 0.1, dtype=torch.float64)  # their float64 mean is one ulp off
    equal, _ = module.grpo(tenths, torch.ones(11, 1, dtype=torch.bool), torch.zeros(11).long())
    assert not equal.any()
    valid = torch.tensor([True, False, True, True])
    rewards = doubles([[1.0], [9.0], [0.0], [1.0]])
    missing, _ = module.grpo(rewards, torch.ones(4, 1, dtype=torch.bool), torch.zeros(4).long(), valid=valid)
    same(missing, [0.57735, 0.0, -1.154701, 0.57735])
    coarse, _ = module.grpo(
        doubles([[1.0], [3.0]]), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2).long(), epsilon=1
    )
    same(coarse, [-0.414214, 0.414214])
    outside, _ = module.grpo(
        doubles([[1.0, 5.0], [0.0, 0.0]]), torch.tensor([[True, False]] * 2), torch.zeros(2).long(), norm_by_std=False
    )
    same(outside, [0.5, 0.0, -0.5, 0.0])


def kl_oracle(module: ModuleType) -> None:
    log_probs, reference = doubles([[-1.0, -2.0]]).requires_grad_(), doubles([[-1.5, -1.5]])
    same(module.kl_penalty(log_probs, reference, "k1"), [0.5, -0.5])
    same(module.kl_penalty(log_probs, reference, "k2"), [0.125, 0.125])
    value = module.kl_penalty(log_probs, reference, "k3")
    same(value, [0.106531, 0.148721])
    same(torch.autograd.grad(value.sum(), log_probs)[0], [0.393469, -0.648721])
    value = module.kl_penalty(log_probs, reference, "k3+")
    same(value, [0.106531, 0.148721])
    same(torch.autograd.grad(value.sum(), log_probs)[0], [0.5, -0.5])
    same(module.kl_penalty(doubles([[-1000.0, -3.0]]), doubles([[0.0, 0.0]]), "k3"), [10.0, 10.0])
    mask = torch.tensor([[True, False]])
    paid, mean_kl = module.apply_kl_in_reward(doubles([[1.0, 1.0]]), log_probs, reference, mask, 0.1, "k1")
    same(paid, [0.95, 1.0])
    same(mean_kl, [0.5])


def aggregate_oracle(module: ModuleType) -> None:
    losses = doubles([[1, 1, 9, 9, 9, 9], [3, 3, 9, 9, 9, 9], [0, 0, 0, 0, 0, 0]])
    mask = torch.arange(6)[None] < torch.tensor([[2], [2], [6]])
    expected = {
        "token-mean": 0.8,
        "token-sum": 8.0,
        "seq-mean-token-mean": 4 / 3,
        "seq-mean-token-sum": 8 / 3,
        "seq-mean-token-sum-norm": 1 / 3,
    }
    for mode, value in expected.items():
        counts = {"num_tokens": 10, "num_sequences": 3, "scale_factor": 8.0}
        parts = [module.aggregate(losses[rows], mask[rows], mode, **counts) for rows in ([0, 1], [2])]
        same(torch.stack(parts).sum(), [value])
    nothing = module.aggregate(losses, torch.zeros_like(mask), "token-mean", num_tokens=0, num_sequences=0)
    assert nothing.item() == 0.0


def loss_oracle(module: ModuleType) -> None:
    old = torch.full((1, 6), -1.0, dtype=torch.float64)
    log_probs = old + doubles([[0.5, 0.9, 1.0, 1.3, 1.5, 5.0]]).log()
    mask = torch.tensor([[True] * 6])
    good = module.ppo_clip(log_probs, old, torch.ones_like(old), mask, clip_ratio_high=0.28)
    same(good.token_losses, [-0.5, -0.9, -1.0, -1.28, -1.28, -1.28])
    assert good.metrics["actor/pg_clipfrac"][0].item() == 3.0
    same(good.metrics["actor/ppo_kl"][0], [-1.478760])
    bad = module.ppo_clip(log_probs, old, -torch.ones_like(old), mask)
    same(bad.token_losses, [0.8, 0.9, 1.0, 1.3, 1.5, 3.0])
    assert bad.metrics["actor/pg_clipfrac_lower"][0].item() == 1.0
    wide = module.ppo_clip(log_probs, old, torch.ones_like(old), mask, clip_ratio_high=9.0)
    same(wide.token_losses, [-0.5, -0.9, -1.0, -1.3, -1.5, -5.0])
    far = module.ppo_clip(old + 1000, old, torch.zeros_like(old), mask & torch.tensor([[True] * 5 + [False]]))
    assert not far.token_losses.any() and far.metrics["actor/ppo_kl"][1].item() == 5.0


ORACLES: dict[str, Callable[[ModuleType], None]] = {
    "advantage": advantage_oracle,
    "aggregate": aggregate_oracle,
    "kl": kl_oracle,
    "loss": loss_oracle,
}

MUTANTS = [  # what is wrong, the module, its text, what stands there instead
    ("biased std", "advantage", "(count_G - 1).clamp(min=1)", "count_G.clamp(min=1)"),
    ("epsilon inside the root", "advantage", "(group.std + epsilon)", "(group.std.square() + epsilon).sqrt()"),
    ("groups mixed up", "advantage", "torch.unique(groups, return_inverse=True)", "(groups, torch.zeros_like(groups))"),
    ("lean on epsilon", "advantage", "(largest_G != smallest_G)[index_B]", "torch.ones_like(valid)"),
    ("missing rewards count", "advantage", "index_B[valid], scores[valid]", "index_B, scores"),
    ("tokens outside count", "advantage", "masked_fill(~counted, 0.0)", "masked_fill(~valid[:, None], 0.0)"),
    (
        "outside gets advantages",
        "advantage",
        "torch.where(response_mask, advantages[:, None], 0.0)",
        "advantages[:, None].expand_as(token_rewards)",
    ),
    ("KL sign", "kl", "return log_probs - ref_log_probs", "return ref_log_probs - log_probs"),
    ("k3 of the other ratio", "kl", "(ref_log_probs - log_probs).clamp", "(log_probs - ref_log_probs).clamp"),
    ("k3 without the outer clamp", "kl", ".clamp(-_MAX_K3, _MAX_K3)", ""),
    ("no straight-through", "kl", "(gradient - gradient.detach())", "0 * gradient"),
    ("KL rewarded", "kl", "token_rewards.detach() - (", "token_rewards.detach() + ("),
    ("mean KL over padding", "kl", "response_mask.sum().clamp(min=1)", "response_mask.numel()"),
    ("mean of means", "aggregate", "return num_tokens", "return 0.2 * num_tokens * num_sequences"),
    ("sum over padding", "aggregate", "loss.masked_fill(~mask, 0.0)", "loss"),
    ("padded length", "aggregate", "mask.sum(dim=1).clamp(min=1)", "mask.shape[1]"),
    ("no scale", "aggregate", "num_sequences * scale_factor", "num_sequences"),
    ("divided by zero", "aggregate", "denominator = 1.0", "denominator = torch.zeros(())"),
    ("optimistic clip", "loss", "torch.maximum(free, clipped)", "torch.minimum(free, clipped)"),
    ("one clip ratio for both", "loss", "1 + clip_ratio_high)\n", "1 + clip_ratio_low)\n"),
    (
        "dual clip on good tokens",
        "loss",
        "(advantage < 0) & (pessimistic > ceiling)",
        "pessimistic.abs() > ceiling.abs()",
    ),
    ("no dual clip", "loss", "torch.where(hits_ceiling, ceiling, pessimistic)", "pessimistic"),
    ("exponent not clamped", "loss", ".clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)", ""),
    ("ppo_kl sign", "loss", "-log_ratio.detach()", "log_ratio.detach()"),
    ("metrics over padding", "loss", "response_mask.sum(dtype=torch.float64)", "response_mask.new_ones(6).sum()"),
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
