"""Properties of the verbs of `Batch`."""

import copy
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshift.core.batch import Batch, Ragged
from moonshift.core.batch.ragged import Side
from moonshift.core.errors import DataError

TEXT = st.text(max_size=5)
IDS = st.lists(st.integers(0, 2**40), max_size=6)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 7) -> Batch:
    """Every kind of column: empty responses, NaN, emoji, null, and no rows at all."""
    rows = draw(st.integers(min_rows, max_rows))
    ids = draw(st.lists(IDS, min_size=rows, max_size=rows))
    rewards = draw(st.lists(st.floats(width=32), min_size=rows, max_size=rows))
    texts = draw(st.lists(st.none() | TEXT, min_size=rows, max_size=rows))
    turns = draw(st.lists(st.lists(st.fixed_dictionaries({"role": TEXT}), max_size=2), min_size=rows, max_size=rows))
    return Batch(
        {
            "ids": Ragged.from_list(ids, torch.int64),
            "log_probs": Ragged.from_list([[-0.5 * i for i, _ in enumerate(row)] for row in ids], torch.bfloat16),
            "reward": torch.tensor(rewards, dtype=torch.float32),
            "pair": torch.arange(2 * rows).reshape(rows, 2) % 2 == 0,
            "text": texts,
            "turns": turns,
        },
        {"step": 7},
    )


def small() -> Batch:
    return Batch(
        {
            "ids": Ragged.from_list([[5, 6, 2], [], [7, 2]], torch.int64),
            "reward": torch.tensor([1.0, math.nan, 0.0]),
            "uid": ["a", "b", None],
        },
        {"step": 3},
    )


@given(batches(), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_chunk_makes_exactly_k_balanced_parts_that_concat_to_the_source(batch: Batch, parts: int) -> None:
    chunks = batch.chunk(parts)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == parts
    assert max(sizes) - min(sizes) <= 1
    assert Batch.concat(chunks).equals(batch)


@given(batches(min_rows=1), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_split_fills_every_batch_but_the_last(batch: Batch, size: int) -> None:
    parts = batch.split(size)
    assert {len(part) for part in parts[:-1]} <= {size}
    assert len(parts) == math.ceil(len(batch) / size)
    assert Batch.concat(parts).equals(batch)


@given(batches(), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_reorder_by_a_permutation_is_undone_by_its_inverse(batch: Batch, seed: int) -> None:
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    there = batch.reorder(order)
    assert there.reorder(order.argsort()).equals(batch)
    assert there.rows("text") == [batch.rows("text")[i] for i in order]
    assert there.ragged("ids").to_list() == [batch.ragged("ids").to_list()[i] for i in order]


@given(batches(), st.integers(0, 4))
@settings(max_examples=25, deadline=None)
def test_repeat_keeps_groups_together_only_when_interleaved(batch: Batch, times: int) -> None:
    rows = batch.ragged("ids").to_list()
    assert batch.repeat(times).ragged("ids").to_list() == [row for row in rows for _ in range(times)]
    assert batch.repeat(times, interleave=False).ragged("ids").to_list() == rows * times


@given(batches(), st.sampled_from(["left", "right"]), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_unpadding_what_was_padded_is_the_identity(batch: Batch, side: Side, spare: int) -> None:
    for name in ("ids", "log_probs"):
        source = batch.ragged(name)
        width = int(source.lengths.max()) + spare if len(batch) else spare
        tensor, mask = batch.padded(name, width, side, value=0)
        assert tensor.shape == mask.shape == (len(batch), width)
        assert torch.equal(mask.sum(1), source.lengths)
        back = Batch({name: Ragged.from_padded(tensor, mask)})
        assert back.equals(Batch({name: source}))


def test_padding_lies_on_the_side_asked_for() -> None:
    right, right_mask = small().padded("ids", value=9)
    left, left_mask = small().padded("ids", width=4, side="left", value=9)
    assert right.tolist() == [[5, 6, 2], [9, 9, 9], [7, 2, 9]]
    assert right_mask.tolist() == [[True, True, True], [False] * 3, [True, True, False]]
    assert left.tolist() == [[9, 5, 6, 2], [9, 9, 9, 9], [9, 9, 7, 2]]
    assert left_mask[2].tolist() == [False, False, True, True]


@pytest.mark.case("T01")
def test_the_eos_keeps_its_place_in_the_mask_when_pad_is_eos() -> None:
    batch = Batch({"response_ids": Ragged.from_list([[5, 6, 2], [7, 2]], torch.int64)})
    tensor, mask = batch.padded("response_ids", value=2)
    assert tensor.tolist() == [[5, 6, 2], [7, 2, 2]]
    assert mask.long().tolist() == [[1, 1, 1], [1, 1, 0]]


def test_a_row_longer_than_the_width_is_refused_with_its_number() -> None:
    with pytest.raises(DataError, match="column ids: row 0 has 3 tokens, more than the width 2"):
        small().padded("ids", width=2)


def test_a_column_of_another_kind_is_refused_where_its_kind_matters() -> None:
    for ask in (lambda: small().padded("reward"), lambda: small().ragged("uid"), lambda: small().dense("ids")):
        with pytest.raises(DataError, match=r"column \w+ is (dense|arrow|ragged).*, not (ragged|dense)"):
            ask()


def test_union_takes_nan_as_equal_and_refuses_any_other_difference() -> None:
    joined = small().union(Batch({"reward": torch.tensor([1.0, -math.nan, -0.0]), "more": [1, 2, 3]}, {"epoch": 1}))
    assert joined.names == ("ids", "reward", "uid", "more")
    assert joined.meta == {"step": 3, "epoch": 1}
    for name, other in (
        ("reward", torch.tensor([1.0, 0.0, 0.0])),
        ("reward", torch.tensor([1.0, math.nan, 0.0], dtype=torch.float64)),
        ("ids", Ragged.from_list([[5, 6], [2], [7, 2]], torch.int64)),
        ("uid", ["a", "b", "c"]),
    ):
        with pytest.raises(DataError, match=name):
            small().union(Batch({name: other}))
    with pytest.raises(DataError, match="step"):
        small().union(Batch({}, {"step": 4}))


def test_columns_are_selected_popped_renamed_and_replaced_in_order() -> None:
    batch = small()
    popped, rest = batch.pop(["reward"])
    assert (popped.names, rest.names) == (("reward",), ("ids", "uid"))
    assert batch.rename({"ids": "uid", "uid": "ids"})["uid"] is batch["ids"]
    assert batch.with_columns({"ids": [1, 2, 3], "new": [0, 0, 0]}).names == ("ids", "reward", "uid", "new")
    assert batch.select(["uid", "ids"]).names == ("uid", "ids")
    assert len(batch.select([])) == 0
    with pytest.raises(DataError, match="two columns"):
        batch.rename({"ids": "uid"})
    with pytest.raises(DataError, match=r"no column 'rewards' \(nearest: 'reward'\)"):
        batch.select(["rewards"])


def test_a_sample_is_drawn_without_repeats_and_again_by_its_seed() -> None:
    batch = Batch({"row": torch.arange(50)})
    drawn = batch.sample(20, seed=5)
    assert len(set(drawn.rows("row"))) == 20
    assert drawn.equals(batch.sample(20, torch.Generator().manual_seed(5)))
    assert not drawn.equals(batch.sample(20, seed=6))
    with pytest.raises(DataError, match="51 rows from 50"):
        batch.sample(51, seed=0)
    with pytest.raises(DataError, match="generator or a seed"):
        batch.sample(1)


VERBS: dict[str, Callable[[Batch], object]] = {
    "select": lambda b: b.select(["ids"]),
    "pop": lambda b: b.pop(["ids"]),
    "rename": lambda b: b.rename({"ids": "tokens"}),
    "union": lambda b: b.union(b),
    "with_columns": lambda b: b.with_columns({"ids": [0] * len(b)}),
    "concat": lambda b: Batch.concat([b]),
    "chunk": lambda b: b.chunk(1),
    "split": lambda b: b.split(9),
    "repeat": lambda b: b.repeat(1),
    "reorder": lambda b: b.reorder(range(len(b))),
    "sample": lambda b: b.sample(len(b), seed=0),
    "padded": lambda b: b.padded("ids"),
    "to": lambda b: b.to("cpu"),
    "to_bytes": lambda b: b.to_bytes(),
}
ROW_VERBS = ("concat", "chunk", "split", "repeat", "reorder", "sample")


@pytest.mark.parametrize("verb", VERBS)
@given(batches())
@settings(max_examples=8, deadline=None)
def test_no_verb_changes_its_batch(verb: str, batch: Batch) -> None:
    before, names, digest = copy.deepcopy(batch), batch.names, batch.digest()
    VERBS[verb](batch)
    assert batch.names == names
    assert batch.equals(before)
    assert batch.digest() == digest


@pytest.mark.parametrize("verb", ROW_VERBS)
def test_writing_into_the_result_of_a_row_verb_cannot_reach_the_source(verb: str) -> None:
    batch, before = small(), small()
    made = VERBS[verb](batch)
    for part in made if isinstance(made, list) else [made]:
        assert isinstance(part, Batch)
        part.ragged("ids").values.add_(1)
        part.ragged("ids").offsets.add_(1)
        part.dense("reward").zero_()
        part.meta["step"] = 99
    assert batch.equals(before)


def test_meta_is_a_copy_of_json_values() -> None:
    inner = {"lr": [1e-6]}
    batch = Batch({}, {"config": inner, "loss": math.inf})
    inner["lr"].append(0.0)
    batch.meta["config"]["lr"].clear()
    assert batch.meta == {"config": {"lr": [1e-6]}, "loss": math.inf}
    with pytest.raises(DataError, match=r"meta\.config: key 1 is not text"):
        Batch({}, {"config": {1: 2}})
    with pytest.raises(DataError, match="not JSON"):
        Batch({}, {"weights": torch.zeros(2)})


def test_columns_of_unequal_rows_are_refused_with_their_counts() -> None:
    with pytest.raises(DataError, match=r"\{'a': 2, 'b': 3\}"):
        Batch({"a": torch.zeros(2), "b": ["x", "y", "z"]})


def test_reorder_refuses_rows_that_are_not_there_and_masks() -> None:
    for index in ([3], [-1], torch.tensor([True, False, True]), torch.tensor([0.0])):
        with pytest.raises(DataError, match="reorder"):
            small().reorder(index)


def test_concat_joins_null_and_empty_lists_with_what_the_other_batch_knows() -> None:
    joined = Batch.concat(
        [
            Batch({"answer": [None], "tags": [[]], "extra": [{}]}),
            Batch({"answer": ["7"], "tags": [["x"]], "extra": [{"level": 3}]}),
        ]
    )
    assert joined.rows("answer") == [None, "7"]
    assert joined.rows("tags") == [[], ["x"]]
    assert joined.rows("extra") == [{"level": None}, {"level": 3}]
    with pytest.raises(DataError, match="column a: rows of int64 cannot follow rows of large_string"):
        Batch.concat([Batch({"a": ["x"]}), Batch({"a": [1]})])
    with pytest.raises(DataError, match="batch 1 has columns"):
        Batch.concat([Batch({"a": ["x"]}), Batch({"b": ["x"]})])
    with pytest.raises(DataError, match=r"column a: dense torch\.float32"):
        Batch.concat([Batch({"a": torch.zeros(1)}), Batch({"a": torch.zeros(1).long()})])


def test_equality_is_of_bits_and_blind_to_column_order() -> None:
    batch = small()
    turned = batch.select(["uid", "reward", "ids"])
    assert turned.equals(batch)
    assert turned.digest() == batch.digest()
    zero, minus_zero = Batch({"x": torch.tensor([0.0])}), Batch({"x": torch.tensor([-0.0])})
    assert not zero.equals(minus_zero)
    assert zero.digest() != minus_zero.digest()
    assert not Batch({"x": [0.0]}).equals(Batch({"x": [-0.0]}))
    assert not Batch({"x": [None]}).equals(Batch({"x": ["None"]}))
    assert not batch.equals(Batch({}, {"step": 3}).union(batch.select(["ids"])))


def test_a_million_samples_are_handled_without_a_loop_over_rows() -> None:
    lengths = torch.from_numpy(np.random.default_rng(0).integers(0, 6, 10**6))
    values = torch.arange(int(lengths.sum()), dtype=torch.int32)
    batch = Batch({"ids": Ragged.from_lengths(values, lengths), "reward": torch.rand(10**6)})
    started = time.perf_counter()
    order = torch.randperm(10**6, generator=torch.Generator().manual_seed(0))
    back = Batch.concat(batch.reorder(order).chunk(6)).reorder(order.argsort())
    tensor, mask = back.padded("ids", side="left")
    assert back.equals(batch)
    assert torch.equal(tensor[mask], values)
    assert time.perf_counter() - started < 20  # a loop over rows takes minutes; a noisy machine does not
