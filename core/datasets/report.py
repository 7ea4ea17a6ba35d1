"""What became of the rows of a data set, in numbers.

Invariant: used + dropped + left out = rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_LISTED = 100
"""dropped rows that the ledger's event lists; all are counted"""
NUM_BINS = 12
OVERLONG = "longer than data.max_prompt_length"
CONTROL_TOKEN = "control token in the text"
"""Kinds of DroppedRow that are looked for by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    """A row that is not used, and why."""

    file: str
    row: int
    """from 0"""
    column: str
    """empty where the row could not be read at all"""
    kind: str
    """what is counted, without what differs from row to row"""
    fault: str
    line: int | None = None
    """of the file, from 1, where the row could not be read"""

    def __str__(self) -> str:
        if self.line is not None:
            return f"{self.file}:{self.line}: {self.fault}"
        return f"{self.file}: row {self.row}, " + (f"column {self.column}: {self.fault}" if self.column else self.fault)

    @property
    def reason(self) -> str:
        return f"{self.column}: {self.kind}" if self.column else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePattern:
    """Prompts whose turns have the same roles in the same order, and one of them through the chat template."""

    roles: tuple[str, ...]
    rows: int
    uid: str
    """the first such prompt"""
    rendered: str | None
    """its text as the model reads it; None where it cannot be rendered"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """One set: the training prompts, those held out, or the worked examples."""

    name: str
    rows: int
    """in all files"""
    used: int
    left_out: int
    """rows past `data.val_max_samples`"""
    dropped: tuple[DroppedRow, ...]
    truncated: int
    """prompts that were cut to `data.max_prompt_length`"""
    duplicates: int
    """prompts whose turns are those of an earlier row; they are used all the same"""
    lengths: np.ndarray = field(repr=False)
    """tokens of each used prompt, `[used]`"""
    patterns: tuple[RolePattern, ...]
    sources: dict[str, int]
    """used prompts by source"""
    digest: str
    """SHA-256 of every readable row's uid, turns and answer"""

    def reasons(self) -> dict[str, int]:
        """Dropped rows by reason, most first."""
        return dict(Counter(row.reason for row in self.dropped).most_common())

    def detail(self) -> dict[str, Any]:
        """What the ledger keeps; JSON."""
        return {
            "rows": self.rows,
            "used": self.used,
            "dropped": len(self.dropped),
            "left_out": self.left_out,
            "truncated": self.truncated,
            "duplicates": self.duplicates,
            "reasons": self.reasons(),
            "sources": self.sources,
            "tokens": summary(self.lengths),
            "digest": self.digest,
            "dropped_rows": [
                {"file": row.file, "row": row.row, "column": row.column, "fault": row.fault}
                for row in self.dropped[:MAX_LISTED]
            ],
        }


def summary(lengths: np.ndarray) -> dict[str, int]:
    """Least, middle, 95th and 99th percentile, greatest and total; percentiles are lengths that occur."""
    if not len(lengths):
        return {}
    ordered = np.sort(lengths)
    found = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: int(ordered[round(share * last)]) for name, share in found.items()} | {"total": int(ordered.sum())}


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, last, prompts) of bins of one whole width that hold every length."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // NUM_BINS))
    counts = np.bincount((lengths - low) // width)
    return [
        (low + place * width, min(high, low + (place + 1) * width - 1), int(count))
        for place, count in enumerate(counts)
    ]


def listed(head: str, rows: Sequence[object], limit: int) -> str:
    """`head`, the first `limit` rows, and how many more there are."""
    more = [f"and {len(rows) - limit} more"] if len(rows) > limit else []
    return "\n  ".join([head, *map(str, rows[:limit]), *more])
