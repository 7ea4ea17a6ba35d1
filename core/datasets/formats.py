"""Prompt files to rows of plain Python values.

Invariant: what leaves here is what `json` knows (text, numbers, booleans, None, lists, dicts with text keys), so that
no later stage meets an array, a timestamp or a decimal.
"""

import base64
import csv
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import DataError

Row = dict[str, Any]
MAX_REPORTED = 5


def read_rows(path: str) -> list[Row]:
    """All rows of a .jsonl, .json, .csv or .parquet file, in order.

    Blank lines of a .jsonl file are no rows. CSV cells stay text. Raises DataError with the file, and the line or
    row, where the file is missing, of another form, or cannot be read.
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


def _read_jsonl(file: Path) -> list[Row]:
    rows: list[Row] = []
    faults: list[str] = []
    # newline="\n": a line separator inside of text (U+2028, a lone \r) must not cut a row in two
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                faults.append(f"{file}:{number}: broken JSON at column {error.colno}: {error.msg}")
                continue
            if isinstance(row, dict):
                rows.append(row)
            else:
                faults.append(f'{file}:{number}: a {type(row).__name__}, not an object like {{"prompt": …}}')
    if faults:
        shown = "\n  ".join(faults[:MAX_REPORTED])
        raise DataError(f"{file}: {len(faults)} lines cannot be read. Mend or remove them:\n  {shown}")
    return rows


def _read_json(file: Path) -> list[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: broken JSON at column {error.colno}: {error.msg}.") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: holds a {type(rows).__name__}; a .json data file is one list of objects.")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f'{file}: row {index} is a {type(row).__name__}, not an object like {{"prompt": …}}.')
    return rows


def _read_csv(file: Path) -> list[Row]:
    rows: list[Row] = []
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{file}:{reader.line_num}: row {len(rows)} has {len(cells)} cells, the header {len(header)}."
                        ' Quote cells that hold a comma or a line break ("…").'
                    )
                rows.append(dict(zip(header, cells, strict=True)))
        except csv.Error as error:
            raise DataError(f"{file}:{reader.line_num}: broken CSV: {error}. A .jsonl file is safer.") from error
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{file}: the header names {', '.join(map(repr, repeated))} twice. Rename one of them.")
    return rows


def _read_parquet(file: Path) -> list[Row]:
    import pyarrow as pa  # slow to import, needed for this form only
    import pyarrow.parquet as pq

    rows: list[Row] = []
    try:
        # batch by batch, of an open file: nested columns in several chunks cannot be read as one table by all versions
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches():
                rows.extend(plain(row) for row in batch.to_pylist())
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}.") from error
    return rows


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
