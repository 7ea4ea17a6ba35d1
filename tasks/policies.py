"""What a stage is to Prefect: a thin task in the flow's process, named after its step, never cached by Prefect.

Prefect's result cache cannot know whether the weights behind a result are still there; the ledger does. No retries
here: a stage that failed is repeated by the next attempt, which restores the weights first. A task asks the server for
nothing: its states are events, sent by a thread of Prefect's, so a server that is away does not hold up a stage.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from moonshift.core.errors import LeaseHeldError
from moonshift.infra.draws import round_name
from moonshift.infra.home import ledger_url
from moonshift.infra.ledger import Ledger
from moonshift.infra.nights import claim, local_date

SKIPPED = "Skipped"
"""Name of the state of a flow run that found its run in another process's hands."""


def skipped_if_owned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A flow's function whose flow run ends as `Skipped`, of Prefect's type Cancelled, where another process owns the
    run: two flow runs of one schedule slot are no failure, and there is nothing to retry."""

    @wraps(function)
    def skipping(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except LeaseHeldError as owned:
            if FlowRunContext.get() is None:
                raise
            return Cancelled(name=SKIPPED, message=str(owned))

    return skipping


def once_a_local_date(function: Callable[..., Any]) -> Callable[..., Any]:
    """A flow's function that runs once for each local date of a deployment with a schedule; a second flow run of the
    date ends as `Skipped` before it does anything. A deployment without a schedule is run as often as it is asked to.

    With the flow's parameter `again` a start by hand runs all the same; the deployment's concurrency limit, with
    ENQUEUE, lets it wait for the first. What a schedule has started twice is never run twice.
    """

    @wraps(function)
    def once(*arguments: Any, **named: Any) -> Any:
        holder = _holder_of_date()
        return function(*arguments, **named) if holder is None else Cancelled(name=SKIPPED, message=holder)

    return once


def _holder_of_date() -> str | None:
    """Who has the local date of this flow run, in words; None where it may run, and has the date if it needs one."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if context is None or run is None or run.deployment_id is None:
        return None
    if not run.auto_scheduled and (context.parameters or {}).get("again"):
        return None
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment(run.deployment_id)
    if not deployment.schedules and not run.auto_scheduled:
        return None
    # the run's own schedule, where the deployment still has it
    own = run.created_by.id if run.created_by else None
    schedules = sorted(deployment.schedules, key=lambda schedule: schedule.id != own)
    zone = (getattr(schedules[0].schedule, "timezone", None) if schedules else None) or "UTC"
    night = local_date(run.expected_start_time or datetime.now(UTC), zone)
    name = f"{context.flow.name if context.flow else run.flow_id}/{deployment.name}"
    with Ledger.open(ledger_url()) as ledger:
        holder = claim(ledger, name, night, str(run.id))
    if holder is None:
        return None
    return (
        f"{name} has had its run of {night} ({zone}): flow run {holder}. Retry that one, or start one by hand with the "
        "parameter again=true."
    )


def stage_task(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a Prefect task of `function(attempt, step, …)`, shown as `step-0007/<name>`; of its second generation as
    `step-0007/<name>-2`.

    Outside of a flow run, that is where a run goes without a server, it stays the plain function: to the ledger both
    are the same.
    """

    def shown(parameters: dict[str, Any]) -> str:
        return f"step-{parameters['step']:04d}/{round_name(name, parameters.get('round_', 1))}"

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        naming: Any = shown  # Prefect declares a protocol that no plain function fulfils
        as_task = task(name=name, task_run_name=naming, cache_policy=NO_CACHE, persist_result=False, retries=0)(
            function
        )

        @wraps(function)
        def stage(*arguments: Any, **named: Any) -> Any:
            return (function if FlowRunContext.get() is None else as_task)(*arguments, **named)

        return stage

    return decorate
