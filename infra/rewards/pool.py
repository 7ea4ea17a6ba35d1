"""A pool of killable processes that grade samples: one that hangs or crashes costs its own sample and no other.

Invariant: every sample gets exactly one result, its own: a call has a number that its answer must carry, and a process
that was ended, or answers anything else, is never spoken to again.

A sample has `timeout_s` of its own time: seconds in which its process waited for a CPU do not count, but a quarter of
`timeout_s` more is the end in any case. A process that takes much longer than the others is set aside: another takes
its place at once while its deadline runs on, so that a hundred that hang wait together. Where more are set aside than
the pool has processes, they get only CPU time that nobody else wants: a hundred endless loops must not slow the rest.
"""

import os
import selectors
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from moonshift.core.config.schema import RewardSection
from moonshift.core.errors import RewardError, StageError
from moonshift.core.rewards.graded import Graded
from moonshift.core.types import Sample

from . import kernel
from .processes import Call, Grader, Processes, ending
from .wire import Distrust, frame, packed_sample, unpacked_graded

_TICK_S = 0.01
_ASIDE_AT_MOST = 128
"""processes set aside at once; beyond that one that hangs keeps its place"""
_SUSPECT_AFTER_S = 0.02
_SUSPECT_TIMES = 10
"""times the median duration of a call, and at least the above, after which a process is set aside"""
_SUSPECT_SHARE = 0.25
"""share of the limit after which it is, while too few calls have come back to know a duration"""
_KNOWN = 5
_SPARE = 2
_SURPLUS = "more than the pool has places for"
_AHEAD = 8
_SHORT_S = 0.01
"""Calls that take less are handed over this many at a time."""
_GRACE = 1.25
"""times the limit that a call of one sample may take when its process has to wait for a CPU"""
_JOINT = (0.5, 64)
"""A call of n samples has max(0.5, n / 64) · timeout_s and no grace: its samples are tried again one by one if that
passes, and a few that were graded together are through within twice the timeout."""
_TRIES = 3
_LOST_AT_MOST = 10
_FAILED_STARTS = 3
_CLOSED_GRACE_S = 0.5
_ASK_EVERY_S = 0.1
"""how often the kernel is asked what an overdue process has waited"""


class RewardPool:
    """Grades samples with the rewards of a configuration; for one thread at a time, any thread."""

    def __init__(
        self, reward: RewardSection, *, start_timeout_s: float = 600.0, longest_s: float = float("inf")
    ) -> None:
        """`longest_s`: what a call of several samples may take at the most.

        Raises RewardError when the reward cannot be loaded, StageError when its process ends or hangs in that."""
        self._timeout_s = reward.timeout_s
        self._start_timeout_s, self._longest_s = start_timeout_s, longest_s
        self._size = reward.processes_per_worker or len(os.sched_getaffinity(0))
        self._processes = Processes(reward, start_timeout_s)
        self._durations: deque[float] = deque(maxlen=101)
        self._typical_s = 0.0
        self._num_calls = 0
        self._failed_starts = self._num_lost = 0
        self._had_losses = False
        self._watched_at = 0.0
        self._lock = threading.Lock()
        self._todo: deque[Call] = deque()
        self._packed: list[dict[str, Any]] = []
        self._graded: dict[int, Graded] = {}

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    @property
    def pids(self) -> list[int]:
        """Processes that grade or wait for a call."""
        return [grader.pid for grader in self._processes.living.values() if grader.pid is not None]

    @property
    def whole_batch(self) -> bool:
        """Whether a function wants all samples of a batch in one call."""
        with self._lock:
            self._learn_kind()
            return self._processes.together == 0

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        """One result a sample, in order. A function that takes all samples at once gets these in one call.

        A process that hangs, crashes or answers nonsense makes an error of its sample; where it had several, each of
        them is graded again by itself, so a batched function must give a sample the same in any company.

        Raises:
            RewardError: a sample holds what cannot be handed over, or the rewards cannot be loaded any more.
            StageError: processes end while they start, again and again.
        """
        with self._lock:
            self._packed = [packed_sample(sample) for sample in samples]
            self._graded, self._failed_starts, self._num_lost, self._had_losses = {}, 0, 0, False
            try:
                self._cut(range(len(samples)))
                while len(self._graded) < len(samples):
                    self._hand_out()
                    self._listen()
                    self._watch()
                return [self._graded[row] for row in range(len(samples))]
            finally:
                self._todo.clear()
                self._packed = []
                self._tidy()

    def _cut(self, rows: range) -> None:
        if rows:
            self._learn_kind()
        length = self._processes.together or max(1, len(rows))
        for start in range(0, len(rows), length):
            part = rows[start : start + length]
            self._todo.append(self._call(part, self._limit_s(len(part))))

    def _limit_s(self, count: int) -> float:
        """Seconds that a call of so many samples may take."""
        if count == 1:
            return self._timeout_s
        least, share = _JOINT
        return min(self._timeout_s * max(least, count / share), self._longest_s)

    def _learn_kind(self) -> None:
        """Wait for the first process that has loaded the rewards itself."""
        while self._processes.together is None:
            if not self._processes.living:
                self._processes.add()
            self._listen()
            self._watch()

    def _call(self, rows: Iterable[int], limit_s: float, tries: int = 0) -> Call:
        self._num_calls += 1
        return Call(number=self._num_calls, rows=tuple(rows), limit_s=limit_s, tries=tries)

    def _hand_out(self) -> None:
        """Give calls to those that wait for one, and start processes while there are fewer than there may be."""
        active = [grader for grader in self._processes.living.values() if grader.is_active]
        ready = [grader for grader in active if grader.is_ready and grader.pid is not None]
        # with one lost or set aside, more will be: the next is made ready beforehand
        wanted = self._size + (_SPARE if self._had_losses else 0)
        for _ in range(min(wanted - len(active), len(self._todo) - len(active) + len(ready))):
            self._processes.add()
        depth = max(1, min(self._depth(), -(-len(self._todo) // self._size)))
        ready.sort(key=lambda grader: not grader.calls)
        for grader in ready[: self._size]:
            while self._todo and len(grader.calls) < depth:
                self._begin(grader, self._todo.popleft())

    def _depth(self) -> int:
        """Calls that a process is given ahead, so that it need not wait for us between short ones."""
        short = self._processes.together == 1 and len(self._durations) >= _KNOWN and self._typical_s < _SHORT_S
        return _AHEAD if short else 1

    def _begin(self, grader: Grader, call: Call) -> None:
        grader.calls.append(call)
        if len(grader.calls) == 1:
            grader.begins()
        grader.send(frame({"call": call.number, "samples": [self._packed[row] for row in call.rows]}))
        self._listen_to(grader)

    def _listen_to(self, grader: Grader) -> None:
        number = self._processes.selector.get_key(grader.channel).data
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if grader.unsent else 0)
        self._processes.selector.modify(grader.channel, events, number)

    def _listen(self) -> None:
        """Take in what processes and template have to say, waiting a moment for it."""
        for key, _ in self._processes.selector.select(_TICK_S):
            grader = self._processes.living.get(key.data) if key.data is not None else None
            if grader is not None and not grader.reason:
                self._hear(grader)
        self._bury(self._processes.told())

    def _hear(self, grader: Grader) -> None:
        if grader.unsent and grader.closed_at is None:
            grader.flush()
            self._listen_to(grader)
        try:
            messages, closed = grader.messages()
            for message in messages:
                self._take(grader, message)
        except Distrust as error:
            return self._give_up(grader, f"gave no result: {error}")
        if closed:
            self._processes.silence(grader)
            grader.closed_at = time.monotonic()
        return None

    def _take(self, grader: Grader, message: dict[str, Any]) -> None:
        if not grader.is_ready:
            self._greeted(grader, message)
            return
        call = grader.call
        if call is None or message.get("call") != call.number:
            raise Distrust("its process answered a call that it was not given")
        graded = unpacked_graded(message.get("graded"), len(call.rows))
        self._graded.update(zip(call.rows, graded, strict=True))
        self._learn(grader.own_s)
        grader.calls.popleft()
        grader.begins()
        if grader.is_aside:
            self._processes.end(grader, "another has its place")

    def _greeted(self, grader: Grader, message: dict[str, Any]) -> None:
        if "failed" in message:
            raise RewardError(str(message["failed"]))
        grader.is_ready = True
        self._failed_starts = 0
        self._processes.together = int(message["together"])

    def _learn(self, duration_s: float) -> None:
        self._durations.append(duration_s)
        self._typical_s = statistics.median(self._durations)

    def _bury(self, ended: list[tuple[int, Grader, int]] | None) -> None:
        """Give up the calls of processes that have ended; None: all have, with the template."""
        if ended is None:
            self._num_lost += 1
            if self._num_lost > _LOST_AT_MOST:
                raise StageError(
                    f"The process that loads the rewards was ended {self._num_lost} times; see whether they end other "
                    "processes than their own."
                )
            for grader in self._processes.restart():
                for call in grader.calls:
                    self._again(call)
            return
        for number, grader, code in ended:
            if grader.reason is None:
                self._hear(grader)  # what it has answered before
            self._processes.forget(number)
            self._had_losses |= grader.reason != _SURPLUS
            if grader.call is not None:
                self._fail(grader.calls.popleft(), grader.reason or f"The reward's process {ending(code)}.")
                self._todo.extendleft(grader.calls)  # what it was given ahead is not its fault
            elif not grader.is_ready:
                self._failed_starts += 1
                self._check_starts(grader.reason or f"one {ending(code)}")

    def _check_starts(self, reason: str) -> None:
        if self._failed_starts >= _FAILED_STARTS:
            raise StageError(f"Reward processes end before they grade anything: {reason}. See what the module loads.")

    def _again(self, call: Call) -> None:
        if call.tries + 1 < _TRIES:
            self._todo.appendleft(self._call(call.rows, call.limit_s, call.tries + 1))
        else:
            self._fail(call, f"The reward's processes were all ended, {_TRIES} times.")

    def _fail(self, call: Call, reason: str) -> None:
        if len(call.rows) > 1:
            self._todo.extend(self._call([row], self._timeout_s) for row in call.rows)
        else:
            self._graded.update({row: Graded(components=None, error=reason) for row in call.rows})

    def _give_up(self, grader: Grader, reason: str) -> None:
        """End a process; its call fails when its end is told."""
        self._processes.end(grader, reason)

    def _watch(self) -> None:
        """End what is over its time, and set aside what takes much longer than the others."""
        now = time.monotonic()
        if now - self._watched_at < _TICK_S:
            return
        self._watched_at = now
        aside = 0
        for grader in list(self._processes.living.values()):
            if grader.reason is None:
                self._watch_one(grader, now)
            aside += grader.is_aside
        if self._todo and aside < _ASIDE_AT_MOST:
            for grader in self._processes.living.values():
                if not grader.is_aside and self._is_suspect(grader, now):
                    grader.is_aside = self._had_losses = True
                    while len(grader.calls) > 1:
                        self._todo.appendleft(grader.calls.pop())
        self._demote()

    def _watch_one(self, grader: Grader, now: float) -> None:
        age = now - grader.since
        if grader.closed_at is not None and now - grader.closed_at > _CLOSED_GRACE_S:
            return self._give_up(grader, "The reward's process closed its connection.")
        if not grader.is_ready and age > self._start_timeout_s:
            return self._give_up(grader, f"one was not ready within {self._start_timeout_s:g} s")
        call = grader.call
        if call is None or age < call.limit_s or now < grader.asked_at + _ASK_EVERY_S:
            return None
        grader.asked_at = now
        if len(call.rows) > 1 or age >= _GRACE * call.limit_s or grader.own_s >= call.limit_s:
            self._give_up(
                grader,
                f"The reward gave no result within {self._timeout_s:g} s and its process was ended; raise "
                "reward.timeout_s if it needs longer.",
            )
        return None

    def _is_suspect(self, grader: Grader, now: float) -> bool:
        """It takes much longer than the others, by its own time: that it waits for a CPU is not its fault."""
        if grader.call is None:
            return False
        known = len(self._durations) >= _KNOWN
        after = (
            max(_SUSPECT_AFTER_S, _SUSPECT_TIMES * self._typical_s) if known else _SUSPECT_SHARE * grader.call.limit_s
        )
        return now - grader.since > after and grader.own_s > after

    def _demote(self) -> None:
        aside = [grader for grader in self._processes.living.values() if grader.is_aside and not grader.reason]
        if len(aside) <= self._size:
            return
        for grader in aside:
            if not grader.is_demoted and grader.pid is not None:
                kernel.demote(grader.pid)
                grader.is_demoted = True

    def _tidy(self) -> None:
        """Leave only processes that wait for a call, and none that is about to answer an old one."""
        for grader in self._processes.living.values():
            if grader.call is not None or grader.is_aside:
                self._processes.end(grader, "nobody waits for its answer")
                grader.calls.clear()
        idle = [each for each in self._processes.living.values() if each.is_active and each.call is None]
        for grader in idle[self._size :]:
            self._processes.end(grader, _SURPLUS)
