"""DAPO's overlong penalty by hand, and dynamic sampling: what it trains on, what it carries over, when it stops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshift.core.algorithms.dapo import GroupBuffer, has_signal, overlong_penalty
from moonshift.core.errors import ConfigError, NonFiniteError


def test_the_overlong_penalty_falls_inside_the_buffer() -> None:
    lengths = torch.tensor([0, 15, 16, 17, 18, 20, 25])
    penalty = overlong_penalty(lengths, max_response_length=20, buffer_length=4)
    assert penalty.tolist() == [0, 0, 0, -0.25, -0.5, -1, -1] and penalty.dtype == torch.float64
    assert not torch.signbit(penalty[0])
    halved = overlong_penalty(lengths, max_response_length=20, buffer_length=4, penalty_factor=0.5)
    assert halved.tolist() == [0, 0, 0, -0.125, -0.25, -0.5, -0.5]
    assert overlong_penalty(torch.tensor([5]), max_response_length=10, buffer_length=10).tolist() == [-0.5]


def test_a_group_has_signal_when_its_largest_is_not_its_smallest() -> None:
    metric, groups = torch.tensor([1.0, 0.0, 0.6, 0.6, 0.6, 9.0]), torch.tensor([4, 4, -1, -1, -1, 2])
    assert has_signal(metric, groups).tolist() == [True, True, False, False, False, False]


def test_seven_float32_rewards_of_a_tenth_have_no_signal() -> None:
    for size in (6, 7, 11):
        assert not has_signal(torch.full((size,), 0.1), torch.zeros(size).long()).any()


def test_a_missing_score_gives_no_signal() -> None:
    metric, groups = torch.tensor([1.0, math.nan, 1.0, math.inf, 0.0]), torch.tensor([0, 0, 1, 1, 1])
    valid = torch.tensor([True, False, True, False, True])
    assert has_signal(metric, groups, valid=valid).tolist() == [False, False, True, True, True]
    assert has_signal(torch.zeros(0), torch.zeros(0).long()).shape == (0,)


def test_a_refill_fills_the_step_and_the_surplus_comes_first_in_the_next() -> None:
    buffer = GroupBuffer(num_needed=4, max_refills=2)
    assert buffer.num_to_generate == 4
    buffer = buffer.received([10, 11, 12, 13], [True, False, True, False])
    assert (buffer.num_missing, buffer.num_to_generate) == (2, 4)
    buffer = buffer.received([14, 15, 16, 17], [True, True, False, True])
    assert (buffer.num_to_generate, buffer.trained, buffer.surplus) == (0, (10, 12, 14, 15), (17,))
    assert buffer.metrics() == {
        "training/filter_groups/kept": 5.0,
        "training/filter_groups/dropped": 3.0,
        "training/filter_groups/carried_in": 0.0,
        "training/filter_groups/carried_out": 1.0,
        "training/filter_groups/trained": 4.0,
        "training/filter_groups/missing": 0.0,
        "training/filter_groups/refills": 1.0,
    }
    following = buffer.next_step()
    assert (following.carried, following.num_to_generate) == ((17,), 3)
    following = following.received([18, 19, 20], [True, True, True])
    assert (following.trained, following.surplus) == ((17, 18, 19, 20), ())


def test_an_exhausted_bound_trains_on_fewer_groups_and_says_so() -> None:
    buffer = GroupBuffer(num_needed=3, max_refills=1).received([1, 2, 3], [False, True, False])
    assert buffer.num_to_generate == 3  # twice the two missing, but never more than a step needs
    buffer = buffer.received([4, 5, 6], [False, False, False])
    assert (buffer.num_to_generate, buffer.trained, buffer.surplus) == (0, (2,), ())
    assert buffer.metrics()["training/filter_groups/missing"] == 2.0


def test_a_step_in_which_nothing_has_signal_trains_on_nothing() -> None:
    buffer = GroupBuffer(num_needed=2, max_refills=0).received([1, 2], [False, False])
    assert (buffer.num_to_generate, buffer.trained, buffer.metrics()["training/filter_groups/trained"]) == (0, (), 0.0)


def test_a_buffer_is_not_changed_by_what_is_received() -> None:
    buffer = GroupBuffer(num_needed=2, max_refills=1)
    buffer.received([1, 2], [True, True])
    assert buffer == GroupBuffer(num_needed=2, max_refills=1)


@settings(max_examples=80, deadline=None)
@given(
    needed=st.integers(1, 6),
    max_refills=st.integers(0, 3),
    factor=st.sampled_from([1.0, 1.5, 2.0, 10.0]),
    seed=st.integers(0, 2**16),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_no_group_is_lost_trained_twice_or_older_than_a_step(
    needed: int, max_refills: int, factor: float, seed: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = GroupBuffer(num_needed=needed, max_refills=max_refills, refill_factor=factor)
    kept: list[int] = []
    trained: list[int] = []
    number = 0
    for _ in range(5):
        while buffer.num_to_generate:
            size = buffer.num_to_generate
            assert size <= needed
            groups = list(range(number, number + size))
            signal = (torch.rand(size, generator=generator) < share).tolist()
            buffer = buffer.received(groups, signal)
            kept += [group for group, keep in zip(groups, signal, strict=True) if keep]
            number += size
        assert buffer.num_generations <= max_refills + 1 and len(buffer.trained) <= needed
        assert set(buffer.carried) <= set(buffer.trained)
        assert len(buffer.trained) == needed or buffer.num_generations == max_refills + 1
        assert len(buffer.trained) + buffer.num_missing == needed
        trained += buffer.trained
        buffer = buffer.next_step()
        assert len(buffer.carried) < needed
    assert trained + list(buffer.carried) == kept


def test_wrong_arguments_are_named() -> None:
    lengths = torch.tensor([1, 2])
    with pytest.raises(ConfigError, match=r"buffer_length is 0; it must be a whole number >= 1"):
        overlong_penalty(lengths, max_response_length=4, buffer_length=0)
    with pytest.raises(ConfigError, match=r"max_response_length is 4; it must be a whole number >= 5"):
        overlong_penalty(lengths, max_response_length=4, buffer_length=5)
    with pytest.raises(ConfigError, match=r"penalty_factor is -1"):
        overlong_penalty(lengths, max_response_length=4, buffer_length=2, penalty_factor=-1)
    with pytest.raises(ValueError, match=r"lengths is \[2\] torch.float32"):
        overlong_penalty(lengths.float(), max_response_length=4, buffer_length=2)
    with pytest.raises(ConfigError, match=r"num_needed is 0"):
        GroupBuffer(num_needed=0, max_refills=1)
    with pytest.raises(ConfigError, match=r"max_refills is -1"):
        GroupBuffer(num_needed=1, max_refills=-1)
    with pytest.raises(ConfigError, match=r"refill_factor is 0.5; .*>= 1"):
        GroupBuffer(num_needed=1, max_refills=1, refill_factor=0.5)
    with pytest.raises(NonFiniteError, match=r"metric .* row 1, token 0: nan"):
        has_signal(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"groups is \[2\] torch.float32"):
        has_signal(torch.zeros(2), torch.zeros(2))
