"""How many rows the data holds, without making them where that can be helped."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from .folders import expand
from .formats import read_rows
from .sources import parse_source, source_rows


def count_rows(files: Sequence[str]) -> int:
    """Rows of all files and sources together, whether they can be used or not.

    Raises DataError where a file is missing or cannot be read, or where the rows are on the hub.
    """
    return sum(_count(file) for entry in files for file in expand(entry))


def _count(file: str) -> int:
    spec = parse_source(file)
    if spec is not None and spec.scheme == "reasoning_gym":
        return int(spec.parameters.get("size", "500"))  # the package takes seconds to import
    if spec is not None and spec.scheme == "hub":
        raise DataError(f"{file}: rows on the hub are counted by moonshift check-data and at the run's start.")
    if spec is not None:
        return len(source_rows(spec).rows)
    path = Path(file).expanduser()
    if path.suffix.lower() == ".parquet" and path.is_file():
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.read_metadata(path).num_rows
        except pa.ArrowException:
            pass  # the reader below says what is wrong
    return len(read_rows(file))
