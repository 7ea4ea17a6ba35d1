"""What a stage is to Prefect: a thin task in the flow's process, named after its step, never cached by Prefect.

Prefect's result cache cannot know whether the weights behind a result are still there; the ledger does. No retries
here: a stage that failed is repeated by the next attempt, which restores the weights first.
"""

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE


def stage_task(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a Prefect task of `function(attempt, step, …)`, shown as `step-0007/<name>`."""
    return task(
        name=name,
        task_run_name=f"step-{{step:04d}}/{name}",
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=0,
    )
