"""`Batch`: columns over the same rows, and the verbs that make a new batch of an old one.

Invariant: no verb changes a batch. Verbs that choose rows (`concat, chunk, split, repeat, reorder, sample, padded`)
return new storage: writing into their result cannot reach the source. Verbs that choose columns (`select, pop, rename,
union, with_columns`, the constructor and `to` on the same device), `batch[name]` and `rows` share the tensors, because
a copy of every token column at every stage would double the memory: treat a column's tensors as read-only, `clone()`
before writing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DataError
from . import arrow, columns, gather, storage
from .columns import Column, ColumnInput, to_column
from .ragged import Ragged, Side


class Batch:
    """B rows: ragged token columns, dense columns `[B, ...]`, Arrow columns (text, lists, structs), and `meta`.

    Example: two samples of 3 and 2 response tokens are `Batch({"response_ids": Ragged.from_list([[5, 6, 2], [7, 2]],
    torch.int64), "reward": torch.tensor([1.0, 0.0]), "uid": ["train.jsonl:0", "train.jsonl:0"]}, {"step": 7})`.
    A plain list or an object array becomes Arrow: lone surrogates in its text become U+FFFD, and a key that some dict
    lacks comes back as None. `meta` holds JSON values about the batch as a whole. A batch without columns has 0 rows.
    Raises DataError naming the column when columns differ in rows or one cannot be held.
    """

    __slots__ = ("_columns", "_meta", "_rows")

    def __init__(self, columns: Mapping[str, ColumnInput], meta: Mapping[str, Any] | None = None) -> None:
        self._columns = {name: to_column(given, name) for name, given in columns.items()}
        self._meta = _json(meta or {})
        counts = {name: len(column) for name, column in self._columns.items()}
        self._rows = next(iter(counts.values()), 0)
        if len(set(counts.values())) > 1:
            raise DataError(f"columns differ in rows: {counts}; every column of a batch has one value a row")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> Column:
        """The column itself: `Ragged`, tensor `[B, ...]` or Arrow array. Raises DataError when there is none."""
        if name not in self._columns:
            raise DataError(f"the batch has no column {name!r}{self._nearest(name)}; it has {list(self._columns)}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        kinds = {name: columns.kind(column) for name, column in self._columns.items()}
        return f"Batch(rows={len(self)}, columns={kinds}, meta={self._meta})"

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in the order they were given."""
        return tuple(self._columns)

    @property
    def meta(self) -> dict[str, Any]:
        """A fresh copy of the batch's JSON values."""
        return json.loads(self._meta)

    def rows(self, name: str) -> list[Any]:
        """One value a row: tensors `[n, ...]` of a ragged column, numbers of a dense column `[B]`, tensors `[...]` of a
        dense column `[B, ...]`, plain Python of an Arrow column."""
        return columns.to_rows(self[name])

    def ragged(self, name: str) -> Ragged:
        """A token column. Raises DataError when the column is missing or of another kind."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise DataError(f"column {name} is {columns.kind(column)}, not ragged; give it as Ragged")
        return column

    def dense(self, name: str) -> torch.Tensor:
        """A column `[B, ...]`. Raises DataError when the column is missing or of another kind."""
        column = self[name]
        if not isinstance(column, torch.Tensor):
            raise DataError(f"column {name} is {columns.kind(column)}, not dense; give it as a tensor [rows, ...]")
        return column

    # --- columns

    def select(self, names: Iterable[str]) -> "Batch":
        """Only these columns, in this order."""
        return self._with({name: self[name] for name in names})

    def pop(self, names: Iterable[str]) -> "tuple[Batch, Batch]":
        """`(the named columns, the rest)`; both keep the meta."""
        popped = self.select(names)
        return popped, self.select(name for name in self.names if name not in popped)

    def rename(self, names: Mapping[str, str]) -> "Batch":
        """Columns under new names, `{old: new}`, in their place; swaps are fine. Raises DataError when two meet."""
        for old in names:
            self[old]
        renamed = [(names.get(name, name), column) for name, column in self._columns.items()]
        if len(dict(renamed)) < len(renamed):
            raise DataError(f"rename {dict(names)} gives two columns one name; the batch has {list(self._columns)}")
        return self._with(dict(renamed))

    def with_columns(self, added: Mapping[str, ColumnInput]) -> "Batch":
        """The batch with `added` columns; one of an existing name is replaced in its place."""
        return Batch({**self._columns, **added}, self.meta)

    def union(self, other: "Batch") -> "Batch":
        """The columns and meta of both. Raises DataError when a shared one is not equal (NaN equals NaN)."""
        for name in self.names:
            if name in other and not columns.equal(self[name], other[name], by_value=True):
                raise DataError(
                    f"union: both batches hold column {name!r} with different values; rename or drop one of them"
                )
        return Batch({**other._columns, **self._columns}, _joined([self.meta, other.meta], "union")).select(
            dict.fromkeys([*self.names, *other.names])
        )

    # --- rows

    @staticmethod
    def concat(batches: "Sequence[Batch]") -> "Batch":
        """The rows of all batches, in order, with the column order of the first.

        Meta values of one name must be equal. Raises DataError when names, kinds, dtypes, shapes or meta differ.
        """
        if not batches:
            raise DataError("concat of no batches: the columns are not known; give at least one batch")
        for position, batch in enumerate(batches):
            if set(batch.names) != set(batches[0].names):
                raise DataError(f"concat: batch {position} has columns {batch.names}, batch 0 {batches[0].names}")
        joined = {name: columns.concat([batch[name] for batch in batches], name) for name in batches[0].names}
        return Batch(joined, _joined([batch.meta for batch in batches], "concat"))

    def chunk(self, parts: int) -> "list[Batch]":
        """Exactly `parts` batches in order, whose sizes differ by at most one row; some are empty when rows are few."""
        if parts < 1:
            raise DataError(f"chunk into {parts} parts; give 1 or more")
        small, larger = divmod(len(self), parts)
        return self._cut([small + (part < larger) for part in range(parts)])

    def split(self, size: int) -> "list[Batch]":
        """Batches of `size` rows in order; the last may be shorter, and no rows make no batch."""
        if size < 1:
            raise DataError(f"split into batches of {size} rows; give 1 or more")
        return self._cut([min(size, len(self) - start) for start in range(0, len(self), size)])

    def repeat(self, times: int, interleave: bool = True) -> "Batch":
        """Each row `times` times: a a b b with `interleave` (the samples of a prompt stay together), else a b a b."""
        if times < 0:
            raise DataError(f"repeat {times} times; give 0 or more")
        rows = torch.arange(len(self))
        return self.reorder(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    def reorder(self, index: torch.Tensor | Sequence[int]) -> "Batch":
        """The rows that `index` (integers `[M]`, 0 ≤ i < B) names, in its order; rows may repeat or be left out."""
        given = torch.as_tensor(index) if len(index) else torch.empty(0, dtype=torch.int64)
        if given.dim() != 1 or given.dtype == torch.bool or given.is_floating_point():
            raise DataError(f"reorder by {given.dtype} {list(given.shape)}; give row numbers, integers of shape [M]")
        rows = given.to("cpu", torch.int64)
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < len(self)):
            raise DataError(f"reorder: rows {int(rows.min())} to {int(rows.max())} of a batch of {len(self)} rows")
        return self._with({name: columns.take(column, rows) for name, column in self._columns.items()})

    def sample(self, size: int, generator: torch.Generator | None = None, seed: int | None = None) -> "Batch":
        """`size` different rows in random order, drawn by `generator` (which moves on) or a new one from `seed`."""
        if (generator is None) == (seed is None):
            raise DataError("sample: give either a generator or a seed, so that the draw can be repeated")
        if not 0 <= size <= len(self):
            raise DataError(f"sample of {size} rows from {len(self)}; a row is drawn at most once")
        drawing = torch.Generator().manual_seed(seed or 0) if generator is None else generator
        return self.reorder(torch.randperm(len(self), generator=drawing, device=drawing.device)[:size])

    # --- tensors

    def to(self, device: torch.device | str) -> "Batch":
        """Tensors on `device`; Arrow columns stay in host memory."""
        return self._with({n: c.to(device) if isinstance(c, Ragged | torch.Tensor) else c for n, c in self._items()})

    def padded(
        self, column: str, width: int | None = None, side: Side = "right", value: float = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A ragged column as `(tensor [B, W, ...], mask bool [B, W])`, padded on `side` with `value`.

        W is `width`, or the longest row. The mask comes from the lengths. `Ragged.from_padded` is the inverse.
        Raises DataError when the column is not ragged or a row is longer than `width`.
        """
        ragged = self.ragged(column)
        try:
            return ragged.padded(width, side, value)
        except DataError as error:
            raise DataError(f"column {column}: {error}") from error

    # --- between processes and on disk

    def all_gather(self, group: dist.ProcessGroup | None = None) -> "Batch":
        """The rows of every rank in rank order, on every rank; tensors stay on this rank's device. No pickle is used.

        All ranks of `group` must call it. Raises DataError on every rank when their columns or meta do not fit.
        """
        parts = gather.all_gather(self._columns, self.meta, group)
        return Batch.concat([Batch(part, meta) for part, meta in parts])

    def save(self, folder: str | Path) -> str:
        """Write `tensors.safetensors`, `objects.parquet` and, last, `meta.json`; returns `digest()`.

        Files of an earlier batch are replaced. Raises StorageError when the folder cannot be written.
        """
        digests = self._digests()
        total = self._digest(digests)
        storage.write(Path(folder), self._columns, self.meta, (total, digests))
        return total

    @staticmethod
    def load(folder: str | Path) -> "Batch":
        """What `save` wrote, bit for bit, tensors on the CPU.

        Raises DataError naming file and column when something is missing, foreign or changed.
        """
        loaded, meta, (total, saved) = storage.read(Path(folder))
        batch = Batch(loaded, meta)
        found = batch._digests()
        for name in batch.names:
            if saved.get(name) != found[name]:
                file = storage.TENSORS if isinstance(batch[name], Ragged | torch.Tensor) else storage.OBJECTS
                raise DataError(
                    f"{folder}: {file}: column {name} has changed since it was saved (SHA-256 differs); save it again"
                )
        if total != batch._digest(found):
            raise DataError(
                f"{folder}: {storage.META}: meta or columns have changed since they were saved; save it again"
            )
        return batch

    def to_bytes(self) -> bytes:
        """One self-describing block (JSON, safetensors, Arrow stream) that `from_bytes` reads; also how it pickles."""
        return storage.pack(self._columns, self.meta)

    @staticmethod
    def from_bytes(block: bytes) -> "Batch":
        """The batch in `block`, tensors on the CPU. Raises DataError when the block is not one."""
        return Batch(*storage.unpack(block))

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return Batch.from_bytes, (self.to_bytes(),)

    # --- equality

    def equals(self, other: "Batch") -> bool:
        """Same columns in any order, bit for bit (NaN equals the same NaN), and same meta; devices may differ."""
        return (
            set(self.names) == set(other.names)
            and self._meta == other._meta
            and all(columns.equal(self[name], other[name]) for name in self.names)
        )

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes, bytes and meta, hex; the same for any column order and device."""
        return self._digest(self._digests())

    def _digests(self) -> dict[str, str]:
        return {name: columns.digest(column) for name, column in self._columns.items()}

    def _digest(self, digests: dict[str, str]) -> str:
        return hashlib.sha256(json.dumps([sorted(digests.items()), self._meta]).encode()).hexdigest()

    def _items(self) -> Iterable[tuple[str, Column]]:
        return self._columns.items()

    def _with(self, held: Mapping[str, ColumnInput]) -> "Batch":
        return Batch(held, self.meta)

    def _cut(self, sizes: list[int]) -> "list[Batch]":
        return [self.reorder(rows) for rows in torch.arange(len(self)).split(sizes)] if sizes else []

    def _nearest(self, name: object) -> str:
        near = get_close_matches(str(name), self.names, n=1)
        return f" (nearest: {near[0]!r})" if near else ""


def _json(meta: Mapping[str, Any]) -> str:
    """Canonical JSON text; text in it is cleaned as in columns. Raises DataError naming what is not JSON."""
    _check_keys(meta, "meta")
    try:
        return json.dumps(arrow.clean(meta), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"meta holds something that is not JSON: {error}; put tensors and objects into columns"
        ) from error


def _check_keys(value: Any, where: str) -> None:
    # json would turn the key 1 into "1", and the meta would not come back as it was
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DataError(f"{where}: key {key!r} is not text; JSON knows only text keys")
            _check_keys(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_keys(item, f"{where}[{position}]")


def _joined(metas: Sequence[Mapping[str, Any]], verb: str) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in joined and _json({key: joined[key]}) != _json({key: value}):
                raise DataError(f"{verb}: meta {key!r} is {joined[key]!r} here and {value!r} there; make them equal")
            joined[key] = value
    return joined
