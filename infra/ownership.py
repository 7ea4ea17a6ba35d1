"""Which run an attempt works on, and its right to.

Invariant: a flow run that is started again goes on with the run that it had, however many runs of that name were made
since. Another process of the same flow run may be dead: it has the time that its lease has left to show that it lives.
"""

import time

from moonshift.core.config import config_from_json, config_hash, resume_diff, to_json
from moonshift.core.errors import ConfigError, LeaseHeldError

from .ledger import AttemptState, Lease, Ledger, NewRun, RunRecord
from .preflight import Prepared
from .run_config import latest_config


def new_run(prepared: Prepared) -> NewRun:
    """What the ledger keeps of a run that has no parent."""
    config = prepared.config
    return NewRun(
        name=config.run.name,
        run_id=config.run.id,
        config_json=to_json(config, masked=True),
        config_hash=config_hash(config),
        seed=config.run.seed,
        steps_planned=prepared.plan.steps,
    )


def find_or_create(ledger: Ledger, prepared: Prepared, resume: bool, flow_run_id: str | None) -> RunRecord:
    """The run that this flow run had, or with `resume` the unfinished run to go on with, or a new one.

    Raises:
        ConfigError: the run cannot go on with this config.
    """
    config = prepared.config
    run = ledger.run_of_flow_run(flow_run_id) if flow_run_id else None
    if run is None and resume:
        run = ledger.run(config.run.id) if config.run.id else ledger.latest_run(config.run.name, unfinished=True)
    if run is None:
        return ledger.create_run(new_run(prepared))
    changed = resume_diff(config_from_json(latest_config(ledger, run)), config)
    if changed:
        raise ConfigError(
            f"Run {run.run_id} cannot go on with a config that changes its mathematics:\n  "
            + "\n  ".join(changed)
            + "\nPut the old values back, start a new run without --resume, or take its state into a run with "
            f"other values: moonshift fork {run.run_id} --at-step N {changed[0].partition(':')[0]}=…"
        )
    return run


def take(ledger: Ledger, run_id: str, lease_s: float, flow_run_id: str | None) -> Lease:
    """Become the run's owner. Where an earlier process of the same flow run holds it, wait until its lease has run out.

    Raises:
        LeaseHeldError: another process owns the run, and lives or may live.
    """
    try:
        return ledger.acquire(run_id, lease_s=lease_s, flow_run_id=flow_run_id)
    except LeaseHeldError as held:
        last = ledger.attempts(run_id)[-1]
        if flow_run_id is None or last.flow_run_id != flow_run_id or last.state is not AttemptState.RUNNING:
            raise
        time.sleep(max(0.0, held.until - time.time()) + 1)
        return ledger.acquire(run_id, lease_s=lease_s, flow_run_id=flow_run_id)
