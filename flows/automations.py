"""The server's own part of self-healing: automations that make a dead flow run end, and go on.

Invariant: what is installed is told apart by name alone, so installing twice changes nothing, and an automation that
somebody has switched off on Prefect's page stays off.
"""

from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from moonshift.core.errors import ServiceError

FLOW = "post-train"
"""Name of the flow whose runs are healed; other flows on the server may have slower heartbeats, or none."""
SILENCE_S = 90
"""Seconds without a heartbeat after which a flow run is dead: three of the 30 s beats."""
PAUSE_S = 30
"""Seconds from a crash to the next start. A worker reports a crash twice, some seconds apart: a run that was started
between the two would be Crashed while it runs, and lose its slot."""
MOST_CRASHES = 20
"""The last resort, for what crashes before the flow's body: there `moonshift.tasks.restarts` stops it much sooner."""
_HEARTBEAT = "prefect.flow-run.heartbeat"
_CRASHED = "prefect.flow-run.Crashed"
_ENDS = ("Completed", "Failed", "Cancelled", "Skipped", "Paused", "Suspended", "AwaitingRetry")
_OF_THE_FLOW = {"prefect.resource.role": "flow", "prefect.resource.name": FLOW}
_OF_A_DEPLOYMENT = {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"}
_EACH_RUN = {"match": {"prefect.resource.id": "prefect.flow-run.*"}, "for_each": ["prefect.resource.id"]}

SILENT: dict[str, Any] = {
    "name": "moonshift: a silent run has crashed",
    "description": f"A run of {FLOW} without a heartbeat for {SILENCE_S} s is Crashed, and its slot is free.",
    "trigger": {
        "type": "event",
        "posture": "Proactive",
        **_EACH_RUN,
        "match_related": _OF_THE_FLOW,
        "after": [_HEARTBEAT, "prefect.flow-run.Running"],  # a run may die before its first heartbeat arrives
        "expect": [_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in (*_ENDS, "Crashed"))],
        "threshold": 1,
        "within": SILENCE_S,
    },
    "actions": [
        {"type": "change-flow-run-state", "state": "CRASHED", "message": f"no heartbeat for {SILENCE_S} s"},
    ],
}
CRASHED: dict[str, Any] = {
    "name": "moonshift: a crashed run is started again",
    "description": f"A run of {FLOW} by a deployment that has crashed is started again after {PAUSE_S} s.",
    "trigger": {
        "type": "event",
        "posture": "Proactive",
        **_EACH_RUN,
        "match_related": [_OF_THE_FLOW, _OF_A_DEPLOYMENT],  # without a deployment nobody can start it
        "after": [_CRASHED],
        "expect": [f"prefect.flow-run.{state}" for state in (*_ENDS, "Scheduled", "Pending", "Running")],
        "threshold": 1,
        "within": PAUSE_S,
    },
    "actions": [
        {
            "type": "change-flow-run-state",
            "state": "SCHEDULED",
            "name": "AwaitingRetry",
            "message": "started again after a crash",
        },
    ],
}
CRASHING: dict[str, Any] = {
    "name": "moonshift: a run that keeps crashing has failed",
    "description": f"A run of {FLOW} that has crashed {MOST_CRASHES} times within a day is Failed, and left alone.",
    "trigger": {
        "type": "event",
        "posture": "Reactive",
        **_EACH_RUN,
        "match_related": [_OF_THE_FLOW, _OF_A_DEPLOYMENT],
        "after": ["prefect.flow-run.Pending"],  # so that it counts anew once it has failed and was retried by hand
        "expect": [_CRASHED],
        "threshold": MOST_CRASHES,
        "within": 24 * 3600,
    },
    "actions": [
        {
            "type": "change-flow-run-state",
            "state": "FAILED",
            "message": f"crashed {MOST_CRASHES} times within a day; the worker's log says what of",
        },
    ],
}
AUTOMATIONS = (SILENT, CRASHED, CRASHING)


def install(url: str, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Bring the server at `url` (that of its API) to what stands above; returns each name and what was done about it.

    `dry_run`: only say what would be done.

    Raises:
        ServiceError: the server does not answer, or refuses.
    """
    wanted = map(AutomationCore.model_validate, AUTOMATIONS)
    try:
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            return [(each.name, _install(client, each, dry_run)) for each in wanted]
    except (httpx.HTTPError, ObjectNotFound) as error:
        raise ServiceError(
            f"The Prefect server at {url} took no automations: {error}. The address is that of the API, such as "
            "http://127.0.0.1:4200/api."
        ) from error


def _install(client: SyncPrefectClient, wanted: AutomationCore, dry_run: bool) -> str:
    found = client.read_automations_by_name(wanted.name)
    if not found:
        if not dry_run:
            client.create_automation(wanted)
        return "created"
    wanted.enabled = found[0].enabled
    changed = _content(found[0]) != _content(wanted)
    if changed and not dry_run:
        client.update_automation(found[0].id, wanted)
    return ("updated" if changed else "unchanged") + ("" if wanted.enabled else ", switched off on the server")


def _content(automation: Automation | AutomationCore) -> dict[str, Any]:
    """All that was decided here; the server adds ids and dates."""
    return automation.model_dump(include=set(AutomationCore.model_fields))
