"""Sources with weights: how often each row is drawn, in which epoch, and that a resumed run draws the same."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshift.core.datasets import PromptSampler
from moonshift.core.datasets.mixture import Mixture
from moonshift.core.errors import DataError


def sampler(
    sizes: tuple[int, ...], weights: tuple[float, ...], batch_size: int = 1, *, seed: int = 3, shuffle: bool = True
) -> PromptSampler:
    mixture = Mixture(sizes=sizes, weights=weights, seed=seed, shuffle=shuffle)
    return PromptSampler(num_rows=sum(sizes), batch_size=batch_size, seed=seed, shuffle=shuffle, mixture=mixture)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shuffle=st.booleans(), seed=st.integers(0, 2**64 - 1))
def test_each_epoch_shares_its_draws_by_weight_and_rows_of_a_source_evenly(
    data: st.DataObject, shuffle: bool, seed: int
) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    weights = tuple(data.draw(st.lists(st.integers(1, 3), min_size=len(sizes), max_size=len(sizes))))
    total = sum(sizes)
    if any(total * weight < sum(weights) for weight in weights):
        return  # refused: tested below
    mixed = sampler(sizes, weights, seed=seed, shuffle=shuffle)
    owner = [source for source, size in enumerate(sizes) for _ in range(size)]
    stream = mixed.stretch(0, 3 * total)
    assert len(set(stream)) == len(stream), "a (pass, row) that comes twice would be the same sample twice"
    for epoch in range(3):
        drawn = Counter(owner[row] for _, row in stream[epoch * total : (epoch + 1) * total])
        for source, weight in enumerate(weights):
            assert abs(drawn[source] - total * weight / sum(weights)) < 1
    times = Counter(row for _, row in stream)
    for source in range(len(sizes)):
        counts = [times[row] for row in range(total) if owner[row] == source]
        assert max(counts) - min(counts) <= 1
        passes = [number for number, row in stream if owner[row] == source]
        assert passes == sorted(passes)


def test_a_small_heavy_source_passes_several_times_an_epoch() -> None:
    mixed = sampler((6, 2), (1, 1), shuffle=False)
    assert mixed.stretch(0, 8) == [(0, 0), (0, 6), (0, 1), (0, 7), (0, 2), (1, 6), (0, 3), (1, 7)]
    assert mixed.stretch(8, 4) == [(0, 4), (2, 6), (0, 5), (2, 7)]
    assert mixed.steps_per_epochs(2) == 16


def test_orders_follow_from_the_seed_and_never_change() -> None:
    assert sampler((3, 2), (3, 2), seed=0).stretch(0, 5) == [(0, 2), (0, 1), (0, 0), (0, 4), (0, 3)]
    assert len({tuple(sampler((30, 20), (1, 1), seed=seed).stretch(0, 50)) for seed in range(4)}) == 4


def test_another_process_asking_in_another_order_draws_the_same() -> None:
    code = (
        "from moonshift.core.datasets.mixture import Mixture\n"
        "m = Mixture(sizes=(7, 3), weights=(0.2, 0.8), seed=3, shuffle=True)\n"
        "for p in (29, 0, 11): m.at(p)\n"
        "print([m.at(p) for p in range(15, 30)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sampler((7, 3), (0.2, 0.8)).stretch(0, 30)[15:])


def test_a_position_of_another_mixture_is_refused() -> None:
    rows = sampler((6, 2), (1, 1), 4)
    assert rows.from_state(rows.state(3)) == 3
    assert rows.state(3)["epoch"] == 1 and rows.state(3)["offset"] == 4
    for other in (sampler((6, 2), (1, 2), 4), sampler((5, 3), (1, 1), 4)):
        with pytest.raises(DataError, match="mixture"):
            other.from_state(rows.state(1))
    plain = PromptSampler(num_rows=8, batch_size=4, seed=3, shuffle=True)
    with pytest.raises(DataError, match="mixture"):
        plain.from_state(rows.state(1))
    assert "mixture" not in plain.state(1)


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ((4, 4), (1.0,), r"train_weights has 1 numbers and data.train_files 2 entries"),
        ((4, 0), (1.0, 1.0), r"Entry 1 of data.train_files has a weight and no row"),
        ((4, 4), (1.0, 0.001), r"Entry 1 .* weight 0.001 of 1.001: less than one of an epoch's 8 draws"),
    ],
)
def test_weights_that_cannot_be_followed_are_refused(
    sizes: tuple[int, ...], weights: tuple[float, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Mixture(sizes=sizes, weights=weights, seed=0, shuffle=True)
