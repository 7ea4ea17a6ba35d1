"""What goes into a column and what comes out: ragged rows, text, objects of Parquet."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.errors import DataError


@pytest.mark.case("D05")
def test_a_lone_surrogate_becomes_the_replacement_character_and_emoji_stay() -> None:
    rows = ["a\ud83d", "ok \U0001f600", "\udc00b\ud83d\ude00", "plain"]
    batch = Batch({"text": rows, "turn": [[{"content\ud800": row}] for row in rows]}, {"note": "x\ud800"})
    assert batch.rows("text") == ["a�", "ok \U0001f600", "�b\U0001f600", "plain"]
    assert batch.rows("turn")[0] == [{"content�": "a�"}]
    assert batch.meta == {"note": "x�"}
    assert Batch.from_bytes(batch.to_bytes()).equals(batch)


@pytest.mark.case("D01")
@pytest.mark.parametrize("rows", [5, 200_000])
def test_nested_parquet_of_many_row_groups_comes_out_as_plain_python(rows: int) -> None:
    file = io.BytesIO()
    table = pa.table(
        {
            "prompt": [[{"role": "user", "content": f"{i}+1?"}] for i in range(rows)],
            "reward_model": [{"style": "rule", "ground_truth": str(i + 1)} for i in range(rows)],
        }
    )
    pq.write_table(table, file, row_group_size=1000)
    read = pq.read_table(file)
    batch = Batch({name: read[name] for name in read.column_names})
    prompts = batch.rows("prompt")
    assert len(prompts) == len(batch) == rows
    assert type(prompts[-1]) is list
    assert type(prompts[-1][0]) is dict
    assert json.dumps(prompts[-1]) == json.dumps([{"role": "user", "content": f"{rows - 1}+1?"}])
    assert batch.rows("reward_model")[0] == {"style": "rule", "ground_truth": "1"}


def test_object_arrays_with_arrays_inside_become_plain_lists() -> None:
    cells = np.empty(2, dtype=object)
    cells[0] = np.array([{"role": "user", "n": np.int64(3)}], dtype=object)
    cells[1] = np.array([], dtype=object)
    matrices = np.empty(1, dtype=object)
    matrices[0] = np.array([[1, 2], [3, 4]])
    assert Batch({"x": cells}).rows("x") == [[{"role": "user", "n": 3}], []]
    assert Batch({"x": matrices}).rows("x") == [[[1, 2], [3, 4]]]


def test_arrays_of_numbers_are_dense_columns_of_their_own() -> None:
    source = np.array([1.5, 2.5])
    batch = Batch({"x": source})
    source[0] = 0
    assert isinstance(batch["x"], torch.Tensor)
    assert batch.rows("x") == [1.5, 2.5]


def test_columns_written_differently_have_one_representation() -> None:
    plain = Batch({"x": ["b", None, "a"], "y": [[1], [], None]})
    others = (
        (pa.array(["z", "b", None, "a"]).slice(1), pa.chunked_array([[[1]], [[], None]])),
        (pa.chunked_array([["b"], [None, "a"]]), pa.array([[9], [1], [], None]).slice(1)),
        (pa.array(["b", None, "a"]).dictionary_encode(), pa.array([[1], [], None], pa.large_list(pa.int64()))),
        (pa.array(["b", None, "a"], pa.string_view()), pa.array([[1], [], None])),
    )
    for x, y in others:
        assert Batch({"x": x, "y": y}).digest() == plain.digest()
        assert Batch({"x": x, "y": y}).equals(plain)
    masked = pa.array(np.array([1, 2]), mask=np.array([False, True]))
    assert Batch({"x": masked}).digest() == Batch({"x": [1, None]}).digest()


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        ([7, "seven"], "column x: its rows do not make one Arrow column"),
        ([torch.zeros(2)], "column x.*Ragged.from_list"),
        ([2**70], "column x"),
        (torch.tensor(1.0), "column x.*no rows"),
        (torch.zeros(1, dtype=torch.complex64), "column x.*complex64"),
        ("text", "column x: str is no column"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "map<string, int64> is not supported"),
    ],
)
def test_what_cannot_be_a_column_is_refused_by_name(column: object, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        Batch({"x": column})  # pyright: ignore[reportArgumentType]


def test_ragged_rows_come_back_as_they_were_given() -> None:
    ragged = Ragged.from_list([[5, 6, 2], [], torch.tensor([7, 2])], torch.int64)
    assert ragged.values.tolist() == [5, 6, 2, 7, 2]
    assert ragged.offsets.tolist() == [0, 3, 3, 5]
    assert ragged.lengths.tolist() == [3, 0, 2]
    assert ragged.to_list() == [[5, 6, 2], [], [7, 2]]
    assert [ragged[i].tolist() for i in (0, 1, -1)] == [[5, 6, 2], [], [7, 2]]
    assert [row.tolist() for row in Batch({"x": ragged}).rows("x")] == ragged.to_list()
    with pytest.raises(IndexError, match="row 3"):
        ragged[3]


def test_ragged_columns_may_be_empty_or_have_more_dimensions() -> None:
    empty = Batch({"x": Ragged.from_list([], torch.float32)})
    assert len(empty) == 0
    assert empty.padded("x")[0].shape == (0, 0)
    assert empty.repeat(3).equals(empty)
    assert Ragged.from_list([[], []], torch.int64).to_list() == [[], []]
    wide = Batch({"x": Ragged.from_list([torch.ones(2, 3), torch.zeros(0, 3)], torch.float16)})
    tensor, mask = wide.padded("x", 4)
    assert tensor.shape == (2, 4, 3)
    assert Batch({"x": Ragged.from_padded(tensor, mask)}).equals(wide)


def test_numbers_that_would_be_cut_are_refused() -> None:
    for rows, dtype in (
        ([[1.5]], torch.int64),
        ([[300]], torch.uint8),
        ([["a"]], torch.int64),
        ([[None]], torch.float32),
    ):
        with pytest.raises(DataError, match="ragged column"):
            Ragged.from_list(rows, dtype)  # pyright: ignore[reportArgumentType]


def test_float64_rows_keep_all_their_digits() -> None:
    assert Ragged.from_list([[0.1]], torch.float64).to_list() == [[0.1]]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 3, 2, 3], []])
def test_offsets_that_do_not_describe_the_values_are_refused(offsets: list[int]) -> None:
    with pytest.raises(DataError, match="offsets"):
        Ragged(torch.zeros(3), torch.tensor(offsets, dtype=torch.int64))


def test_a_mask_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="does not fit"):
        Ragged.from_padded(torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_torch_cannot_index_go_through_every_row_verb(dtype: torch.dtype) -> None:
    values = torch.arange(4, dtype=torch.float32).to(dtype)
    batch = Batch({"x": Ragged(values, torch.tensor([0, 3, 4])), "d": values[:2]})
    assert batch.reorder([1, 0]).reorder([1, 0]).equals(batch)
    assert Batch.concat(batch.chunk(2)).equals(batch)
    tensor, mask = batch.padded("x", side="left")
    assert Batch({"x": Ragged.from_padded(tensor, mask)}).equals(batch.select(["x"]))
    assert Batch.from_bytes(batch.to_bytes()).digest() == batch.digest()
