"""Where a run begins: at its own beginning, or with what its parent had after the step that it was forked at.

Invariant: what a fork takes over is in its `fork` event and in its own folder, so that it goes on, and is verified,
when its parent's folder is gone. What a fork's step depends on beyond that is its own, as in every run.
"""

from dataclasses import dataclass, field
from pathlib import Path

from moonshift.core.errors import CheckpointError, LedgerError

from .files import move_into
from .ledger import LedgerReader, RunRecord

FORK = "fork"
"""Kind of the event that holds a fork's `Origin`; entered with the run, in one transaction."""
INITIAL = "initial"
"""Folder below a fork's: the initial policy of its oldest parent, where that was made and not named by the config."""
CARRIED = "carried"
"""Folder below a fork's: groups that the parent's step carried over (dynamic sampling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the first own step of a run follows on."""

    parent_run_id: str | None = None
    step: int = 0
    """steps of the parent that are taken over"""
    data_position: int = 0
    """prompts drawn up to that step"""
    num_rows: int = 0
    """prompts of one epoch of the fork's data"""
    epoch: int = 0
    """of the next prompt, in the fork's data"""
    offset: int = 0
    """of the next prompt within that epoch"""
    optimizer_steps: int = 0
    """taken by the policy up to that step"""
    kl_coef: float | None = None
    """weight of the KL in the reward where the adaptive controller goes on; None: the config's"""
    carried: int = 0
    """groups in `CARRIED`"""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 over each folder that was taken over, by its path below the run's folder"""
    staged: str = ""
    """name beside the run's folder under which what it takes over was written, before the run had a number"""

    def initial(self, folder: Path) -> Path | None:
        """The initial policy below the run's folder; None where the config names it, or the run makes it itself."""
        return folder / INITIAL / "model" if INITIAL in self.digests else None


START = Origin()
"""Of a run that was not forked."""


def find_origin(ledger: LedgerReader, run: RunRecord) -> Origin | None:
    """Where a run begins; None for a fork whose event is missing or cannot be read."""
    told = [event.detail for event in ledger.events(run.run_id, FORK)]
    if not run.base_step:
        return START
    try:
        return Origin(**told[0])
    except (IndexError, TypeError):
        return None


def origin_of(ledger: LedgerReader, run: RunRecord) -> Origin:
    """Where a run begins.

    Raises:
        LedgerError: for a fork whose event is missing.
    """
    origin = find_origin(ledger, run)
    if origin is None:
        raise LedgerError(
            f"Run {run.run_id} was forked at step {run.base_step} of {run.parent_run_id}, but the event that says what "
            "it took over is not in the ledger; go back to a copy of the ledger, or fork again."
        )
    return origin


def settle(origin: Origin, folder: Path) -> None:
    """Move what a fork takes over into its folder, where a crash came between the ledger's row and that.

    Raises:
        CheckpointError: where the run's folder already holds something of that name.
    """
    staged = folder.parent / origin.staged
    if not origin.staged or not staged.is_dir():
        return
    there = [path.name for path in list(staged.iterdir()) if (folder / path.name).exists() and path.exists()]
    if there:
        raise CheckpointError(
            f"{folder} already has {', '.join(there)}, left by a run that the ledger does not know; move that away, "
            f"then go on: what the fork takes over waits in {staged}."
        )
    move_into(staged, folder)
