"""The sampler: which rows a step reads, and that a resumed run reads the same."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshift.core.datasets import PromptSampler, sample_seed
from moonshift.core.datasets.sampler import shuffled
from moonshift.core.errors import DataError


def sampler(num_rows: int, batch_size: int, *, seed: int = 3, shuffle: bool = True) -> PromptSampler:
    return PromptSampler(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=shuffle)


@settings(max_examples=40, deadline=None)
@given(batch_size=st.integers(1, 9), surplus=st.integers(0, 20), seed=st.integers(0, 2**64 - 1))
def test_each_epoch_holds_each_row_exactly_once(batch_size: int, surplus: int, seed: int) -> None:
    rows = sampler(batch_size + surplus, batch_size, seed=seed)
    steps = rows.num_rows * 3 // batch_size + 2
    stream = [pair for step in range(1, steps + 1) for pair in rows.indices(step)]
    assert stream[: rows.num_rows * 3] == sorted(stream[: rows.num_rows * 3], key=lambda pair: pair[0])
    assert Counter(stream[: rows.num_rows * 3]) == {(e, r): 1 for e in range(3) for r in range(rows.num_rows)}


def test_a_batch_straddles_the_end_of_an_epoch() -> None:
    assert sampler(5, 4, shuffle=False).indices(2) == [(0, 4), (1, 0), (1, 1), (1, 2)]


def test_epochs_and_seeds_have_orders_of_their_own_that_never_change() -> None:
    orders = {shuffled(8, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert shuffled(8, 0, 0) == (0, 2, 1, 5, 4, 3, 6, 7)
    assert shuffled(8, 7, 2) == (6, 7, 4, 0, 1, 5, 3, 2)


def test_each_epoch_of_a_sampler_has_the_order_of_its_number() -> None:
    rows = sampler(8, 8, seed=7)
    assert [row for _, row in rows.indices(3)] == [6, 7, 4, 0, 1, 5, 3, 2]
    assert [rows.indices(step) for step in (1, 2)] == [
        [(epoch, row) for row in shuffled(8, 7, epoch)] for epoch in (0, 1)
    ]


@pytest.mark.case("D08")
def test_a_batch_larger_than_the_data_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"128 rows.*train_batch_size is 1024.*to 128 or less"):
        sampler(128, 1024)
    with pytest.raises(DataError, match="at least 1 prompt"):
        sampler(128, 0)
    with pytest.raises(DataError, match=r"data\.seed"):
        sampler(4, 2, seed=2**64)


@pytest.mark.case("K01")
@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 5])
def test_a_run_stopped_anywhere_reads_each_row_as_often_as_the_unbroken_one(stop_after: int) -> None:
    first = sampler(8, 4)
    total = first.steps_per_epochs(3)
    assert total == 6
    before = [first.indices(step) for step in range(1, stop_after + 1)]
    resumed = sampler(8, 4)
    done = resumed.from_state(first.state(stop_after))
    after = [resumed.indices(step) for step in range(done + 1, total + 1)]
    assert before + after == [first.indices(step) for step in range(1, 7)]
    assert Counter(row for batch in before + after for _, row in batch) == dict.fromkeys(range(8), 3)


@pytest.mark.case("K02")
def test_the_stored_position_is_that_of_the_next_batch() -> None:
    rows = sampler(24, 4)
    assert rows.state(0) == {"epoch": 0, "offset": 0, "seed": 3, "num_rows": 24, "batch_size": 4}
    assert rows.state(3)["offset"] == 12
    assert rows.from_state(rows.state(3)) == 3
    assert rows.state(6)["epoch"] == 1
    batches = [rows.indices(step) for step in (1, 2, 3)] + [rows.indices(step) for step in (4, 5, 6)]
    assert len({pair for batch in batches for pair in batch}) == 24


@pytest.mark.case("K03")
def test_another_process_asking_in_another_order_reads_the_same_rows() -> None:
    code = (
        "from moonshift.core.datasets import PromptSampler\n"
        "s = PromptSampler(num_rows=7, batch_size=3, seed=3, shuffle=True)\n"
        "for step in (7, 4, 10, 1): s.indices(step)\n"
        "print([s.indices(step) for step in (7, 8, 9, 10)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unbroken = [sampler(7, 3).indices(step) for step in range(1, 11)]
    assert done.stdout.strip() == str(unbroken[6:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed = 4, but it is 3 now"),
        ({"num_rows": 9}, "num_rows = 9"),
        ({"batch_size": 2}, "batch_size = 2"),
        ({"offset": 3}, "damaged"),
        ({"offset": -4}, "damaged"),
    ],
)
def test_a_position_of_other_data_or_batches_is_refused(change: dict[str, int], message: str) -> None:
    rows = sampler(8, 4)
    with pytest.raises(DataError, match=message):
        rows.from_state(rows.state(1) | change)


def test_rows_short_of_a_batch_at_the_very_end_begin_no_further_epoch() -> None:
    assert sampler(10, 4).steps_per_epochs(1) == 2
    assert sampler(10, 4).steps_per_epochs(2) == 5


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        sampler(8, 4).indices(0)


def test_sample_seeds_are_fixed_63_bit_values_and_differ_in_every_part() -> None:
    assert sample_seed(0, "train.jsonl:17", 0, 0) == 4951268653927536243
    assert sample_seed(1234, "a:0", 2, 7) == 1009890445001050597
    parts = [(0, "a:1", 0, 0), (1, "a:1", 0, 0), (0, "a:2", 0, 0), (0, "a:1", 1, 0), (0, "a:1", 0, 1), (0, "a", 10, 0)]
    seeds = {sample_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
