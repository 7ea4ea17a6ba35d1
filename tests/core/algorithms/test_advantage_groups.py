"""The estimators with groups, each against hand-computed numbers, and the rules that all of them keep."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonshift.core.algorithms.advantage import grpo
from moonshift.core.algorithms.estimators import ADVANTAGE_ESTIMATORS
from moonshift.core.algorithms.group_advantages import (
    gdpo,
    gpg,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from moonshift.core.errors import ConfigError, NonFiniteError

HALF = math.sqrt(0.5)
WITH_GROUPS = sorted(name for name, estimator in ADVANTAGE_ESTIMATORS.items() if "groups" in estimator.needs)
WHOLE_BATCH = {"gpg", "gdpo", "reinforce_plus_plus_baseline"}  # one number of the whole batch enters each group


def batch(rewards: list[float], lengths: list[int] | None = None, width: int = 3) -> tuple[Tensor, Tensor]:
    """Token rewards with the score on the last response token, and the mask; 3 tokens each unless said otherwise."""
    size = torch.tensor(lengths or [width] * len(rewards))
    mask = torch.arange(width) < size[:, None]
    last = torch.arange(width) == size[:, None] - 1
    return torch.where(last, torch.tensor(rewards, dtype=torch.float64)[:, None], 0.0), mask


def run(
    compute: Callable[..., tuple[Tensor, Tensor]],
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    **options: object,
) -> Tensor:
    """One advantage a sequence, read at its first token."""
    token_rewards, mask = batch(rewards, lengths)
    advantages, returns = compute(token_rewards, mask, torch.tensor(groups), **options)
    assert torch.equal(advantages, returns) and not advantages[~mask].any()
    assert torch.equal(advantages, (advantages[:, :1] * mask))
    return advantages[:, 0]


def by_name(name: str, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantages of any estimator with groups; gdpo takes the sums and, a second time, their squares."""
    extra = {}
    if name == "gdpo":
        scores = token_rewards.double().masked_fill(~mask, 0.0).sum(dim=1)
        extra = {"reward_components": {"score": scores, "square": scores.square()}}
    return ADVANTAGE_ESTIMATORS[name].compute(token_rewards, mask, groups, valid=valid, **extra)[0]


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_pass_at_k_pays_only_the_best_for_what_it_adds() -> None:
    # group 0: 3, 1, 2 has std 1; group 1: 5, 1 has the difference 4 and std 4 / sqrt(2)
    rewards, groups = [3.0, 5.0, 1.0, 1.0, 2.0], [0, 1, 0, 1, 0]
    close(run(grpo_passk, rewards, groups, epsilon=0.0), [1, math.sqrt(2), 0, 0, 0])
    close(run(grpo_passk, rewards, groups, epsilon=0.25), [0.8, 4 / (math.sqrt(8) + 0.25), 0, 0, 0])
    close(run(grpo_passk, rewards, groups, norm_by_std=False), [1, 4, 0, 0, 0])


def test_pass_at_k_pays_nobody_when_two_share_the_first_place() -> None:
    assert run(grpo_passk, [2, 2, 1, 0, -3], [0, 0, 0, 1, 1], norm_by_std=False).tolist() == [0, 0, 0, 3, 0]
    assert run(grpo_passk, [-1, -2], [0, 0], norm_by_std=False).tolist() == [1, 0]


def test_leave_one_out_measures_against_the_others() -> None:
    close(run(rloo, [1, 0, 0, 0], [0] * 4), [1, -1 / 3, -1 / 3, -1 / 3])
    close(run(rloo, [4, 1, 7, 2], [0, 1, 0, 1]), [-3, -1, 3, 1])


def test_opo_weighs_the_baseline_by_length() -> None:
    close(run(opo, [1, 0], [0, 0], [1, 3]), [0.75, -0.25])
    # (1·2 + 2·1 + 3·5) / 6 = 19 / 6
    close(run(opo, [2, 1, 5], [4, 4, 4], [1, 2, 3]), [2 - 19 / 6, 1 - 19 / 6, 5 - 19 / 6])


def test_gpg_scales_up_for_samples_that_score_nothing() -> None:
    close(run(gpg, [1, 0, 0, 0], [0, 0, 1, 1]), [2, -2, 0, 0])
    close(run(gpg, [1, 0, 1, 3], [0, 0, 1, 1], f_norm=2.0), [1 / 3, -1 / 3, -2 / 3, 2 / 3])
    close(run(gpg, [0, 0], [0, 0]), [0, 0])
    # the missing sample counts neither above nor below: α = 3 / 2
    close(run(gpg, [1, 0, 9, 1], [0, 0, 0, 0], valid=torch.tensor([True, True, False, True])), [0.5, -1, 0, 0.5])


def test_the_group_baseline_is_whitened_over_tokens() -> None:
    close(run(reinforce_plus_plus_baseline, [1, 0], [0, 0], [1, 1]), [HALF, -HALF])
    # tokens 0.5 and three times -0.5: mean -0.25, squares 0.5625 + 3 · 0.0625 = 0.75, ddof 1: variance 0.25
    close(run(reinforce_plus_plus_baseline, [1, 0], [0, 0], [1, 3]), [1.5, -0.5])


def test_a_group_without_signal_counts_in_whitening_but_gets_nothing() -> None:
    # tokens 0.5, -0.5 × 2, 0 × 2: mean -0.1, squares 0.36 + 2 · 0.16 + 2 · 0.01 = 0.7, over 4: 0.175
    actual = run(reinforce_plus_plus_baseline, [1, 0, 7], [0, 0, 1], [1, 2, 2])
    close(actual, [0.6 / math.sqrt(0.175), -0.4 / math.sqrt(0.175), 0])
    assert actual[2] == 0


def test_gdpo_normalises_each_reward_by_itself() -> None:
    components = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([100.0, 0.0])}
    # each alone gives ±sqrt(1/2), so the sum is ±sqrt(2): whitened over 2 × 3 tokens, (5/6) of the variance
    actual = run(gdpo, [0, 0], [0, 0], reward_components=components)
    close(actual, [math.sqrt(5 / 6), -math.sqrt(5 / 6)])
    weighted = run(gdpo, [0, 0], [0, 0], reward_components=components, weights={"right": 1.0, "short": -2.0})
    close(weighted, [-math.sqrt(5 / 6), math.sqrt(5 / 6)])


def test_gdpo_keeps_apart_what_the_sum_would_mix_up() -> None:
    first, second = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])
    actual = run(gdpo, [0, 0, 0], [0, 0, 0], reward_components={"a": first, "b": second}, epsilon=0.0)
    # normalised a: (-1, -1, 2)/√3, b: (-2, 1, 1)/√3; sum (-3, 0, 3)/√3; 9 tokens: variance 3·(3 + 3)/8 = 9/4
    close(actual, [-math.sqrt(3) / 1.5, 0, math.sqrt(3) / 1.5])


def test_gdpo_gives_nothing_to_a_group_whose_only_signal_has_weight_zero() -> None:
    components = {"a": torch.tensor([1.0, 0.0, 5.0, 5.0]), "b": torch.tensor([1.0, 1.0, 0.0, 1.0])}
    weights = {"a": 1.0, "b": 0.0}
    groups = [0, 0, 1, 1]
    actual = run(gdpo, [0] * 4, groups, [1, 2, 1, 1], reward_components=components, weights=weights)
    assert actual[2:].tolist() == [0, 0] and actual[0] > 0 > actual[1]


@pytest.mark.case("A02")
@pytest.mark.parametrize("name", WITH_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.6, 0.1, 0.35, -1e30])
def test_equal_rewards_give_exactly_zero_in_every_estimator(name: str, dtype: torch.dtype, reward: float) -> None:
    for size in (6, 7, 11):
        rewards, mask = batch([reward] * size + [1.0, 0.0])
        groups = torch.tensor([0] * size + [1, 1])
        advantages = by_name(name, rewards.to(dtype), mask, groups)
        assert advantages.dtype == dtype and not advantages[:size].any() and advantages[size:].any()


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_a_group_of_one_gets_exactly_zero_in_every_estimator(name: str) -> None:
    rewards, mask = batch([5.0, 1.0, 0.0, 3.0])
    advantages = by_name(name, rewards, mask, torch.tensor([7, 2, 2, -1]))
    assert not advantages[[0, 3]].any() and advantages[1, 0] > 0


@pytest.mark.case("R02")
@pytest.mark.parametrize("name", WITH_GROUPS)
@pytest.mark.parametrize("missing", [math.nan, math.inf, 1e30])
def test_a_missing_reward_changes_nothing_for_the_others(name: str, missing: float) -> None:
    rewards, mask = batch([1.0, missing, 0.0, 1.0, 2.0, 4.0], [3, 2, 1, 3, 2, 1])
    groups, keep = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 2, 3, 4, 5])
    valid = torch.tensor([True, False, True, True, True, True])
    advantages = by_name(name, rewards, mask, groups, valid)
    assert not advantages[1].any()
    alone = by_name(name, rewards[keep], mask[keep], groups[keep])
    torch.testing.assert_close(advantages[keep], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_empty_batches_and_empty_responses_are_answered(name: str) -> None:
    empty = torch.zeros(0, 4)
    assert by_name(name, empty, empty.bool(), torch.zeros(0).long()).shape == (0, 4)
    none = torch.zeros(3, 4)
    assert not by_name(name, none, none.bool(), torch.tensor([0, 0, 1])).any()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(WITH_GROUPS),
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 12),
    padding=st.integers(0, 3),
)
def test_row_order_group_numbers_and_tokens_outside_do_not_matter(
    name: str, seed: int, rows: int, padding: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-2, 3, (rows, 4), generator=generator).double()
    mask = torch.rand(rows, 4, generator=generator) < 0.7
    groups = torch.randint(0, 4, (rows,), generator=generator)
    expected = by_name(name, rewards, mask, groups)

    order = torch.randperm(rows, generator=generator)
    noisy = torch.cat([rewards.masked_fill(~mask, math.nan), torch.full((rows, padding), math.inf)], dim=1)
    wide = torch.cat([mask, torch.zeros(rows, padding, dtype=torch.bool)], dim=1)
    actual = by_name(name, noisy[order], wide[order], groups[order] * 100 - 3)
    torch.testing.assert_close(actual[:, :4], expected[order], rtol=0, atol=1e-9)
    assert not actual[~wide[order]].any()


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(set(WITH_GROUPS) - WHOLE_BATCH)), seed=st.integers(0, 2**16))
def test_whole_groups_may_be_spread_over_ranks(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, mask = torch.randn(12, 2, generator=generator).double(), torch.ones(12, 2, dtype=torch.bool)
    groups = torch.arange(12) // 3
    rank = torch.randint(0, 2, (4,), generator=generator)[groups]
    whole = by_name(name, rewards, mask, groups)
    for part in (rank == 0, rank == 1):
        assert torch.equal(by_name(name, rewards[part], mask[part], groups[part]), whole[part])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), shift=st.integers(-20, 20))
def test_a_constant_added_to_every_reward_changes_nothing(seed: int, shift: int) -> None:
    rewards = torch.randint(0, 4, (9, 1), generator=torch.Generator().manual_seed(seed)).double()
    mask, groups = torch.ones(9, 1, dtype=torch.bool), torch.arange(9) % 3
    for name in sorted(set(WITH_GROUPS) - {"gpg", "gdpo"}):  # gpg counts scores of 0; gdpo squares them here
        actual = by_name(name, rewards + shift, mask, groups)
        torch.testing.assert_close(actual, by_name(name, rewards, mask, groups), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_wrong_arguments_are_named_by_every_estimator(name: str) -> None:
    rewards, mask = batch([1.0, 0.0])
    groups = torch.tensor([0, 0])
    extra = {"reward_components": {"a": torch.tensor([1.0, 0.0])}} if name == "gdpo" else {}
    compute = ADVANTAGE_ESTIMATORS[name].compute
    with pytest.raises(ValueError, match=r"groups is \[3\] torch.int64 .* \[2\] torch.int64"):
        compute(rewards, mask, torch.tensor([0, 0, 1]), **extra)
    with pytest.raises(ValueError, match=r"token_rewards is \[2, 3\] torch.int64"):
        compute(rewards.long(), mask, groups, **extra)
    with pytest.raises(ValueError, match=r"valid is \[2\] torch.float32"):
        compute(rewards, mask, groups, valid=torch.ones(2), **extra)


@pytest.mark.parametrize("name", sorted(set(WITH_GROUPS) - {"gdpo"}))
def test_a_reward_that_is_not_finite_is_named_by_every_estimator(name: str) -> None:
    rewards, mask = batch([1.0, math.nan])
    with pytest.raises(NonFiniteError, match=r"token_rewards \[2, 3\] has 1 .* row 1, token 2: nan"):
        ADVANTAGE_ESTIMATORS[name].compute(rewards, mask, torch.tensor([0, 0]))


def test_wrong_options_are_named() -> None:
    rewards, mask = batch([1.0, 0.0])
    groups, components = torch.tensor([0, 0]), {"a": torch.tensor([1.0, 0.0])}
    with pytest.raises(ConfigError, match=r"f_norm is 0; .*> 0"):
        gpg(rewards, mask, groups, f_norm=0)
    with pytest.raises(ConfigError, match=r"epsilon is -1"):
        grpo_passk(rewards, mask, groups, epsilon=-1)
    with pytest.raises(ConfigError, match=r"reward_components is empty"):
        gdpo(rewards, mask, groups, reward_components={})
    with pytest.raises(ConfigError, match=r"weights names b; .*no other: a"):
        gdpo(rewards, mask, groups, reward_components=components, weights={"b": 1.0})
    with pytest.raises(ConfigError, match=r"weights\['a'\] is nan"):
        gdpo(rewards, mask, groups, reward_components=components, weights={"a": math.nan})
    with pytest.raises(ValueError, match=r"reward_components\['a'\] has the shape \[2, 1\]"):
        gdpo(rewards, mask, groups, reward_components={"a": torch.ones(2, 1)})
    with pytest.raises(NonFiniteError, match=r"reward_components\['a'\] .* row 0, token 0: nan"):
        gdpo(rewards, mask, groups, reward_components={"a": torch.tensor([math.nan, 0.0])})


def test_the_registry_says_what_each_estimator_needs() -> None:
    assert {name: set(entry.needs) for name, entry in ADVANTAGE_ESTIMATORS.items()} == {
        "gae": {"values"},
        "gdpo": {"groups", "reward_components"},
        "gpg": {"groups"},
        "grpo": {"groups"},
        "grpo_passk": {"groups"},
        "opo": {"groups"},
        "reinforce_plus_plus": set(),
        "reinforce_plus_plus_baseline": {"groups"},
        "remax": {"baseline_scores"},
        "rloo": {"groups"},
    }
    assert ADVANTAGE_ESTIMATORS["grpo"].compute is grpo


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_the_options_in_the_registry_are_exactly_those_of_the_function(name: str) -> None:
    entry = ADVANTAGE_ESTIMATORS[name]
    assert entry.compute.__kwdefaults__ is not None
    keywords = set(entry.compute.__code__.co_varnames[3 : 3 + entry.compute.__code__.co_kwonlyargcount])
    assert keywords == entry.options | (entry.needs - {"groups"}) | {"valid"}
