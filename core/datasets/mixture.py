"""Several sources with weights, as one stream: a pure function of (seed, position).

Invariant: within a source each row is drawn as often as any other, give or take one, whatever the weights are.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from ..errors import DataError
from .permutation import shuffled

_PASSES = 40
"""Permutations are told apart by a number below 2^64: (source + 1) · 2^40 + pass, and 2^63 + epoch for the order in
which sources take turns."""
_TURNS = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Rows of each source, in order one after the other, and how often each source is drawn.

    An epoch is as many draws as there are rows in all. In each, source s is drawn `quotas[s]` times: its share of the
    weights, rounded so that the quotas add up (largest remainder). A source goes through its own rows pass after pass,
    each pass in a new order, and goes on in the next epoch where it stopped; so a source with few rows and much weight
    passes several times an epoch. `at` gives the source's own pass, which tells a row's draws apart.

    Example: sizes (6, 2) and weights (1, 1): 8 draws an epoch, 4 from each source; the second passes twice an epoch.

    Raises DataError: weights that do not fit the sources, or a source that no draw would fall to.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.sizes):
            raise DataError(
                f"data.train_weights has {len(self.weights)} numbers and data.train_files {len(self.sizes)} entries; "
                "give one weight for each entry."
            )
        for place, (size, quota) in enumerate(zip(self.sizes, self.quotas, strict=True)):
            if not size:
                raise DataError(f"Entry {place} of data.train_files has a weight and no row that can be used.")
            if not quota:
                raise DataError(
                    f"Entry {place} of data.train_files has the weight {self.weights[place]} of {sum(self.weights)}: "
                    f"less than one of an epoch's {sum(self.sizes)} draws. Raise it or take the entry out."
                )

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Draws of each source an epoch; exact fractions, so that no machine rounds otherwise."""
        whole = sum(map(Fraction, self.weights))
        shares = [Fraction(weight) / whole * sum(self.sizes) for weight in self.weights]
        quotas = [int(share) for share in shares]
        by_rest = sorted(range(len(shares)), key=lambda place: (quotas[place] - shares[place], place))
        for place in by_rest[: sum(self.sizes) - sum(quotas)]:
            quotas[place] += 1
        return tuple(quotas)

    @property
    def fingerprint(self) -> int:
        """A number that another mixture does not have."""
        content = json.dumps([self.sizes, self.weights, self.shuffle]).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1

    def at(self, position: int) -> tuple[int, int]:
        """(the source's pass, row among all) of a position in the stream, both from 0."""
        epoch, slot = divmod(position, sum(self.sizes))
        sources, turns = _turns(self.quotas, self.seed, epoch if self.shuffle else None)
        source = int(sources[slot])
        passed, offset = divmod(epoch * self.quotas[source] + int(turns[slot]), self.sizes[source])
        if self.shuffle:
            offset = shuffled(self.sizes[source], self.seed, (source + 1 << _PASSES) + passed)[offset]
        return passed, sum(self.sizes[:source]) + offset


@lru_cache(maxsize=4)
def _turns(quotas: Sequence[int], seed: int, epoch: int | None) -> tuple[np.ndarray, np.ndarray]:
    """For each draw of an epoch its source, and how many draws the source had before it in the epoch.

    Shuffled, or (epoch None) each source's draws spread evenly over the epoch.
    """
    by_source = np.repeat(np.arange(len(quotas)), quotas)
    within = np.concatenate([np.arange(quota) for quota in quotas])
    if epoch is None:
        order = np.lexsort((by_source, (within + 0.5) / np.repeat(quotas, quotas)))
        return by_source[order], within[order]
    sources = by_source[np.array(shuffled(len(by_source), seed, _TURNS + epoch))]
    turns = np.empty_like(sources)
    turns[np.argsort(sources, kind="stable")] = within
    return sources, turns
