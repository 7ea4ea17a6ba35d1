"""The config that a run goes on with: the one it was made with, or the one that its latest attempt told."""

from moonshift.core.config import config_from_json, flatten, mask, to_json
from moonshift.core.config.schema import Config

from .ledger import Lease, Ledger, RunRecord

CHANGE_TAG = "moonshift.changed.attempt-"
CONFIG_EVENT = "config"
"""Kind of the event by which an attempt tells that it goes on with other placement or length: `{"json": …}`."""


def latest_config(ledger: Ledger, run: RunRecord) -> str:
    """JSON, secrets masked."""
    return [run.config_json, *changed_configs(ledger, run.run_id)][-1]


def changed_configs(ledger: Ledger, run_id: str) -> list[str]:
    """The configs that later attempts told, in order."""
    return [event.detail["json"] for event in ledger.events(run_id, CONFIG_EVENT)]


def note_config(ledger: Ledger, lease: Lease, run: RunRecord, config: Config) -> None:
    """Tell the ledger what an attempt goes on with, where it is not what the attempt before had."""
    effective = to_json(config, masked=True)
    if effective != latest_config(ledger, run):
        ledger.event(run.run_id, CONFIG_EVENT, {"json": effective}, lease.attempt_id)


def config_changes(ledger: Ledger, run: RunRecord) -> dict[str, str]:
    """What later attempts changed, as tags: `moonshift.changed.attempt-2` → `key: old → new; …`, secrets masked."""
    numbers = {attempt.attempt_id: attempt.number for attempt in ledger.attempts(run.run_id)}
    before = flatten(config_from_json(run.config_json))
    changes = {}
    for event in ledger.events(run.run_id, CONFIG_EVENT):
        after = flatten(config_from_json(event.detail["json"]))
        lines = [
            f"{key}: {mask(key, before.get(key))} → {mask(key, after.get(key))}"
            for key in dict.fromkeys([*before, *after])
            if before.get(key) != after.get(key)
        ]
        changes[f"{CHANGE_TAG}{numbers.get(event.attempt_id or 0, 0)}"] = "; ".join(lines)
        before = after
    return changes
