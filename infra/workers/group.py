"""Workers that work as one: a call goes to all of them, and when one is lost the whole group is.

Invariant: a call returns when every rank has answered, or soon after the first one failed, never at the deadline of a
collective: the ranks that wait for a lost one are not waited for.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from moonshift.core.errors import MoonshiftError, StageError, WorkerLostError

from .handle import Note, WorkerHandle, loss, silent, wait

_GRACE_S = 5.0
"""How long the other ranks may still take once one has failed: the first to be heard of may not be the cause."""
_BROKEN_OFF = re.compile(r"gloo|NCCL|Connection closed by peer|Connection reset by peer|DistBackendError")
"""What a rank says of a collective whose other side is gone."""


class WorkerGroup:
    """The ranks of one model; a single one is a group too."""

    def __init__(self, workers: Sequence[WorkerHandle], note: Note, start_timeout_s: float) -> None:
        self._workers = workers
        self._note = note
        self._start_timeout_s = start_timeout_s
        self.deadline_s = workers[0].deadline_s
        self._whole = True
        self._meeting: list[Any] = []
        if len(workers) > 1:
            address = workers[0].begin("open_store")
            self._meeting = [worker.begin("join", address) for worker in workers]

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """What each rank answers, in rank order.

        Raises:
            WorkerLostError: a rank died, does not answer, or was cut off from the others; the group is lost then.
            MoonshiftError: what a rank raised itself.
        """
        if self._meeting:
            meeting, self._meeting = self._meeting, []
            self._end(meeting, "join", self._start_timeout_s)
        if not self._whole:
            raise WorkerLostError(f"{self._name(method)} has no whole group: a rank had failed in an earlier call.")
        references = [worker.begin(method, *arguments) for worker in self._workers]
        return self._end(references, method, timeout_s or self.deadline_s)

    def answers(self, method: str, timeout_s: float) -> list[Any]:
        """What those ranks answer that can."""
        references = [worker.begin(method) for worker in self._workers]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        found, _ = self._outcomes([reference for reference in references if reference in set(ready)], method, timeout_s)
        return list(found.values())

    def kill(self) -> None:
        """End every rank at once."""
        for worker in self._workers:
            worker.kill()

    def _end(self, references: list[Any], method: str, timeout_s: float) -> list[Any]:
        """Wait for a call of all ranks."""
        answered, failed = self._outcomes(references, method, timeout_s)
        if len(answered) == len(references):
            return [answered[rank] for rank in range(len(references))]
        missing = [rank for rank in range(len(references)) if rank not in answered and rank not in failed]
        error = _cause(failed) if failed else silent(self._name(method, missing), timeout_s)
        self._whole = self._whole and not missing and not isinstance(error, WorkerLostError)
        if isinstance(error, WorkerLostError):
            self._note("worker_lost", loss(self._name(method, sorted(failed) or missing), error, self._stacks()))
        raise error

    def _outcomes(
        self, references: list[Any], method: str, timeout_s: float
    ) -> tuple[dict[int, Any], dict[int, MoonshiftError]]:
        """Answers and errors by rank; a rank that is in neither has not ended."""
        answered: dict[int, Any] = {}
        failed: dict[int, MoonshiftError] = {}
        until, waiting = time.monotonic() + timeout_s, list(references)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            rank = references.index(ready[0])
            try:
                answered[rank] = wait(ready[0], self._name(method, [rank]), timeout_s)
            except MoonshiftError as error:
                failed[rank] = error
                until = min(until, time.monotonic() + _GRACE_S)
        return answered, failed

    def _stacks(self) -> str:
        """What every rank that lives is doing."""
        if len(self._workers) == 1:
            return self._workers[0].stack()
        found = {rank: worker.stack() for rank, worker in enumerate(self._workers)}
        return "\n".join(f"rank {rank}:\n{stack}" for rank, stack in found.items() if stack)

    def _name(self, method: str, ranks: Sequence[int] = ()) -> str:
        """For messages: `update of role actor_rollout, rank 1 of 2`."""
        name = f"{method} of role {self._workers[0].role}"
        if not ranks or len(self._workers) == 1:
            return name
        return f"{name}, rank {' and '.join(map(str, ranks))} of {len(self._workers)}"


def _cause(failed: Mapping[int, MoonshiftError]) -> MoonshiftError:
    """The error that explains the others: a rank that was lost, else one that says more than that it was cut off."""
    errors = [failed[rank] for rank in sorted(failed)]
    own = [error for error in errors if not (type(error) is StageError and _BROKEN_OFF.search(str(error)))]
    lost = [error for error in own if isinstance(error, WorkerLostError)]
    if own:
        return (lost or own)[0]
    return WorkerLostError(f"A rank was cut off from the others: {errors[0]}")
