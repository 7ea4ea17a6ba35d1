"""A crashed flow run is started again by the server (`flows/automations.py`); here is where that ends.

Invariant: it ends. A flow run that has crashed `MOST_CRASHES` times in a row, without a new committed stage between, is
Failed, which nothing starts again but a person; his Retry has as many tries again.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Failed

from moonshift.infra.home import ledger_url
from moonshift.infra.ledger import Ledger

MOST_CRASHES = 3


def not_for_ever(function: Callable[..., Any]) -> Callable[..., Any]:
    """A flow's function that does nothing more, and fails, where its flow run has crashed too often."""

    @wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        context = FlowRunContext.get()
        run = context.flow_run if context else None
        crashes = crashes_in_a_row(run.id) if run is not None and run.run_count > 1 else 0
        if crashes >= MOST_CRASHES:
            return Failed(
                message=f"Crashed {crashes} times in a row without a new stage between, so it is not started again. "
                "The worker's log says what it died of; after that is mended, Retry gives it as many tries again."
            )
        return function(*arguments, **named)

    return limited


def crashes_in_a_row(flow_run_id: UUID) -> int:
    """How often a flow run has crashed since it last ended otherwise or, by the ledger, its run committed a stage."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(flow_run_id)
    with Ledger.open(ledger_url()) as ledger:
        run = ledger.run_of_flow_run(str(flow_run_id))
        stages = ledger.stages(run.run_id) if run is not None else []
    progress = datetime.fromtimestamp(max((stage.committed_at for stage in stages), default=0.0), UTC)
    crashes = 0
    for state in sorted(states, key=lambda state: state.timestamp):
        if state.is_final():
            crashes = crashes + 1 if state.is_crashed() and state.timestamp > progress else 0
    return crashes
