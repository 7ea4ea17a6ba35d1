"""Ragged token columns and the row arithmetic of tensors, without a Python loop over rows.

Shapes: B rows, N tokens of all rows together, W padded width, `...` trailing dimensions.
Invariant: what belongs to a row follows from lengths alone, never from comparing ids with a pad id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

import torch

from ..errors import DataError

Side = Literal["right", "left"]

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
# torch has no gather or scatter for these; their bits are moved instead
_NO_INDEXING = _FLOAT8 | {torch.uint16, torch.uint32, torch.uint64}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *_NO_INDEXING,
    )
}
"""The dtypes a column may have, by the name they are saved under."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """B rows of unequal length: flat values and where each row starts.

    Example: the rows `[5, 6, 2]`, `[]`, `[7, 2]` are `Ragged(values=[5, 6, 2, 7, 2], offsets=[0, 3, 3, 5])`; row i is
    `values[offsets[i]:offsets[i + 1]]`. Both tensors are read-only by agreement: rows are views of them.
    Raises DataError when the offsets do not describe the values.
    """

    values: torch.Tensor
    """[N, ...]"""
    offsets: torch.Tensor
    """int64 [B + 1], from 0 to N, never falling; on the device of the values"""

    def __post_init__(self) -> None:
        check_tensor(self.values, "values")
        offsets = self.offsets
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
            raise DataError(
                f"offsets are {offsets.dtype} of shape {list(offsets.shape)}; give int64 of shape [rows + 1], first 0"
            )
        offsets = offsets.to(self.values.device)
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != self.values.shape[0] or bool((offsets[1:] < offsets[:-1]).any()):
            raise DataError(
                f"offsets run from {first} to {last} over {self.values.shape[0]} values; "
                "they must start at 0, never fall, and end at the number of values"
            )
        object.__setattr__(self, "offsets", offsets)

    @staticmethod
    def from_list(rows: Sequence[torch.Tensor | Sequence[float]], dtype: torch.dtype) -> "Ragged":
        """Rows (tensors `[n_i, ...]` or plain lists of numbers) as one column of `dtype`.

        Raises DataError when a row holds something that is no number, or one that `dtype` would cut (fractions, range).
        """
        lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        if any(isinstance(row, torch.Tensor) for row in rows):
            values = torch.cat([_numbers(row, dtype) for row in rows])
        else:
            values = _numbers(
                list(chain.from_iterable(row for row in rows if not isinstance(row, torch.Tensor))), dtype
            )
        return Ragged(values, lengths.cumsum(0))

    @staticmethod
    def from_lengths(values: torch.Tensor, lengths: torch.Tensor) -> "Ragged":
        """Flat values `[N, ...]` and the length of each row `[B]`."""
        return Ragged(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    @staticmethod
    def from_padded(tensor: torch.Tensor, mask: torch.Tensor) -> "Ragged":
        """Inverse of `padded`: what `mask` `[B, W]` (bool) marks in `tensor` `[B, W, ...]`, row by row.

        Raises DataError when the mask is not bool or its shape is not that of the tensor's first two dimensions.
        """
        if mask.dtype != torch.bool or mask.dim() != 2 or tensor.shape[:2] != mask.shape:
            raise DataError(
                f"a mask of {mask.dtype} {list(mask.shape)} does not fit a tensor of {list(tensor.shape)}; "
                "give a bool mask [rows, width] and a tensor [rows, width, ...]"
            )
        values = indexable(tensor)[mask].view(tensor.dtype)
        return Ragged.from_lengths(values, mask.sum(1))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        """Row `row` as a view `[n, ...]`; negative rows count from the end. Raises IndexError past the end."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a ragged column with {len(self)} rows")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[B]`."""
        return self.offsets.diff()

    def rows(self) -> list[torch.Tensor]:
        """Each row as a view `[n_i, ...]`."""
        return list(self.values.split(self.lengths.tolist())) if len(self) else []

    def to_list(self) -> list[list[float]]:
        """Each row as a plain list of numbers."""
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return [values[start:end] for start, end in pairwise(offsets)]

    def to(self, device: torch.device | str) -> "Ragged":
        """The same column on `device`."""
        return Ragged(self.values.to(device), self.offsets.to(device))

    def take(self, index: torch.Tensor) -> "Ragged":
        """Rows by `index` (int64 `[M]`, may repeat), in new storage."""
        index = index.to(self.offsets.device)
        lengths = self.lengths[index]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        # token t of the result lies at (start of its source row) + (t - start of its result row)
        shift = (self.offsets[index] - offsets[:-1]).repeat_interleave(lengths)
        tokens = torch.arange(shift.shape[0], device=shift.device) + shift
        return Ragged(take_rows(self.values, tokens), offsets)

    def padded(self, width: int | None, side: Side, value: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`(tensor [B, W, ...], mask bool [B, W])`: see `Batch.padded`."""
        lengths = self.lengths
        longest = int(lengths.max()) if len(self) else 0
        width = longest if width is None else width
        if width < longest:
            raise DataError(
                f"row {int(lengths.argmax())} has {longest} tokens, more than the width {width}; "
                "give a larger width or shorten the row first"
            )
        place = torch.arange(width, device=lengths.device)
        if side == "right":
            mask = place < lengths[:, None]
        elif side == "left":
            mask = place >= width - lengths[:, None]
        else:
            raise DataError(f"side is {side!r}; give 'right' or 'left'")
        shape = (len(self), width, *self.values.shape[1:])
        tensor = torch.full(shape, value, dtype=self.values.dtype, device=self.values.device)
        # masked places in row order are the flat values in their order
        indexable(tensor)[mask] = indexable(self.values)
        return tensor, mask


def _numbers(row: torch.Tensor | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    try:
        given = row.detach() if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=_exact(row, dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"a ragged column of {dtype} holds something that is not such a number: {error}") from error
    if given.is_floating_point() and given.numel() and not dtype.is_floating_point:
        raise DataError(f"fractions ({given.dtype}) were given for a ragged column of {dtype}; round them or change it")
    numbers = given.to(dtype)
    if not given.is_floating_point() and not same_bits(numbers.to(given.dtype), given):
        raise DataError(f"a number given as {given.dtype} does not fit a ragged column of {dtype}; use a wider dtype")
    return numbers


def _exact(row: Sequence[float], dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to read a list with: inferred for integers, so that fractions are seen before they are cut."""
    return dtype if dtype.is_floating_point or not row else None


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    """Refuse what cannot be a column: no row dimension, or a dtype outside `DTYPES`. Raises DataError."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise DataError(f"{what}: {type(tensor).__name__} is not a strided tensor")
    if tensor.dim() == 0:
        raise DataError(f"{what}: a tensor without dimensions has no rows; give shape [rows, ...]")
    if tensor.dtype not in DTYPES.values():
        raise DataError(f"{what}: dtype {tensor.dtype} cannot be stored; use one of {', '.join(sorted(DTYPES))}")


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the view of its bits where torch cannot index its dtype."""
    return tensor.view(_SIGNED[tensor.itemsize]) if tensor.dtype in _NO_INDEXING else tensor


def take_rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `[B, ...]` by int64 `[M]`, in new storage."""
    return indexable(tensor).index_select(0, index.to(tensor.device)).view(tensor.dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit: NaN equals the same NaN, 0.0 differs from -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    signed = _SIGNED[left.itemsize]
    left, right = left.detach().contiguous(), right.detach().contiguous()
    return torch.equal(left.view(signed), right.to(left.device).view(signed))


def same_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and value: any NaN equals any NaN, 0.0 equals -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return same_bits(left, right)
    wide = torch.float32 if left.dtype in _FLOAT8 else left.dtype
    left, right = left.detach().to(wide), right.detach().to(left.device, wide)
    return bool(((left == right) | (left.isnan() & right.isnan())).all())
