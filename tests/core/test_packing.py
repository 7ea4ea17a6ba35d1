"""Dynamic batching: a hard cap, every sample once, ranks in balance."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshift.core.errors import PlanError
from moonshift.core.plan import balance, cut_in_order, pack

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(LENGTHS, st.integers(100, 400))
def test_no_micro_batch_exceeds_the_cap_and_every_sample_is_in_one(lengths: list[int], cap: int) -> None:
    bins = pack(lengths, cap)
    assert all(sum(lengths[index] for index in chosen) <= cap for chosen in bins)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(lengths)))
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // cap) + 2 or len(bins) <= 2 * -(-sum(lengths) // cap)


@given(LENGTHS, st.integers(100, 400), st.data())
def test_consecutive_samples_keep_the_cap_and_their_order(lengths: list[int], cap: int, data: st.DataObject) -> None:
    added = [data.draw(st.integers(1, length)) for length in lengths]
    cuts = cut_in_order(lengths, added, cap)
    sums = [lengths[start] + sum(added[start + 1 : stop]) for start, stop in cuts]
    assert all(total <= cap for total in sums)
    assert [index for start, stop in cuts for index in range(start, stop)] == list(range(len(lengths)))


def test_consecutive_samples_are_cut_evenly_and_no_finer_than_needed() -> None:
    assert cut_in_order([30] * 10, [30] * 10, 120) == [(0, 4), (4, 8), (8, 10)]
    assert cut_in_order([60, 40, 40, 40, 20], [60, 40, 40, 40, 20], 120) == [(0, 2), (2, 5)]
    assert cut_in_order([5], [5], 5) == [(0, 1)]
    assert cut_in_order([], [], 5) == []


def test_a_shared_prompt_counts_once_and_again_where_a_micro_batch_begins() -> None:
    assert cut_in_order([10] * 6, [2] * 6, 14) == [(0, 3), (3, 6)]


@given(LENGTHS, st.integers(1, 8))
def test_every_rank_gets_samples_and_every_sample_a_rank(lengths: list[int], ranks: int) -> None:
    if len(lengths) < ranks:
        with pytest.raises(PlanError, match="every rank needs at least one"):
            balance(lengths, ranks)
        return
    shares = balance(lengths, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(shares)


def test_ranks_are_within_five_percent_of_the_lower_bound() -> None:
    """1,000 random sets of 64 to 1,024 samples on 2 to 16 ranks."""
    draw = random.Random(0)
    worst = 0.0
    for _ in range(1000):
        ranks = draw.choice([2, 4, 8, 16])
        count = draw.randint(64, 1024)
        shape = draw.choice(["uniform", "long tail", "two kinds"])
        lengths = [_length(draw, shape) for _ in range(count)]
        heaviest = max(sum(lengths[index] for index in share) for share in balance(lengths, ranks))
        worst = max(worst, heaviest / _lower_bound(lengths, ranks))
    assert worst < 1.05


def _lower_bound(lengths: list[int], ranks: int) -> float:
    """No split is lighter than the mean, nor than j + 1 of the j x ranks + 1 longest, which some rank must hold."""
    longest = sorted(lengths, reverse=True)
    bounds = [sum(lengths) / ranks]
    for held in range(1, len(longest) // ranks + 2):
        first = longest[: (held - 1) * ranks + 1]
        if len(first) == (held - 1) * ranks + 1:
            bounds.append(sum(first[-held:]))
    return max(bounds)


def _length(draw: random.Random, shape: str) -> int:
    if shape == "uniform":
        return draw.randint(1, 4096)
    if shape == "long tail":
        return min(8192, int(draw.lognormvariate(6, 1)) + 1)
    return draw.choice([draw.randint(10, 60), draw.randint(3000, 4096)])


def test_the_result_depends_on_the_lengths_alone() -> None:
    lengths = [7, 3, 3, 9, 1, 7, 7]
    assert pack(lengths, 10) == pack(list(lengths), 10) == [[0, 1], [2, 5], [3, 4], [6]]
    assert balance(lengths, 2) == balance(lengths, 2)


def test_a_sample_longer_than_the_cap_is_named() -> None:
    with pytest.raises(PlanError, match="Sample 1 has 11 tokens, more than the budget of 10"):
        pack([10, 11], 10)
    with pytest.raises(PlanError, match="Sample 1 has 11 tokens, more than the budget of 10"):
        cut_in_order([10, 11], [10, 1], 10)
