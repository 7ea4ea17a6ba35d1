"""A deployment's local date is claimed once, whatever the clocks do that night."""

from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime

import pytest

from moonshift.infra.ledger import Ledger
from moonshift.infra.nights import claim, local_date

NEW_YORK = "America/New_York"


@pytest.mark.case("O06")
def test_the_hour_that_comes_twice_is_one_date_and_runs_once(ledger: Ledger) -> None:
    nights = []
    for number, offset in enumerate(("-04:00", "-05:00")):
        night = local_date(datetime.fromisoformat(f"2026-11-01T01:30:00{offset}"), NEW_YORK)
        nights.append(night)
        assert claim(ledger, "post-train/nightly", night, f"run-{number}") == (None if number == 0 else "run-0")
    assert nights == [date(2026, 11, 1)] * 2
    assert claim(ledger, "post-train/nightly", nights[0], "run-0") is None  # a retry
    assert claim(ledger, "post-train/other", nights[0], "run-1") is None
    assert claim(ledger, "post-train/nightly", date(2026, 11, 2), "run-1") is None


@pytest.mark.case("O06")
def test_the_hour_that_does_not_come_leaves_each_date_its_run() -> None:
    # what Prefect's cron makes of 02:30: an hour on, on the same date
    shown = ("2026-03-07T02:30:00-05:00", "2026-03-08T03:30:00-04:00", "2026-03-09T02:30:00-04:00")
    assert [local_date(datetime.fromisoformat(moment), NEW_YORK).day for moment in shown] == [7, 8, 9]


def test_the_date_is_that_of_the_zone_and_not_of_utc() -> None:
    moment = datetime.fromisoformat("2026-11-02T04:30:00+00:00")
    assert local_date(moment, NEW_YORK) == date(2026, 11, 1) and local_date(moment, "UTC") == date(2026, 11, 2)
    with pytest.raises(ValueError, match="no UTC offset"):
        local_date(moment.replace(tzinfo=None), NEW_YORK)


def test_of_many_that_claim_at_once_one_has_the_date(ledger: Ledger) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = [f"run-{number}" for number in range(8)]
        holders = list(pool.map(lambda name: ledger.claim_night("d", "2026-11-01", name), names))
    assert len(set(holders)) == 1 and holders[0] in names
