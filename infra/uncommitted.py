"""Stage outputs that have a name but no row: left by an attempt that was killed, lost its lease, or could not flush.

Invariant: nothing ever reads them, since what is there is asked of the ledger; they are put away by the run's owner
only, while its lease is locked, so an attempt that was overtaken never deletes what its successor wrote. A checkpoint
counts by its manifest and is no concern of this file.
"""

import logging

from .files import clear_leftovers, put_aside
from .home import run_folder
from .ledger import Lease, Ledger

log = logging.getLogger(__name__)


def clear_uncommitted(ledger: Ledger, lease: Lease) -> list[str]:
    """Delete every stage output of the run that the ledger does not hold; returns their paths below the run's folder.

    What cannot be deleted is left for the next time: cleaning up never stops a run. No stage may be going on.

    Raises:
        LedgerError: the lease is lost, or the ledger away; nothing is deleted then.
    """
    folder = run_folder(lease.run_id)
    cleared = []
    with ledger.owned(lease):
        committed = {record.path for record in ledger.stages(lease.run_id)}
        for place in folder.glob("stages/*/[!.]*"):
            path = place.relative_to(folder).as_posix()
            if path not in committed:
                try:
                    put_aside(place)
                    cleared.append(path)
                except OSError as error:
                    log.warning("%s is not deleted, tried again next time: %s", place, error)
    for step in folder.glob("stages/*"):
        clear_leftovers(step)
    return cleared
