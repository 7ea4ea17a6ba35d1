"""Text and object columns: what Python or Parquet gives, as Arrow arrays of a few canonical types.

Invariant: a column has one representation. Strings, bytes and lists use 64-bit offsets (10^6 long responses pass
2 GiB), dictionaries are decoded, views and fixed sizes are gone, so that equal rows have an equal digest whatever
wrote them. Lone surrogates, which no encoding can store, become U+FFFD; a pair of surrogates becomes its character.

Two properties of Arrow's structs show: a key that some row lacks comes back as None there, and all rows of a column
have one type. Rows of mixed type (`7` and `"seven"`) are refused; store such values as JSON text.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError

_EMPTY_STRUCT_FIELD = "_"
"""child put into structs without fields, which Parquet cannot store"""


def to_arrow(rows: "pa.Array | pa.ChunkedArray | np.ndarray | Sequence[Any]", column: str) -> pa.Array:
    """One canonical Arrow array `[B]`; text is cleaned. Raises DataError naming the column."""
    try:
        array = _from_python(rows) if isinstance(rows, np.ndarray | Sequence) else rows
        array = array.cast(canonical_type(array.type))
        return one_array(array) if isinstance(array, pa.ChunkedArray) else array
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"column {column}: its rows do not make one Arrow column: {error}. Give rows of one type: text, numbers, "
            "lists, dicts or None; store mixed values as JSON text, token rows with Ragged.from_list"
        ) from error


def one_array(chunks: pa.ChunkedArray) -> pa.Array:
    """All chunks as one array; canonical types cannot overflow."""
    if chunks.num_chunks == 1:
        return chunks.chunk(0)
    return pa.concat_arrays(chunks.chunks) if chunks.num_chunks else pa.array([], chunks.type)


def _from_python(rows: "np.ndarray | Sequence[Any]") -> pa.Array:
    plain = list(rows)
    try:
        return pa.array(plain, from_pandas=False)
    except (UnicodeEncodeError, pa.ArrowInvalid, pa.ArrowTypeError):
        # the second, slower way: only for surrogates and nested arrays
        return pa.array(clean(plain), from_pandas=False)


def clean(value: Any) -> Any:
    """Plain Python all the way down: arrays become lists, NumPy numbers Python's, surrogates U+FFFD or a character."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, np.generic):
        return clean(value.item())
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def clean_text(text: str) -> str:
    """`text` that can be encoded: each lone surrogate is U+FFFD, all else unchanged."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def canonical_type(given: pa.DataType) -> pa.DataType:
    """The one type that columns of `given` are stored as. Raises DataError for maps, unions and extension types."""
    types = pa.types
    if types.is_string(given) or types.is_large_string(given) or types.is_string_view(given):
        return pa.large_string()
    if types.is_binary(given) or types.is_large_binary(given) or types.is_binary_view(given):
        return pa.large_binary()
    if types.is_dictionary(given):
        return canonical_type(given.value_type)
    if types.is_list(given) or types.is_large_list(given) or types.is_fixed_size_list(given):
        return pa.large_list(canonical_type(given.value_type))
    if types.is_struct(given):
        return pa.struct([(field.name, canonical_type(field.type)) for field in given])
    if (
        types.is_null(given)
        or types.is_primitive(given)
        or types.is_decimal(given)
        or types.is_fixed_size_binary(given)
    ):
        return given
    raise DataError(f"Arrow type {given} is not supported; use text, bytes, numbers, times, lists or structs")


def unify(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The canonical type that holds rows of both, or None: null joins anything, structs join their fields."""
    if left.equals(right) or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if pa.types.is_large_list(left) and pa.types.is_large_list(right):
        item = unify(left.value_type, right.value_type)
        return None if item is None else pa.large_list(item)
    if not (pa.types.is_struct(left) and pa.types.is_struct(right)):
        return None
    fields: dict[str, pa.DataType] = {field.name: field.type for field in left}
    for field in right:
        joined = unify(fields.get(field.name, pa.null()), field.type)
        if joined is None:
            return None
        fields[field.name] = joined
    return pa.struct(list(fields.items()))


def concat_arrays(arrays: Sequence[pa.Array], column: str) -> pa.Array:
    """Rows of all arrays, in order. Raises DataError when their types do not join."""
    joined: pa.DataType = pa.null()
    for array in arrays:
        wider = unify(joined, array.type)
        if wider is None:
            raise DataError(
                f"column {column}: rows of {array.type} cannot follow rows of {joined}; convert one of them"
            )
        joined = wider
    return pa.concat_arrays([array.cast(joined) for array in arrays])


def storable_type(canonical: pa.DataType) -> pa.DataType:
    """`canonical` with a child in each struct without fields; Arrow casts both ways without loss."""
    if pa.types.is_large_list(canonical):
        return pa.large_list(storable_type(canonical.value_type))
    if pa.types.is_struct(canonical):
        fields = [(field.name, storable_type(field.type)) for field in canonical]
        return pa.struct(fields or [(_EMPTY_STRUCT_FIELD, pa.bool_())])
    return canonical


def content(array: pa.Array, by_value: bool = False) -> Iterator[bytes | memoryview]:
    """What `array` says, as bytes that do not depend on how it is laid out (slices, chunks, bytes under nulls).

    With `by_value` every NaN is the same NaN and -0.0 is 0.0.
    """
    yield f"{array.type}:{len(array)};".encode()
    yield np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes()
    array = array.drop_null()
    kind = array.type
    if pa.types.is_large_list(kind):
        yield array.value_lengths().to_numpy(zero_copy_only=False).tobytes()
        yield from content(array.flatten(), by_value)
    elif pa.types.is_struct(kind):
        for position, field in enumerate(kind):
            yield f"{field.name!r}:".encode()
            yield from content(array.field(position), by_value)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        yield from _texts(array)
    elif pa.types.is_boolean(kind):
        yield array.cast(pa.uint8()).to_numpy().tobytes()
    elif pa.types.is_floating(kind) and by_value:
        numbers = array.to_numpy(zero_copy_only=False) + np.zeros((), kind.to_pandas_dtype())
        yield np.where(np.isnan(numbers), np.array(np.nan, numbers.dtype), numbers).tobytes()
    elif not pa.types.is_null(kind):
        width = kind.bit_width // 8
        yield from _bytes(array, array.offset * width, (array.offset + len(array)) * width)


def _texts(array: pa.Array) -> Iterator[bytes | memoryview]:
    if len(array):
        offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
        yield np.diff(offsets).tobytes()
        yield from _bytes(array, int(offsets[0]), int(offsets[-1]))


def _bytes(array: pa.Array, start: int, end: int) -> Iterator[memoryview]:
    data = array.buffers()[-1]
    if data is not None:
        yield memoryview(data)[start:end]
