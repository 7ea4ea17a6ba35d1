"""What a stage is to Prefect: a thin task in the flow's process, named after its step, never cached by Prefect.

Prefect's result cache cannot know whether the weights behind a result are still there; the ledger does. No retries
here: a stage that failed is repeated by the next attempt, which restores the weights first. A task asks the server for
nothing: its states are events, sent by a thread of Prefect's, so a server that is away does not hold up a stage.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from moonshift.core.errors import LeaseHeldError
from moonshift.infra.draws import round_name

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
