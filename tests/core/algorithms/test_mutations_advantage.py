"""The oracles of advantages, critic, KL controllers and DAPO can tell right from wrong: each mutant fails one of them.

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


def whitening_oracle(module: ModuleType) -> None:
    mask = torch.tensor([[True, True, True, False]])
    same(module.whiten(doubles([[1, 2, 3, 100]]), mask), [-1, 0, 1, 0])
    same(module.whiten(doubles([[0.7, 5.0]]), torch.tensor([[True, False]])), [0.7, 0])
    same(module.whiten(doubles([[0.7, 5.0]]), torch.tensor([[False, False]])), [0, 0])
    same(module.whiten(doubles([[1e-4, -1e-4]]), mask[:, :2]), [0.57735, -0.57735])
    assert not module.whiten(torch.full((11, 1), 0.1, dtype=torch.float64), torch.ones(11, 1).bool()).any()


def group_oracle(module: ModuleType) -> None:
    ones, one_group = torch.ones(4, 1, dtype=torch.bool), torch.zeros(4).long()
    rewards, pairs = doubles([[1], [0], [0], [0]]), torch.tensor([0, 0, 1, 1])
    same(module.rloo(rewards, ones, one_group)[0], [1, -1 / 3, -1 / 3, -1 / 3])
    same(module.gpg(rewards, ones, pairs)[0], [2, -2, 0, 0])
    same(module.gpg(rewards, ones, pairs, f_norm=4.0)[0], [0.5, -0.5, 0, 0])
    two = torch.zeros(2).long()
    triangle = torch.tensor([[True, False, False], [True, True, True]])
    same(module.opo(doubles([[1, 9, 9], [0, 0, 0]]), triangle, two)[0], [0.75, 0, 0, -0.25, -0.25, -0.25])
    best = doubles([[3], [1], [2], [2]])
    same(module.grpo_passk(best, ones, one_group, norm_by_std=False)[0], [1, 0, 0, 0])
    same(module.grpo_passk(best, ones, one_group, epsilon=0.0)[0], [1 / 0.8164966, 0, 0, 0])
    apart = doubles([[3], [1], [9], [8]])
    same(module.grpo_passk(apart, ones, pairs, norm_by_std=False)[0], [2, 0, 1, 0])
    same(module.grpo_passk(doubles([[2], [2], [1], [0]]), ones, one_group, norm_by_std=False)[0], [0, 0, 0, 0])
    tenths = doubles([[0.1]] * 11 + [[1.0], [0.0]])
    groups = torch.tensor([0] * 11 + [1, 1])
    for compute in (module.rloo, module.opo, module.gpg, module.reinforce_plus_plus_baseline, module.grpo_passk):
        assert not compute(tenths, torch.ones(13, 1).bool(), groups)[0][:11].any()
    pushed = module.reinforce_plus_plus_baseline(
        doubles([[1, 9], [0, 0], [7, 0]]), torch.tensor([[True, False], [True, True], [True, True]]), groups[[0, 1, 12]]
    )[0]
    same(pushed, [1.434274, 0, -0.956183, -0.956183, 0, 0])
    components = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([100.0, 0.0])}
    weights = {"a": 1.0, "b": -2.0}
    zeros, mask = torch.zeros(2, 1), torch.ones(2, 1).bool()
    same(module.gdpo(zeros, mask, two, reward_components=components, weights=weights)[0], [-0.707107, 0.707107])
    first, second = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 10.0, 10.0])
    both = {"a": first, "b": second}
    same(module.gdpo(torch.zeros(3, 1), ones[:3], one_group[:3], reward_components=both)[0], [-1, 0, 1])


def return_oracle(module: ModuleType) -> None:
    rewards, values = doubles([[0, 9, 0, 1, 9]]), doubles([[0.5, 50, 0.6, 0.7, 100]])
    mask = torch.tensor([[True, False, True, True, False]])
    advantages, returns = module.gae(rewards, mask, values=values, lam=0.95)
    same(returns, [0.96575, 0, 0.985, 1, 0])
    same(advantages, [0.991337, 0, 0.017092, -1.008429, 0])
    _, returns = module.gae(rewards, mask, values=values, gamma=0.5, lam=0.0)
    same(returns, [0.3, 0, 0.35, 1, 0])
    _, returns = module.gae(rewards, mask, values=values, gamma=0.5, lam=0.8)
    same(returns, [0.248, 0, 0.47, 1, 0])
    advantages, returns = module.reinforce_plus_plus(rewards, mask, gamma=0.5)
    same(returns, [0.25, 0, 0.5, 1, 0])
    same(advantages, [-0.872872, 0, -0.218218, 1.091089, 0])
    advantages, returns = module.remax(rewards, mask, baseline_scores=torch.tensor([0.25]))
    same(advantages, [0.75, 0, 0.75, 0.75, 0])
    same(returns, [1, 0, 1, 1, 0])
    long = torch.ones(1, 9, dtype=torch.float64)
    same(module.reinforce_plus_plus(long, long.bool())[1], [9, 8, 7, 6, 5, 4, 3, 2, 1])
    valid = torch.tensor([True, False])
    two = torch.ones(2, 2, dtype=torch.bool)
    learnt = module.gae(doubles([[0, 1], [5, 5]]), two, values=doubles([[0, 0], [3, 4]]), valid=valid, lam=0.0)
    same(learnt[1], [0, 1, 3, 4])
    same(learnt[0], [-0.707107, 0.707107, 0, 0])


def value_oracle(module: ModuleType) -> None:
    values, old, returns = doubles([[2, -2, 2, 9]]), doubles([[0, 0, 0, 0]]), doubles([[3, 3, 3, 9]])
    mask = torch.tensor([[True, True, True, False]])
    values.requires_grad_()
    loss = module.value_loss(values, old, returns, mask, cliprange_value=0.5)
    same(loss.token_losses.detach(), [3.125, 12.5, 3.125, 0])
    same(torch.autograd.grad(loss.token_losses.sum(), values)[0], [0, -5, 0, 0])
    assert [float(part) for part in loss.metrics["critic/vf_clipfrac"]] == [2, 3]
    same(loss.metrics["critic/vpred_mean"][0], [2])
    explained = module.explained_variance(doubles([[1, 2, 2, 7]]), doubles([[1, 2, 3, 7]]), mask)
    same(explained, [2 / 3])
    same(module.explained_variance(doubles([[11, 12, 13, 7]]), doubles([[1, 2, 3, 7]]), mask), [1])


def kl_oracle(module: ModuleType) -> None:
    policy, reference = doubles([[0.5, 0.5]]).log()[None], doubles([[0.25, 0.75]]).log()[None]
    same(module.full_kl(policy, reference), [0.143841])
    controller = module.AdaptiveKlController(value=0.1, target=6.0, horizon=10_000)
    for observed, expected in ((12.0, 0.101), (6.6, 0.1005), (0.0, 0.099)):
        assert abs(controller.updated(observed, 500).value - expected) < 1e-12
    assert module.AdaptiveKlController(value=0.1, target=6.0, horizon=10).updated(0.0, 50).value > 0


def dapo_oracle(module: ModuleType) -> None:
    penalty = module.overlong_penalty(torch.tensor([15, 16, 17, 20, 25]), max_response_length=20, buffer_length=4)
    same(penalty, [0, 0, -0.25, -1, -1])
    assert (
        module.has_signal(doubles([[1, 0, 2, 2]])[0], torch.tensor([0, 0, 1, 1])).tolist() == [True, True] + [False] * 2
    )
    buffer = module.GroupBuffer(num_needed=4, max_refills=1).received([0, 1, 2, 3], [True, False, True, False])
    assert buffer.num_to_generate == 4
    buffer = buffer.received([4, 5, 6, 7], [True, True, False, True])
    assert (buffer.trained, buffer.surplus, buffer.num_to_generate) == ((0, 2, 4, 5), (7,), 0)
    following = buffer.next_step()
    assert (following.carried, following.num_to_generate) == ((7,), 3)
    following = following.received([8, 9, 10], [True, False, False])
    assert (following.trained, following.num_to_generate) == ((7, 8), 4)
    following = following.received([11, 12, 13, 14], [False] * 4)
    assert (following.trained, following.num_to_generate) == ((7, 8), 0)
    assert following.metrics()["training/filter_groups/missing"] == 2
    assert following.metrics()["training/filter_groups/dropped"] == 6


ORACLES: dict[str, Callable[[ModuleType], None]] = {
    "whitening": whitening_oracle,
    "group_advantages": group_oracle,
    "return_advantages": return_oracle,
    "value": value_oracle,
    "kl": kl_oracle,
    "dapo": dapo_oracle,
}

MUTANTS = [  # what is wrong, the module, its text, what stands there instead
    ("biased variance", "whitening", "(count - 1).clamp(min=1)", "count.clamp(min=1)"),
    ("mean over masked tokens", "whitening", "masked_fill(~mask, 0.0)\n    count", "clone()\n    count"),
    ("variance over masked tokens", "whitening", "(known - mean).masked_fill(~mask, 0.0)", "known - mean"),
    (
        "epsilon outside the root",
        "whitening",
        "torch.rsqrt(variance + _VARIANCE_EPSILON)",
        "1 / (variance.sqrt() + 1e-8)",
    ),
    ("one token whitened", "whitening", "torch.where(count == 1, known, whitened)", "whitened"),
    ("lean on epsilon", "whitening", "torch.where(_all_equal(known, mask), 0.0, whitened)", "whitened + 0"),
    ("own score in its baseline", "group_advantages", "factor * (scores - group.mean)", "scores - group.mean"),
    (
        "leave-one-out leans on floats",
        "group_advantages",
        "torch.where(valid & group.has_signal, factor",
        "torch.where(valid, factor",
    ),
    (
        "plain mean as baseline",
        "group_advantages",
        "_sum_by_group(lengths * scores, group)",
        "group.mean * _sum_by_group(lengths, group)",
    ),
    ("scores that are nothing count", "group_advantages", "torch.count_nonzero(scores).clamp(min=1)", "len(scores)"),
    ("f_norm multiplied", "group_advantages", "/ f_norm, 0.0", "* f_norm, 0.0"),
    ("ties are paid", "group_advantages", "is_best & alone & group.has_signal", "is_best & group.has_signal"),
    ("everyone is paid", "group_advantages", "is_best & alone & group.has_signal", "group.has_signal"),
    ("second best of all groups", "group_advantages", "second_G[group.index]", "second_G.max()"),
    ("whitening pushes groups without signal", "group_advantages", "~(has_signal & valid)[:, None]", "~valid[:, None]"),
    (
        "whitened once a sequence",
        "group_advantages",
        "response_mask & valid[:, None]\n",
        "response_mask.cumsum(1).eq(1) & response_mask & valid[:, None]\n",
    ),
    ("weights ignored", "group_advantages", "weights[name] * normalised(", "1.0 * normalised("),
    (
        "rewards mixed before they are normalised",
        "group_advantages",
        "norm_by_std=True, epsilon=epsilon)",
        "norm_by_std=False, epsilon=epsilon)",
    ),
    (
        "off by one: its own value comes next",
        "return_advantages",
        "gamma * _later(value, 1) - value",
        "gamma * value - value",
    ),
    ("off by one: two values later", "return_advantages", "_later(value, 1)", "_later(value, 2)"),
    (
        "trace without discount",
        "return_advantages",
        "_discounted_sum(delta, gamma * lam)",
        "_discounted_sum(delta, lam)",
    ),
    (
        "trace without lambda",
        "return_advantages",
        "_discounted_sum(delta, gamma * lam)",
        "_discounted_sum(delta, gamma)",
    ),
    (
        "values outside the mask",
        "return_advantages",
        "values.detach().double().masked_fill(~response_mask, 0.0)",
        "values.detach().double()",
    ),
    (
        "tool tokens not skipped",
        "return_advantages",
        "torch.argsort(~response_mask, dim=1, stable=True)",
        "torch.arange(response_mask.shape[1]).expand(response_mask.shape)",
    ),
    ("returns after whitening", "return_advantages", "(raw + known)", "(whiten(raw, counted) + known)"),
    (
        "whitening includes masked tokens",
        "return_advantages",
        "whiten(raw, counted).to",
        "whiten(raw, torch.ones_like(counted)).to",
    ),
    (
        "critic learns from a missing reward",
        "return_advantages",
        "raw = raw.masked_fill(~counted, 0.0)",
        "raw = raw.masked_fill(~response_mask, 0.0)",
    ),
    ("discount not raised to the distance", "return_advantages", "factor**width", "factor"),
    ("sum ends too early", "return_advantages", "while width < terms.shape[1]", "while 2 * width < terms.shape[1]"),
    ("greedy score added", "return_advantages", "(returns - baseline[:, None])", "(returns + baseline[:, None])"),
    (
        "optimistic critic",
        "value",
        "torch.where(clipped > free, clipped, free)",
        "torch.where(clipped < free, clipped, free)",
    ),
    ("whole square", "value", "0.5 * torch.where", "1.0 * torch.where"),
    (
        "clipped around the return",
        "value",
        "torch.maximum(value, old - cliprange_value), old + cliprange_value",
        "torch.maximum(value, target - cliprange_value), target + cliprange_value",
    ),
    (
        "clip fraction of the wrong side",
        "value",
        '"critic/vf_clipfrac": clipped > free',
        '"critic/vf_clipfrac": clipped < free',
    ),
    ("metrics over padding", "value", "response_mask.sum(dtype=torch.float64)", "response_mask.new_ones(4).sum()"),
    ("mean error as unexplained", "value", "rest.var(correction=0)", "rest.square().mean()"),
    (
        "variance of the values",
        "value",
        "/ target.var(correction=0)",
        "/ values.detach().double()[response_mask].var(correction=0)",
    ),
    ("full KL the other way", "kl", "terms = policy.exp() *", "terms = -ref_log_probs.detach().exp() *"),
    ("controller pushes the wrong way", "kl", "max(1 + error *", "max(1 - error *"),
    (
        "error not clipped",
        "kl",
        "min(max(observed_kl / self.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)",
        "observed_kl / self.target - 1",
    ),
    ("horizon ignored", "kl", "num_samples / self.horizon", "num_samples / 1000"),
    (
        "penalty becomes a reward",
        "kl",
        "max(1 + error * num_samples / self.horizon, _LEAST_KL_FACTOR)",
        "1 + error * num_samples / self.horizon",
    ),
    ("buffer behind the limit", "dapo", "(max_response_length - buffer_length)", "max_response_length"),
    ("penalty rewards", "dapo", "0.0 - excess", "0.0 + excess"),
    ("penalty without end", "dapo", ".clamp(min=0, max=buffer_length)", ".clamp(min=0)"),
    (
        "one refill too many",
        "dapo",
        "self.num_generations > self.max_refills",
        "self.num_generations > self.max_refills + 1",
    ),
    (
        "carried groups come last",
        "dapo",
        "(self.carried + self.kept)[: self.num_needed]",
        "(self.kept + self.carried)[: self.num_needed]",
    ),
    ("surplus thrown away", "dapo", "carried=self.surplus", "carried=()"),
    (
        "groups without signal kept",
        "dapo",
        "zip(groups, with_signal, strict=True) if keep",
        "zip(groups, with_signal, strict=True) if keep or True",
    ),
    ("dropped groups of the last round alone", "dapo", "self.num_dropped + len(groups)", "len(groups)"),
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
