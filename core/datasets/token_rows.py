"""Token ids of many prompts in two arrays: a list of lists would take ten times the memory.

Invariant: never changed after it was made.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, overload

import numpy as np

Side = Literal["left", "right"]


class TokenRows(Sequence[list[int]]):
    """Rows of token ids. `flat`: int32 `[tokens]`; `offsets`: int64 `[rows + 1]`.

    Example: `TokenRows.of([[5, 6], [], [7]])` has flat `[5, 6, 7]` and offsets `[0, 2, 2, 3]`.
    """

    def __init__(self, flat: np.ndarray, offsets: np.ndarray) -> None:
        self.flat, self.offsets = flat, offsets

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "TokenRows":
        """From lists, array by array."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, np.int32), offsets)

    @classmethod
    def joined(cls, parts: Sequence["TokenRows"]) -> "TokenRows":
        """The rows of all parts, one after the other."""
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([[], *(part.lengths for part in parts)]))])
        flat = [part.flat for part in parts] or [np.zeros(0, np.int32)]
        return cls(np.concatenate(flat), offsets.astype(np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 `[rows]`."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._row(index % len(self))

    def __iter__(self) -> Iterator[list[int]]:
        return (self._row(place) for place in range(len(self)))

    def _row(self, place: int) -> list[int]:
        return self.flat[self.offsets[place] : self.offsets[place + 1]].tolist()

    def kept(self, rows: np.ndarray) -> "TokenRows":
        """The rows where `rows`, bool `[rows]`, is true."""
        if rows.all():
            return self
        offsets = np.concatenate([[0], np.cumsum(self.lengths[rows])]).astype(np.int64)
        return TokenRows(self.flat[np.repeat(rows, self.lengths)], offsets)

    def cut(self, longest: int, side: Side) -> "TokenRows":
        """Each row at most `longest` tokens: `left` cuts off its beginning and keeps the last ids, `right` its end."""
        lengths = np.minimum(self.lengths, longest)
        starts = self.offsets[1:] - lengths if side == "left" else self.offsets[:-1]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
        return TokenRows(self.flat[places], offsets)
