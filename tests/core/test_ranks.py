"""How passes and prompts are dealt to ranks."""

import pytest
import torch

from moonshift.core.batch import Batch
from moonshift.core.plan.packing import spans
from moonshift.core.training.ranks import Ranks


def ranks(rank: int, size: int) -> Ranks:
    made = Ranks()
    made.rank, made.size = rank, size
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_every_pass_counts_once_and_all_ranks_make_as_many(count: int, size: int) -> None:
    passes = [torch.tensor([index]) for index in range(count)]
    dealt = [ranks(rank, size).share(passes) for rank in range(size)]
    assert len({len(share) for share in dealt}) == 1
    assert sorted(int(one.rows) for share in dealt for one in share if one.counts) == list(range(count))


def test_passes_are_dealt_to_and_fro() -> None:
    passes = [torch.tensor([index]) for index in range(5)]
    found = [[(int(one.rows), one.counts) for one in ranks(rank, 2).share(passes)] for rank in range(2)]
    assert found == [[(0, True), (3, True), (4, True)], [(1, True), (2, True), (0, False)]]


def test_rows_come_back_in_order_and_once() -> None:
    part = Batch({"value": torch.tensor([30, 10, 20, 10])})
    assert Ranks().merged(part, torch.tensor([3, 1, 2, 1])).dense("value").tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("count", "size", "unit"), [(10, 4, 1), (10, 2, 4), (1, 2, 1), (3, 2, 4), (64, 8, 3), (7, 7, 1)]
)
def test_spans_cover_everything_in_order(count: int, size: int, unit: int) -> None:
    found = spans(count, size, unit)
    assert [index for span in found for index in span] == list(range(count)) and len(found) == size
    assert max(map(len, found)) - min(map(len, found)) < 2 * unit


def test_spans_begin_at_whole_units_where_there_are_enough() -> None:
    assert spans(10, 2, 4) == [range(0, 8), range(8, 10)]
    assert spans(6, 2, 4) == [range(0, 4), range(4, 6)]
    assert spans(3, 2, 4) == [range(0, 2), range(2, 3)]
