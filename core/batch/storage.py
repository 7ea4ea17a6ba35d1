"""How a batch lies on disk and crosses a process border: safetensors, Parquet or an Arrow stream, and JSON.

Invariant: nothing is unpickled, and nothing is believed: `meta.json` says what each column must be, and every
difference is a DataError that names the file and the column. `meta.json` is written last.
"""

import json
import os
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import SafetensorError

from ..errors import DataError, StorageError
from .arrow import one_array, storable_type
from .columns import Column
from .ragged import DTYPES, Ragged

TENSORS, OBJECTS, META = "tensors.safetensors", "objects.parquet", "meta.json"
FORMAT = "moonshift.batch/1"
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"MSBATCH1"

Digests = tuple[str, dict[str, str]]
"""SHA-256 of the whole batch, and of each column by name."""
Loaded = tuple[dict[str, Column], dict[str, Any]]


def _description(column: Column) -> dict[str, Any]:
    if isinstance(column, Ragged):
        values = column.values
        return {"kind": "ragged", "rows": len(column), "dtype": dtype_name(values), "shape": list(values.shape)}
    if isinstance(column, torch.Tensor):
        return {"kind": "dense", "rows": len(column), "dtype": dtype_name(column), "shape": list(column.shape)}
    return {"kind": "arrow", "rows": len(column), "type": str(column.type)}


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype's name in `DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


def tensors_of(columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
    """Every tensor by its name in the file; the prefix keeps dense `a/values` apart from the values of ragged `a`."""
    named: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            named[f"ragged/{name}/values"], named[f"ragged/{name}/offsets"] = column.values, column.offsets
        elif isinstance(column, torch.Tensor):
            named[f"dense/{name}"] = column
    return named


def table_of(columns: Mapping[str, Column]) -> pa.Table:
    """The Arrow columns."""
    return pa.table({name: column for name, column in columns.items() if isinstance(column, pa.Array)})


def _schema_text(columns: Mapping[str, Column]) -> str:
    """The exact Arrow types, in base64: Parquet renames list items and has no struct without fields."""
    return b64encode(table_of(columns).schema.serialize().to_pybytes()).decode()


def describe(columns: Mapping[str, Column], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its data, as JSON: what each column is, in order, the Arrow types, and the meta."""
    told = [{"name": name} | _description(column) for name, column in columns.items()]
    return {"format": FORMAT, "columns": told, "schema": _schema_text(columns), "meta": meta}


def write(folder: Path, columns: Mapping[str, Column], meta: Mapping[str, Any], digests: Digests) -> None:
    """Write the three files, each flushed to the disk and renamed into place; the digests go into `meta.json`.

    Raises StorageError.
    """
    table = table_of(columns)
    storable = table.cast(pa.schema([(field.name, storable_type(field.type)) for field in table.schema]))
    document = describe(columns, meta) | {"digest": digests[0], "digests": digests[1]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a reader that meets a half-replaced folder must see no meta.json rather than the old one
        (folder / META).unlink(missing_ok=True)
        with _Replacement(folder / TENSORS) as part:
            safetensors.torch.save_file(_own_storage(tensors_of(columns)), part)
        with _Replacement(folder / OBJECTS) as part:
            pq.write_table(storable, part)
        with _Replacement(folder / META) as part:
            part.write_text(json.dumps(document, indent=1, sort_keys=True), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the batch cannot be written to {folder}: {error}; free space or choose another folder"
        ) from error


class _Replacement:
    """A file written beside its place and renamed into it once it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")

    def __enter__(self) -> Path:
        return self.part

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.part.unlink(missing_ok=True)
            return
        with self.part.open("rb") as written:
            os.fsync(written.fileno())
        self.part.replace(self.path)


def _own_storage(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors; columns of one shape often share offsets, which safetensors refuses."""
    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return own


def read(folder: Path) -> tuple[dict[str, Column], dict[str, Any], Digests]:
    """Columns in saved order, meta, and the digests they were saved with. Raises DataError naming file and column."""
    for name in (META, TENSORS, OBJECTS):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing: the folder holds no whole batch; save it again")
    try:
        document = json.loads((folder / META).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{folder / META} is not JSON: {error}; save the batch again") from error
    try:
        tensors = safetensors.torch.load_file(folder / TENSORS)
    except SafetensorError as error:
        raise DataError(f"{folder / TENSORS} is damaged: {error}; save the batch again") from error
    try:
        table = pq.ParquetFile(folder / OBJECTS).read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{folder / OBJECTS} is damaged: {error}; save the batch again") from error
    digests = document.get("digests") if isinstance(document, dict) else None
    if not isinstance(digests, dict):
        raise DataError(f"{folder / META} holds no digests: it was not written by Batch.save")
    return *assemble(document, tensors, table, str(folder)), (str(document.get("digest")), digests)


def pack(columns: Mapping[str, Column], meta: Mapping[str, Any]) -> bytes:
    """Magic, three lengths, then meta JSON, safetensors and an Arrow stream."""
    document = json.dumps(describe(columns, meta)).encode()
    tensors = safetensors.torch.save(_own_storage(tensors_of(columns)))
    objects = to_stream(columns)
    return b"".join([_HEADER.pack(_MAGIC, len(document), len(tensors), len(objects)), document, tensors, objects])


def unpack(block: bytes) -> Loaded:
    """Inverse of `pack`. Raises DataError."""
    if len(block) < _HEADER.size or not block.startswith(_MAGIC):
        raise DataError("these bytes are not a batch; give what Batch.to_bytes returned")
    _, *sizes = _HEADER.unpack_from(block)
    if len(block) != _HEADER.size + sum(sizes):
        raise DataError(f"these {len(block)} bytes are a part of a batch of {_HEADER.size + sum(sizes)} bytes")
    view, starts = memoryview(block), [_HEADER.size]
    for size in sizes:
        starts.append(starts[-1] + size)
    try:
        document = json.loads(bytes(view[starts[0] : starts[1]]))
        tensors = safetensors.torch.load(bytes(view[starts[1] : starts[2]]))
        table = from_stream(view[starts[2] : starts[3]])
    except (ValueError, SafetensorError, pa.ArrowException) as error:
        raise DataError(f"these bytes are a damaged batch: {error}") from error
    return assemble(document, tensors, table, "bytes")


def to_stream(columns: Mapping[str, Column]) -> bytes:
    """The Arrow columns as an IPC stream."""
    table, sink = table_of(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_stream(stream: "bytes | memoryview") -> pa.Table:
    """Inverse of `to_stream`."""
    return pa.ipc.open_stream(pa.py_buffer(stream)).read_all()


def assemble(document: Any, tensors: Mapping[str, torch.Tensor], table: pa.Table, where: str) -> Loaded:
    """Columns by their description, each checked against it. Raises DataError naming `where`, file and column."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"{where}: {META} is not of format {FORMAT}; save the batch again with this version")
    columns: dict[str, Column] = {}
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(b64decode(document["schema"])))
        for told in document["columns"]:
            if told["kind"] == "arrow":
                label = f"{where}: {OBJECTS}: column {told['name']}"
                columns[told["name"]] = _arrow_column(told, table, schema, label)
            else:
                columns[told["name"]] = _tensor_column(told, tensors, f"{where}: {TENSORS}: column {told['name']}")
        meta = dict(document["meta"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: {META} lacks or garbles {error}; save the batch again") from error
    foreign = [*(tensors.keys() - tensors_of(columns).keys()), *(set(table.column_names) - columns.keys())]
    if foreign:
        raise DataError(f"{where}: {sorted(foreign)} are in the files but not in {META}; save the batch again")
    return columns, meta


def _tensor_column(told: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], label: str) -> Column:
    name, kind = told["name"], told["kind"]
    keys = [f"ragged/{name}/values", f"ragged/{name}/offsets"] if kind == "ragged" else [f"dense/{name}"]
    for key in keys:
        if key not in tensors:
            raise DataError(f"{label}: tensor {key} is missing; save the batch again")
    values = tensors[keys[0]]
    if values.dtype != DTYPES.get(told["dtype"]) or list(values.shape) != told["shape"]:
        raise DataError(f"{label} is {values.dtype} {list(values.shape)}, not {told['dtype']} {told['shape']} as saved")
    try:
        column = Ragged(values, tensors[keys[1]]) if kind == "ragged" else values
    except DataError as error:
        raise DataError(f"{label}: {error}") from error
    if len(column) != told["rows"]:
        raise DataError(f"{label} has {len(column)} rows, not {told['rows']} as saved")
    return column


def _arrow_column(told: Mapping[str, Any], table: pa.Table, schema: pa.Schema, label: str) -> pa.Array:
    name = told["name"]
    if name not in table.column_names:
        raise DataError(f"{label} is missing; save the batch again")
    stored, exact = table.column(name), schema.field(name).type
    try:
        column = stored.cast(exact)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{label} is {stored.type}, not {exact} as saved: {error}") from error
    if len(column) != told["rows"]:
        raise DataError(f"{label} has {len(column)} rows, not {told['rows']} as saved")
    return one_array(column)
