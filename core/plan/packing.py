"""Dynamic batching: samples into micro-batches under a hard cap of tokens, and over DP ranks in equal shares.

Invariants: no micro-batch exceeds the cap, every sample is in exactly one, and the result depends on the lengths alone.
Unlike verl's, where the number of micro-batches comes from tokens and their filling from an estimate of work, so that a
micro-batch may exceed the budget, the cap holds by construction.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from ..errors import PlanError

_REFINEMENTS = 200
"""Exchanges between the heaviest and the lightest rank at the most; a handful is usual."""


def pack(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Indices of `lengths` (tokens) in micro-batches of at most `cap` tokens each, few of them.

    Best fit, longest first: at most about 11/9 of the fewest possible (Johnson 1974). Rows in a micro-batch are
    in ascending order, micro-batches by their first row.

    Raises:
        PlanError: when a sample is longer than the cap, naming it.
    """
    _refuse_overlong(lengths, cap)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the fullest that still fits is found by bisection
    for index in order:
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            left, chosen = cap, len(bins)
            bins.append([])
        else:
            left, chosen = room.pop(place)
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return sorted((sorted(chosen) for chosen in bins), key=lambda chosen: chosen[0])


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of `lengths` (tokens) for each DP rank, so that the ranks' sums are nearly equal; counts may differ.

    Longest first to the lightest rank (Graham 1969), then swaps between the heaviest and the lightest rank while they
    close the gap. Rows of a rank are in ascending order.

    Raises:
        PlanError: when there are fewer samples than ranks, since a rank without samples would wait for ever.
    """
    if len(lengths) < ranks:
        raise PlanError(f"{len(lengths)} samples cannot be shared by {ranks} DP ranks; every rank needs at least one.")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, count, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], count + 1, rank))
    sums = [sum(lengths[index] for index in share) for share in shares]
    _refine(lengths, shares, sums)
    return [sorted(share) for share in shares]


def _refine(lengths: Sequence[int], shares: list[list[int]], sums: list[int]) -> None:
    """Exchange or move one sample between the heaviest rank and a lighter one, the lightest first, while it helps."""
    for _ in range(_REFINEMENTS):
        heavy = max(range(len(sums)), key=lambda rank: (sums[rank], -rank))
        lighter = sorted((rank for rank in range(len(sums)) if rank != heavy), key=lambda rank: (sums[rank], rank))
        found = (
            (rank, _best_exchange(lengths, shares[heavy], shares[rank], sums[heavy] - sums[rank])) for rank in lighter
        )
        light, change = next((pair for pair in found if pair[1] is not None), (heavy, None))
        if change is None:
            return
        given, taken = change
        shares[heavy].remove(given)
        shares[light].append(given)
        shift = lengths[given]
        if taken is not None:
            shares[light].remove(taken)
            shares[heavy].append(taken)
            shift -= lengths[taken]
        sums[heavy] -= shift
        sums[light] += shift


def _best_exchange(
    lengths: Sequence[int], heavy: list[int], light: list[int], gap: int
) -> tuple[int, int | None] | None:
    """What to give (and to take) so that the shift is nearest to half the gap; None where nothing lowers the heavy."""
    others = sorted((lengths[index], index) for index in light)
    best: tuple[int, int, int | None] | None = None
    for given in heavy:
        wanted = lengths[given] - gap // 2  # the length that would close the gap if taken back
        place = bisect_left(others, (wanted, -1))
        near = others[max(0, place - 1) : place + 1]
        candidates: list[tuple[int, int | None]] = [(size, index) for size, index in near]
        if len(heavy) > 1:
            candidates.append((0, None))
        for size, taken in candidates:
            shift = lengths[given] - size
            if 0 < shift < gap and (best is None or abs(2 * shift - gap) < best[0]):
                best = (abs(2 * shift - gap), given, taken)
    return None if best is None else best[1:]


def cut_in_order(lengths: Sequence[int], added: Sequence[int], cap: int) -> list[tuple[int, int]]:
    """Consecutive samples in micro-batches (start, stop) of at most `cap` tokens, as few as their order allows and then
    as even as may be.

    `lengths`: tokens of a sample; `added`: what it adds to a micro-batch that the one before it is in, less where they
    share their prompt.

    Raises:
        PlanError: when a sample is longer than the cap, naming it.
    """
    _refuse_overlong(lengths, cap)
    fewest = len(_filled(lengths, added, cap))
    low, high = max(lengths, default=0), cap
    while low < high:  # the lowest cap that needs no more of them
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(lengths, added, middle)) <= fewest else (middle + 1, high)
    return _filled(lengths, added, high)


def _filled(lengths: Sequence[int], added: Sequence[int], cap: int) -> list[tuple[int, int]]:
    """Each micro-batch filled before the next is begun."""
    cuts: list[tuple[int, int]] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and tokens + added[index] > cap:
            cuts.append((start, index))
            start, tokens = index, length
        else:
            tokens += added[index] if index > start else length
    return [*cuts, (start, len(lengths))] if lengths else []


def _refuse_overlong(lengths: Sequence[int], cap: int) -> None:
    for index, length in enumerate(lengths):
        if length > cap:
            raise PlanError(
                f"Sample {index} has {length} tokens, more than the budget of {cap} a micro-batch; raise "
                "ppo_max_token_len_per_gpu (or log_prob_max_token_len_per_gpu), or lower data.max_response_length."
            )


def spans(count: int, ranks: int, unit: int = 1) -> list[range]:
    """`count` things in order, as one contiguous span for each rank, of nearly equal length; empty where none is left.

    Spans begin at multiples of `unit` where there are units enough for all ranks.
    Example: 10 on 4 ranks are 0-2, 2-5, 5-8, 8-10; with a unit of 4 on 2 ranks 0-8 and 8-10.
    """
    unit = unit if -(-count // unit) >= ranks else 1
    units = -(-count // unit)
    cuts = [min(count, unit * round(rank * units / ranks)) for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]
