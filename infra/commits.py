"""Stages become facts behind the back of the next one: one thread flushes their files and commits their rows, in order.

The ledger's transaction and the flush take longer than a short stage's own work, and nothing waits for them but what
reads the ledger to decide. So a stage's output gets its name at once, for the next stage to read, and its row a moment
later.

Invariants: rows are committed in the order in which the stages were done, each after its files are on the disk, so what
the ledger holds is always a prefix of the run. After a failure nothing is committed any more; it is raised, as what it
was, where the next stage begins or gets its name, where the ledger is asked, and before an attempt ends as if all were
well. Only who has the lease puts a name into the run's folder: it is locked meanwhile. A crash or a failure loses the
stages that wait, a few at the most: they have no row, their output is deleted, and they are done again.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from moonshift.core.errors import LedgerAwayError, MoonshiftError

from .files import flush, flush_below, storage_errors
from .ledger import Lease, Ledger, StageCommit, StageRecord
from .recovery import note_divisors
from .uncommitted import clear_uncommitted

_MOST_WAITING = 10
"""Commits that may wait, about two steps': a ledger that is away holds up the run then."""


class StageLookup(Protocol):
    """Whoever knows which stages are committed: a ledger, or an attempt's `Commits`."""

    def stage(self, run_id: str, step: int, name: str) -> StageRecord | None: ...


class Commits:
    """The commits of one attempt; used by the attempt's own thread only.

    As a context manager it commits what waits before it is left, however that happens, and deletes what could not be
    committed; it is entered by the attempt, and left before its lease is given back.
    """

    def __init__(self, ledger: Ledger, lease: Lease) -> None:
        self.ledger, self._lease, self._run_id = ledger, lease, lease.run_id
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-commits")
        self._waiting: deque[Future[None]] = deque()
        self._last: Future[None] | None = None
        self._last_found = ledger.last_stage_step(self._run_id)  # of the attempts before this one
        self._whole_found = ledger.last_step(self._run_id)
        self._own: set[tuple[int, str]] = set()
        self._longest_s: dict[str, float | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            self._thread.shutdown(wait=True)
            failure = self._last.exception() if self._last is not None else None
            # a ledger that is away has been waited for; the next attempt deletes what this one cannot
            if failure is not None and not isinstance(failure, LedgerAwayError):
                with suppress(MoonshiftError):  # the first error is the one to show
                    clear_uncommitted(self.ledger, self._lease)

    def add(self, work: Callable[[], None]) -> None:
        """Have `work` done after all that was added before; not at all once one of those has failed.

        Raises:
            whatever failed before; waits while too many wait.
        """
        self.check()
        while len(self._waiting) >= _MOST_WAITING:
            self._waiting[0].result()
            self.check()
        before = self._last

        def in_order() -> None:
            if before is not None:
                before.result()
            work()

        self._last = self._thread.submit(in_order)
        self._waiting.append(self._last)

    def owned(self) -> AbstractContextManager[None]:
        """Within, this attempt has the run's lease and keeps it.

        Raises:
            LeaseLostError: another attempt has it.
            MoonshiftError: what a commit has failed with.
        """
        self.check()
        return self.ledger.owned(self._lease)

    def add_stage(self, place: Path, commit: StageCommit, then: Callable[[], None]) -> None:
        """Have a stage whose output lies at `place` flushed and committed, then `then()` called. Raises as `add`."""

        def work() -> None:
            try:
                with storage_errors(place):
                    flush_below(place)
                    for folder in place.parents[:3]:  # a run's first stages make the folders above them too
                        flush(folder)
            except FileNotFoundError:
                with self.ledger.owned(self._lease):  # else who took the run over has deleted it: say that
                    raise
            self.ledger.commit_stage(self._lease, commit)
            note_divisors(self.ledger, self._lease, commit.metrics)
            then()

        longest_s = self.longest_s(commit.name)
        self.add(work)
        self._own.add((commit.step, commit.name))
        self._longest_s[commit.name] = commit.seconds if longest_s is None else max(longest_s, commit.seconds)

    def add_step(self, step: int) -> None:
        """Have a step committed, unless an attempt before did; a crash may fall between it and its update."""
        if step > self._whole_found:
            self.add(lambda: self.ledger.commit_step(self._lease, step, step))

    def check(self) -> None:
        """Raises what a commit has failed with, if one has by now."""
        while self._waiting and self._waiting[0].done():
            self._waiting[0].result()
            self._waiting.popleft()

    def settle(self) -> None:
        """Wait until all is committed. Raises what a commit failed with."""
        while self._waiting:
            self._waiting[0].result()
            self._waiting.popleft()

    def stage(self, run_id: str, step: int, name: str) -> StageRecord | None:
        """What is committed of a stage of this run, once what waits is; the ledger is asked only where it can know it:
        nobody else commits while this attempt has the lease."""
        if run_id == self._run_id and step > self._last_found and (step, name) not in self._own:
            return None
        self.settle()
        return self.ledger.stage(run_id, step, name)

    def longest_s(self, name: str) -> float | None:
        """Seconds that the slowest stage of this name has taken in the run; None where there is none."""
        if name not in self._longest_s:
            self._longest_s[name] = self.ledger.longest_stage_s(self._run_id, name)
        return self._longest_s[name]
