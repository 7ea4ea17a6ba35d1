"""Permutations that are a pure function of two numbers.

Invariant: the same numbers give the same order on every machine and with every version of NumPy.
"""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=16)
def shuffled(num_rows: int, seed: int, stream: int) -> tuple[int, ...]:
    """A permutation of `range(num_rows)` from Philox with the key (seed, stream), both below 2^64.

    Raw Philox words are sorted instead of calling `Generator.permutation`: NumPy promises that the words stay the
    same between its versions, not that the permutation does.
    """
    words = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(num_rows)
    return tuple(np.argsort(words, kind="stable").tolist())
