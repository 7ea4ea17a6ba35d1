"""The processes that share one model, and what they have to agree on.

A *rank* is one of those processes. Every rank reads the whole batch and is given whole passes of it, cut as one process
would cut them: a pass has the same shape and the same numbers on whichever rank it is made.
Invariant: all ranks make the same number of passes, and so of collectives; a rank that has too few repeats one that
counts for nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch import Batch
from ..batch.gather import gather_bytes

_ROW = "row_of_the_whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows that go through the model together."""

    rows: Tensor
    """`[M]` int64"""
    counts: bool
    """false: another rank's pass, made here again so that no rank waits; nothing of it may be kept"""


class Ranks:
    """The processes that share a model, seen from one of them; `group=None`: this one alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def alone(self) -> bool:
        return self.size == 1

    def share(self, passes: Iterable[Tensor]) -> list[Pass]:
        """This rank's passes, in order; the number is the same on every rank.

        Dealt to and fro, since neighbours are of like length. Example: 5 passes on 2 ranks are 0, 3, 4 and 1, 2, and
        again 0, which does not count.
        """
        cut = list(passes)
        rounds = -(-len(cut) // self.size)
        places = [
            turn * self.size + (self.rank if turn % 2 == 0 else self.size - 1 - self.rank) for turn in range(rounds)
        ]
        return [Pass(rows=cut[place if place < len(cut) else 0], counts=place < len(cut)) for place in places]

    def merged(self, part: Batch, rows: Tensor) -> Batch:
        """The rows of all ranks in ascending order, each once; `rows` `[len(part)]`: which ones this rank has."""
        if not self.alone:
            whole = part.with_columns({_ROW: rows}).all_gather(self.group)
            rows, part = whole.dense(_ROW), whole.select([name for name in whole.names if name != _ROW])
        order = torch.argsort(rows, stable=True)
        ascending = rows[order]
        first = torch.cat([ascending.new_ones(1, dtype=torch.bool), ascending[1:] != ascending[:-1]])
        return part.reorder(order[first])

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, in rank order."""
        if self.alone:
            return [value]
        return [json.loads(block) for block in gather_bytes(json.dumps(value).encode(), self.group)]

    def sum(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums by name; a name that a rank does not have counts 0 there."""
        if self.alone:
            return metrics
        told = self.gather(metrics)
        names = dict.fromkeys(name for each in told for name in each)
        return {name: sum(each.get(name, 0.0) for each in told) for name in names}
