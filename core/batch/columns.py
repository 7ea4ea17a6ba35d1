"""What a column may be, and the verbs of one column that do not depend on its kind.

Column kinds: `Ragged` (token columns), dense tensors `[B, ...]` and canonical Arrow arrays `[B]`.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import DataError
from . import arrow
from .ragged import Ragged, check_tensor, same_bits, same_values, take_rows

Column = Ragged | torch.Tensor | pa.Array
"""A column as it is held."""
ColumnInput = Ragged | torch.Tensor | pa.Array | pa.ChunkedArray | np.ndarray | Sequence[Any]
"""A column as it may be given."""


def to_column(given: ColumnInput, name: str) -> Column:
    """`given` as one of the three kinds: NumPy numbers become a dense tensor, other arrays and lists Arrow.

    Raises DataError naming the column.
    """
    if not isinstance(name, str) or not name or arrow.clean_text(name) != name:
        raise DataError(f"column name {name!r} is not usable; give text that is not empty")
    if isinstance(given, Ragged):
        return given
    if isinstance(given, np.ndarray) and given.dtype.kind in "biuf" and given.ndim:
        # a copy: the array may be read-only or change later
        given = torch.from_numpy(np.array(given, order="C"))
    if isinstance(given, torch.Tensor):
        check_tensor(given, f"column {name}")
        return given
    if isinstance(given, str | bytes) or not isinstance(given, pa.Array | pa.ChunkedArray | np.ndarray | Sequence):
        raise DataError(f"column {name}: {type(given).__name__} is no column; give Ragged, a tensor, Arrow or a list")
    return arrow.to_arrow(given, name)


def take(column: Column, index: torch.Tensor) -> Column:
    """Rows by int64 `[M]` (may repeat), in new storage."""
    if isinstance(column, Ragged):
        return column.take(index)
    if isinstance(column, torch.Tensor):
        return take_rows(column, index)
    return column.take(pa.array(index.cpu().numpy()))


def to_rows(column: Column) -> list[Any]:
    """One Python value a row: see `Batch.rows`."""
    if isinstance(column, Ragged):
        return column.rows()
    if isinstance(column, torch.Tensor):
        return column.tolist() if column.dim() == 1 else list(column.unbind(0))
    return column.to_pylist()


def concat(parts: Sequence[Column], name: str) -> Column:
    """Rows of all parts, in order and new storage. Raises DataError when their kinds, dtypes or shapes differ."""
    first, kinds = parts[0], {kind(part) for part in parts}
    if len(kinds) > 1:
        raise DataError(f"column {name}: {' and '.join(sorted(kinds))} cannot be one column; convert the parts first")
    if isinstance(first, Ragged):
        ragged = [part for part in parts if isinstance(part, Ragged)]
        lengths = torch.cat([part.lengths.to(first.offsets.device) for part in ragged])
        return Ragged.from_lengths(torch.cat([part.values.to(first.values.device) for part in ragged]), lengths)
    if isinstance(first, torch.Tensor):
        return torch.cat([part.to(first.device) for part in parts if isinstance(part, torch.Tensor)])
    return arrow.concat_arrays([part for part in parts if isinstance(part, pa.Array)], name)


def kind(column: Column) -> str:
    """Kind, dtype and trailing shape in words; Arrow types are left to be joined."""
    if isinstance(column, Ragged):
        return f"ragged {column.values.dtype} {list(column.values.shape[1:])}"
    if isinstance(column, torch.Tensor):
        return f"dense {column.dtype} {list(column.shape[1:])}"
    return "arrow"


def equal(left: Column, right: Column, by_value: bool = False) -> bool:
    """Bit for bit, or with `by_value` by number: then every NaN is equal, and 0.0 equals -0.0."""
    same = same_values if by_value else same_bits
    if isinstance(left, Ragged) and isinstance(right, Ragged):
        return same_bits(left.offsets, right.offsets) and same(left.values, right.values)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same(left, right)
    if isinstance(left, pa.Array) and isinstance(right, pa.Array):
        return _hash_arrow(left, by_value) == _hash_arrow(right, by_value)
    return False


def digest(column: Column) -> str:
    """SHA-256 over kind, dtype, shape and bytes, hex; it does not depend on device, chunks or slices."""
    if isinstance(column, pa.Array):
        return _hash_arrow(column, by_value=False)
    tensors = (column.offsets, column.values) if isinstance(column, Ragged) else (column,)
    sha = hashlib.sha256(b"ragged;" if isinstance(column, Ragged) else b"dense;")
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{list(tensor.shape)};".encode())
        sha.update(tensor_bytes(tensor).numpy().data)
    return sha.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes in row order as uint8 `[n]` on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _hash_arrow(array: pa.Array, by_value: bool) -> str:
    sha = hashlib.sha256(b"arrow;")
    for part in arrow.content(array, by_value):
        sha.update(part)
    return sha.hexdigest()
