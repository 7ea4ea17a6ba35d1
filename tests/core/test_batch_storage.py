"""A batch on disk, as bytes, through Ray and between ranks: always the same bits, never a pickled object."""

import io
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import safetensors.torch
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.errors import DataError, StorageError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
]


def whole() -> Batch:
    """Every dtype and kind, shared offsets, aliased tensors, odd names, NaN, structs without fields."""
    ids = Ragged.from_list([[5, 6, 2], [], [7, 2]], torch.int64)
    shared = torch.tensor([0.0, math.nan, -0.0])
    return Batch(
        {
            "ids": ids,
            "log_probs": Ragged(torch.randn(5, dtype=torch.bfloat16), ids.offsets),
            "ids/values": shared,
            "alias": shared,
            "turned": torch.arange(6).reshape(2, 3).T,
            **{str(dtype): torch.tensor([0.0, 1.0, 1.0]).to(dtype) for dtype in DTYPES},
            "text": ["a", "", "\U0001f600"],
            "null": [None, None, None],
            "turns": [[{"role": "user"}], [], None],
            "extra": [{}, None, {}],
            "deep": [{"kwargs": {}, "tags": [[1], []]}, {"kwargs": None, "tags": None}, None],
            "score": [math.nan, None, 1.5],
            "answer été": [b"x", b"", None],
        },
        {"step": 7, "loss": math.inf, "names": ["é", None, True]},
    )


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 2, 0, 1, 1], []])
def test_a_saved_batch_comes_back_bit_for_bit_with_its_digest(rows: list[int], tmp_path: Path) -> None:
    batch = whole().reorder(rows)
    digest = batch.save(tmp_path / "new" / "batch")
    loaded = Batch.load(tmp_path / "new" / "batch")
    assert loaded.equals(batch)
    assert loaded.names == batch.names
    assert loaded.meta == batch.meta
    assert digest == batch.digest() == loaded.digest()
    assert all(str(loaded.rows(name)) == str(batch.rows(name)) for name in batch.names)
    assert sorted(path.name for path in (tmp_path / "new" / "batch").iterdir()) == [
        *("meta.json", "objects.parquet", "tensors.safetensors"),
    ]


@pytest.mark.parametrize("batch", [Batch({}), Batch({"x": ["only text"]}), Batch({"x": torch.zeros(2)}, {"a": {}})])
def test_batches_without_tensors_text_or_anything_are_saved_too(batch: Batch, tmp_path: Path) -> None:
    assert batch.save(tmp_path) == Batch.load(tmp_path).digest()
    assert Batch.from_bytes(batch.to_bytes()).equals(batch)


def test_saving_over_an_earlier_batch_leaves_nothing_of_it(tmp_path: Path) -> None:
    whole().save(tmp_path)
    loaded, later = Batch.load(tmp_path), Batch({"x": [1]})
    later.save(tmp_path)
    assert Batch.load(tmp_path).equals(later)
    assert loaded.dense("turned").tolist() == [[0, 3], [1, 4], [2, 5]]


def _change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "tensors.safetensors"
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
        change(tensors)
        safetensors.torch.save_file(tensors, path)

    return damage


def _drop_object(folder: Path) -> None:
    table = pq.ParquetFile(folder / "objects.parquet").read()
    pq.write_table(table.drop_columns(["text"]), folder / "objects.parquet")


def _add_object(folder: Path) -> None:
    table = pq.ParquetFile(folder / "objects.parquet").read()
    pq.write_table(table.append_column("foreign", pa.array([1, 2, 3])), folder / "objects.parquet")


def _change_object(folder: Path) -> None:
    table = pq.ParquetFile(folder / "objects.parquet").read()
    at = table.column_names.index("text")
    pq.write_table(table.set_column(at, "text", pa.array(["b", "", ""])), folder / "objects.parquet")


def _change_meta(folder: Path) -> None:
    path = folder / "meta.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))


def _cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed tensor": (
        _change_tensors(lambda tensors: tensors["ragged/ids/values"].add_(1)),
        "tensors.safetensors: column ids has changed",
    ),
    "changed offsets": (
        _change_tensors(lambda tensors: tensors["ragged/ids/offsets"][1:3].add_(9)),
        "tensors.safetensors: column ids: offsets run from 0 to 5 over 5 values",
    ),
    "dropped tensor": (
        _change_tensors(lambda tensors: tensors.pop("dense/turned")),
        "tensors.safetensors: column turned: tensor dense/turned is missing",
    ),
    "another dtype": (
        _change_tensors(lambda tensors: tensors.update({"dense/turned": tensors["dense/turned"].float()})),
        r"tensors.safetensors: column turned is torch.float32 \[3, 2\], not int64",
    ),
    "dropped object": (_drop_object, "objects.parquet: column text is missing"),
    "foreign object": (_add_object, "'foreign'"),
    "changed object": (_change_object, "objects.parquet: column text has changed"),
    "changed meta": (_change_meta, "meta.json: meta or columns have changed"),
    "cut tensors": (_cut("tensors.safetensors", 100), "tensors.safetensors is damaged"),
    "cut objects": (_cut("objects.parquet", 100), "objects.parquet is damaged"),
    "cut meta": (_cut("meta.json", 100), "meta.json is not JSON"),
    "emptied meta": (lambda folder: (folder / "meta.json").write_text("{}"), "meta.json"),
    "no meta": (lambda folder: (folder / "meta.json").unlink(), "meta.json is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_saved_batch_names_file_and_column(fault: str, tmp_path: Path) -> None:
    whole().save(tmp_path)
    damage, message = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        Batch.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        whole().save(tmp_path / "file" / "batch")


def test_bytes_that_are_no_batch_are_refused() -> None:
    block = whole().to_bytes()
    for wrong, message in ((b"", "not a batch"), (b"x" * 99, "not a batch"), (block[:-1], "part of a batch")):
        with pytest.raises(DataError, match=message):
            Batch.from_bytes(wrong)


class _NamingUnpickler(pickle.Unpickler):
    """Unpickles, and keeps what it was asked to import."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self.imported: set[str] = set()

    def find_class(self, module: str, name: str) -> object:
        self.imported.add(f"{module}.{name}")
        return super().find_class(module, name)


def test_pickling_a_batch_pickles_no_object_of_its_columns() -> None:
    batch = whole()
    unpickler = _NamingUnpickler(pickle.dumps(batch))
    assert unpickler.load().equals(batch)
    assert unpickler.imported == {"moonshift.core.batch.batch.Batch.from_bytes"}


@pytest.mark.slow
def test_a_batch_crosses_ray_there_and_back_unchanged() -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote
        def answer(batch: Batch) -> tuple[str, Batch]:
            return batch.digest(), batch.repeat(2)

        batch = whole()
        digest, doubled = ray.get(answer.remote(batch), timeout=120)
        assert digest == batch.digest()
        assert doubled.equals(batch.repeat(2))
    finally:
        ray.shutdown()


RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from moonshift.core.batch import Batch, Ragged
from moonshift.core.errors import DataError

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)

def part(rank, dtype=torch.bfloat16):
    rows = range(rank * 2)  # rank 0 has none
    return Batch({
        "ids": Ragged.from_list([list(range(row)) for row in rows], torch.int64),
        "flag": torch.tensor([row % 2 == 0 for row in rows], dtype=torch.bool),
        "score": torch.ones(len(rows), 3, dtype=dtype),
        "text": [f"{rank}/{row}" for row in rows],
    }, {"step": 1})

assert part(rank).all_gather().equals(Batch.concat([part(r) for r in range(world)]))
assert Batch({"x": [rank]}).all_gather().rows("x") == list(range(world))
alone = dist.new_group([1])
if rank == 1:
    assert part(1).all_gather(alone).equals(part(1))
try:
    part(rank, torch.float16 if rank == 1 else torch.bfloat16).all_gather()
except DataError as error:
    assert "rank 1 and rank 0 differ in ['dense/score']" in str(error), error
else:
    raise SystemExit("ranks that differ were joined")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_all_gather_gives_every_rank_all_rows_in_rank_order(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    arguments = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*arguments, str(rank), "2", str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    faults = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], faults


def test_meta_says_in_plain_json_what_the_files_hold(tmp_path: Path) -> None:
    Batch({"ids": Ragged.from_list([[1, 2], []], torch.int32), "uid": ["a", "b"]}).save(tmp_path)
    told = json.loads((tmp_path / "meta.json").read_text())["columns"]
    assert told[0] == {"name": "ids", "kind": "ragged", "rows": 2, "dtype": "int32", "shape": [2]}
    assert told[1] == {"name": "uid", "kind": "arrow", "rows": 2, "type": "large_string"}
