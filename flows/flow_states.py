"""The Prefect server shows what the ledger says of a flow run, at once or, where it was away, as soon as it is back.

Invariant: how an attempt ended stands in the ledger before the server is told, and a server that cannot be told changes
neither the run nor its result. What it was not told it is told later, by any command that meets it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails
from prefect.context import SyncClientContext
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from prefect.states import Cancelled, Completed, Crashed, Failed

from moonshift.core.errors import MoonshiftError
from moonshift.infra.home import ledger_url
from moonshift.infra.ledger import FLOW_SETTLED, AttemptRecord, AttemptState, Ledger
from moonshift.infra.preemption import received

log = logging.getLogger(__name__)
UNANSWERED = (httpx.HTTPError, ObjectNotFound)
"""What Prefect's client raises where the server is away, answers with an error, or has lost the flow run."""
_ENDED = {AttemptState.COMPLETED: Completed, AttemptState.FAILED: Failed, AttemptState.PAUSED: Failed}
"""Prefect's state for an attempt's; every other one is Crashed, as Prefect calls what a signal ended."""
_POLL_S = 1.0
_DRAIN_S = 10.0


class PatientClient(SyncPrefectClient):
    """Prefect's client for one flow run: a final state that the server does not take is left for `settle`."""

    began = False
    """the server has taken a state: from here on the flow's body runs"""

    def set_flow_run_state(
        self, flow_run_id: UUID | str, state: State[Any], force: bool = False
    ) -> OrchestrationResult[Any]:
        """Set a state; a final one by force, since the ledger has it already."""
        try:
            answer = super().set_flow_run_state(flow_run_id, state, force=force or state.is_final())
        except UNANSWERED:
            if not state.is_final():
                raise
            return OrchestrationResult(state=state, status=SetStateStatus.ACCEPT, details=StateAcceptDetails())
        self.began = True
        return answer


@contextmanager
def patient_client() -> Iterator[PatientClient]:
    """Within, a flow that is called in this thread reports by a `PatientClient`.

    Raises:
        httpx.HTTPError: when the server does not answer.
    """
    context = SyncClientContext()
    client = PatientClient(
        PREFECT_API_URL.value(), auth_string=PREFECT_API_AUTH_STRING.value(), api_key=PREFECT_API_KEY.value()
    )
    context.client = client
    with context:
        yield client


def settle(ledger: Ledger, url: str, timeout_s: float = 0.0) -> bool:
    """Make the server at `url` show every ended attempt's flow run as the ledger has it; whether it answered in time.

    A flow run that is to run again (scheduled, paused) and one of another server are left alone.
    """
    end = time.monotonic() + timeout_s
    while attempts := ledger.unsettled_attempts():
        try:
            _settle_once(ledger, url, attempts)
            return True
        except UNANSWERED:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
    return True


def settle_ledger(url: str, timeout_s: float = 0.0) -> bool:
    """`settle` with this home's ledger; a ledger that cannot be read or written settles nothing, and says so."""
    # whoever sent a signal does not wait for a ledger that is locked
    lock_s, retry_s = (30.0, 60.0) if received() is None else (1.0, 0.0)
    try:
        with Ledger.open(ledger_url(), busy_timeout_s=lock_s, retry_s=retry_s) as ledger:
            return settle(ledger, url, timeout_s)
    except MoonshiftError as error:
        log.warning("the Prefect server is not told how runs ended: %s", error)
        return False


def _settle_once(ledger: Ledger, url: str, attempts: list[AttemptRecord]) -> None:
    quick: dict[Any, Any] = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: 10}
    by_flow_run = {UUID(attempt.flow_run_id): attempt for attempt in attempts if attempt.flow_run_id}
    with temporary_settings(quick), get_client(sync_client=True) as client:
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=list(by_flow_run)))
        for shown in client.read_flow_runs(flow_run_filter=wanted):
            attempt = by_flow_run[shown.id]
            if shown.state is not None and (shown.state.is_scheduled() or shown.state.is_paused()):
                continue
            if shown.state is None or not _agrees(shown.state, attempt):
                client.set_flow_run_state(shown.id, _state(shown.state, attempt), force=True)
            ledger.event(attempt.run_id, FLOW_SETTLED, {"flow_run_id": str(shown.id)}, attempt.attempt_id)


def _agrees(shown: State[Any], attempt: AttemptRecord) -> bool:
    """Whether the flow run is shown as ended, and as completed only if it was."""
    return shown.is_final() and shown.is_completed() == (attempt.state is AttemptState.COMPLETED)


def _state(shown: State[Any] | None, attempt: AttemptRecord) -> State[Any]:
    completed = attempt.state is AttemptState.COMPLETED
    if attempt.state is AttemptState.CANCELLED or (shown and shown.is_cancelling() and not completed):
        return Cancelled(message=attempt.error)
    return _ENDED.get(attempt.state, Crashed)(message=attempt.error or f"{attempt.state} in the ledger")


def hand_over(answers: bool) -> None:
    """Let Prefect send its last logs and events while the server is there; where it is not, drop them.

    Prefect would try for minutes at the interpreter's exit. Its services have no public way to be stopped without it.
    """
    services = list(EventsWorker._instances.values())  # one register for all kinds of service
    tasks = [(service._loop, service._task) for service in services]
    for kind in (APILogWorker, EventsWorker):
        kind.drain_all(timeout=_DRAIN_S if answers else 0.1)
    for loop, task in tasks:
        if loop is not None and task is not None and loop.is_running():
            loop.call_soon_threadsafe(task.cancel)
