"""Grading while generation runs: a sample is graded as soon as it is whole, and its result kept until it is asked for.

Invariant: streaming changes when a sample is graded, never what is: a result is used only for a sample that equals the
one it was made for, and whatever has none is graded when the batch is.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from moonshift.core.errors import MoonshiftError
from moonshift.core.rewards.graded import Graded
from moonshift.core.types import Prompt, Sample

from .pool import RewardPool

_AT_ONCE = 8
"""samples that are sent together: a message costs more than a short grading"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One response that was generated to its end."""

    row: int
    """in the rollout batch"""
    response: str
    finish_reason: str
    response_tokens: int


@dataclass(slots=True)
class RewardStream:
    """Brings finished samples from the process that generates to the workers that grade; crosses process borders."""

    actors: Sequence[Any]
    stops: Sequence[int]
    """Worker i grades the rows before `stops[i]` that no worker before it grades."""
    _waiting: dict[int, list[Finished]] = field(default_factory=dict, init=False)

    def send(self, sample: Finished) -> None:
        """Send it, or keep it until there are more for its worker; waits for nothing."""
        worker = bisect_right(self.stops, sample.row)
        waiting = self._waiting.setdefault(worker, [])
        waiting.append(sample)
        if len(waiting) >= _AT_ONCE:
            self._send(worker)

    def flush(self) -> None:
        """Send what is left."""
        for worker in list(self._waiting):
            self._send(worker)

    def _send(self, worker: int) -> None:
        self.actors[worker].arrived.remote(self._waiting.pop(worker))


class Arrivals:
    """Grades one rollout batch while it arrives, in a thread of its own; the next batch has a new one."""

    def __init__(self, pool: RewardPool, thread: ThreadPoolExecutor, prompts: Sequence[Prompt], count: int) -> None:
        """`count`: samples a prompt."""
        self._pool, self._thread = pool, thread
        self._prompts, self._count = prompts, count
        self._waiting: deque[tuple[int, Sample]] = deque()
        self._results: dict[int, tuple[Sample, Graded]] = {}
        self.last_at = time.monotonic()
        """when the newest sample arrived"""

    def add(self, finished: Sequence[Finished]) -> None:
        """Grade these as soon as there is time."""
        for each in finished:
            sample = Sample(
                prompt=self._prompts[each.row // self._count],
                response=each.response,
                finish_reason=each.finish_reason,
                response_tokens=each.response_tokens,
            )
            self._waiting.append((each.row, sample))
        self.last_at = time.monotonic()
        self._thread.submit(self._grade_waiting)

    def results(self, rows: range, samples: Sequence[Sample]) -> dict[int, Graded]:
        """What is known of the samples of these rows, after all that has arrived was graded."""
        self._thread.submit(self._grade_waiting).result()
        known = ((row, sample, self._results.get(row)) for row, sample in zip(rows, samples, strict=True))
        return {row: found[1] for row, sample, found in known if found is not None and found[0] == sample}

    def _grade_waiting(self) -> None:
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        with suppress(MoonshiftError):  # comes again when the batch is graded, where it has someone to tell
            graded = self._pool.grade([sample for _, sample in waiting])
            self._results.update({row: (sample, each) for (row, sample), each in zip(waiting, graded, strict=True)})
