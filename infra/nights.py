"""One run a night: a deployment's local date is claimed in the ledger before anything is done for it.

The hour that a clock change repeats, a schedule that was deployed again and two schedules of one night all give two
flow runs for one date. The claim's unique key lets the first one train; a retry of it finds its own claim.
"""

from datetime import date, datetime
from zoneinfo import ZoneInfo

from .ledger import Ledger


def local_date(scheduled: datetime, zone: str) -> date:
    """The date that clocks in `zone` (an IANA name) show at an instant.

    Defined on every day: each instant has one local time. A local time that does not exist, 02:30 in spring, is none;
    Prefect's cron moves it an hour on, on the same date.

    Example: 01:30-04:00 and 01:30-05:00 of 2026-11-01 in America/New_York are both 2026-11-01.

    Raises:
        ValueError: for an instant without a UTC offset.
    """
    if scheduled.tzinfo is None:
        raise ValueError(f"{scheduled} has no UTC offset, so it is no instant and has no date in {zone}.")
    return scheduled.astimezone(ZoneInfo(zone)).date()


def claim(ledger: Ledger, deployment: str, night: date, flow_run_id: str) -> str | None:
    """Take a deployment's local date for a flow run; None: it has it, else the id of the one that does.

    Raises:
        LedgerError: when the ledger cannot be written.
    """
    holder = ledger.claim_night(deployment, night.isoformat(), flow_run_id)
    return None if holder == flow_run_id else holder
