"""Prompt files to rows of plain Python values.

Invariant: what leaves here is what `json` knows (text, numbers, booleans, None, lists, dicts with text keys), so that
no later stage meets an array, a timestamp or a decimal; a row that cannot be read keeps its place as a BrokenRow.
"""

import base64
import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import DataError

Row = dict[str, Any]
MAX_REPORTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRow:
    """A row whose text cannot be read, in its place among the others."""

    line: int | None
    """of the file, from 1; None where the form has no lines"""
    kind: str
    reason: str


def read_rows(path: str) -> list[Row | BrokenRow]:
    """All rows of a .jsonl, .json, .csv, .parquet or .arrow file, in order.

    Blank lines of a .jsonl file are no rows. CSV cells stay text. Raises DataError with the file, and the line or
    row, where the file is missing, of another form, or cannot be read as a whole.
    """
    file = Path(path).expanduser()
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown form of data file {file.suffix!r}; use one of {', '.join(READERS)}.")
    if not file.exists():
        raise DataError(f"{path}: no such file (looked in {file.parent.resolve()}). Correct the path in data.*_files.")
    if not file.is_file():
        raise DataError(f"{path}: is a folder; name the files in it.")
    try:
        return reader(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}. Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error


def plain(value: Any) -> Any:
    """`value` out of JSON-safe Python values only.

    NumPy arrays and scalars become lists and numbers, tuples and sets lists, dates ISO text, decimals text, bytes
    base64 text, anything else its `str`.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # NumPy, without importing it
        return plain(value.tolist())
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value) if not isinstance(value, Decimal) else f"{value:f}"


def _read_jsonl(file: Path) -> list[Row | BrokenRow]:
    # newline="\n": a line separator inside of text (U+2028, a lone \r) must not cut a row in two
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        return [_json_line(line, number) for number, line in enumerate(lines, start=1) if line.strip()]


def _json_line(line: str, number: int) -> Row | BrokenRow:
    try:
        row = json.loads(line.rstrip())  # a fault at the end is then one of this line, not of the next
    except (json.JSONDecodeError, RecursionError) as error:
        told = f"at column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        return BrokenRow(line=number, kind="broken JSON", reason=f"broken JSON {told}")
    if isinstance(row, dict):
        return row
    reason = f'a {type(row).__name__}, not an object like {{"prompt": …}}'
    return BrokenRow(line=number, kind="not an object", reason=reason)


def _read_json(file: Path) -> list[Row | BrokenRow]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: broken JSON at column {error.colno}: {error.msg}.") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: holds a {type(rows).__name__}; a .json data file is one list of objects.")
    return [row if isinstance(row, dict) else _no_object(row, index) for index, row in enumerate(rows)]


def _no_object(row: Any, index: int) -> BrokenRow:
    reason = f'row {index} is a {type(row).__name__}, not an object like {{"prompt": …}}'
    return BrokenRow(line=None, kind="not an object", reason=reason)


def _read_csv(file: Path) -> list[Row | BrokenRow]:
    rows: list[Row | BrokenRow] = []
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            for cells in reader:
                if not cells:
                    continue
                if len(cells) == len(header):
                    rows.append(dict(zip(header, cells, strict=True)))
                    continue
                reason = (
                    f"row {len(rows)} has {len(cells)} cells, the header {len(header)}."
                    ' Quote cells that hold a comma or a line break ("…")'
                )
                rows.append(BrokenRow(line=reader.line_num, kind="wrong number of cells", reason=reason))
        except csv.Error as error:
            raise DataError(f"{file}:{reader.line_num}: broken CSV: {error}. A .jsonl file is safer.") from error
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{file}: the header names {', '.join(map(repr, repeated))} twice. Rename one of them.")
    return rows


def _read_parquet(file: Path) -> list[Row | BrokenRow]:
    import pyarrow as pa  # slow to import, needed for this form only
    import pyarrow.parquet as pq

    try:
        # batch by batch, of an open file: nested columns in several chunks cannot be read as one table by all versions
        with pq.ParquetFile(file) as parquet:
            return _arrow_rows(parquet.iter_batches(), parquet.schema_arrow)
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}.") from error


def _read_arrow(file: Path) -> list[Row | BrokenRow]:
    """The stream that Hugging Face's `datasets` writes, or an Arrow (Feather) file."""
    import pyarrow as pa

    try:
        with pa.OSFile(str(file), "rb") as source:
            if source.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
                return _arrow_rows(batches, reader.schema)
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            return _arrow_rows(stream, stream.schema)
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Arrow file: {error}.") from error


def _arrow_rows(batches: Iterable[Any], schema: Any) -> list[Row | BrokenRow]:
    """Rows of record batches; the walk through every value is spared where the types are plain by themselves."""
    safe = all(_is_plain(field.type) for field in schema)
    rows: list[Row | BrokenRow] = []
    for batch in batches:
        found = batch.to_pylist()
        rows.extend(found if safe else [plain(row) for row in found])
    return rows


def _is_plain(kind: Any) -> bool:
    """Whether `to_pylist` gives JSON-safe values of an Arrow type."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_plain(kind.value_type)
    simple = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return types.is_null(kind) or any(test(kind) for test in simple)


READERS: dict[str, Callable[[Path], list[Row | BrokenRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
