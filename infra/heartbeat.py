"""The sign of life of an attempt: its lease is renewed from a thread for as long as it runs.

Invariant: only a lost lease ends the beat. A ledger that is locked or away for a while is asked again, and sooner than
usual: a lease that ran out meanwhile can be taken by another attempt at any moment.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moonshift.core.errors import LeaseLostError, MoonshiftError

from .ledger import Lease, Ledger

log = logging.getLogger(__name__)

_BEATS_PER_LEASE = 3
_BEATS_PER_LEASE_AFTER_A_FAULT = 12


@contextmanager
def heartbeat(ledger: Ledger, lease: Lease, lease_s: float) -> Iterator[None]:
    """Within, own the run for ever another `lease_s` seconds; a lost lease shows at the next commit, which is refused.

    The thread has ended when the context has, unless a single write takes longer than `lease_s`.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(ledger, lease, lease_s, ended), name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(lease_s)


def _beat(ledger: Ledger, lease: Lease, lease_s: float, ended: threading.Event) -> None:
    pause_s = lease_s / _BEATS_PER_LEASE
    while not ended.wait(pause_s):
        pause_s = lease_s / _BEATS_PER_LEASE
        try:
            ledger.heartbeat(lease, lease_s)
        except LeaseLostError as error:
            log.warning("the lease is renewed no more: %s", error)
            return
        except MoonshiftError as error:
            pause_s = lease_s / _BEATS_PER_LEASE_AFTER_A_FAULT
            log.warning("the lease could not be renewed and is tried again in %.0f s: %s", pause_s, error)
