"""Where a fork begins: its row, its event, its parent's rows and the folders that it took over, compared."""

import json
from collections.abc import Iterator

from moonshift.core.errors import LedgerError

from .. import snapshots
from ..files import folder_digest
from ..origin import FORK, find_origin
from .facts import Facts, Finding, Kind, row


def beginning(facts: Facts) -> Iterator[Finding]:
    """A fork has one event that fits its row and its parent; no other run has one."""
    run, origin = facts.run, facts.origin
    events = facts.ledger.events(run.run_id, FORK)
    expected = 1 if run.base_step else 0
    if len(events) != expected or find_origin(facts.ledger, run) is None:
        where, found = row("events", facts), f"{len(events)}, or one that cannot be read"
        yield Finding(kind=Kind.ORIGIN, where=where, expected=f"{expected} event(s) {FORK}", found=found)
        return
    if not run.base_step:
        return
    for what, told, found in (
        ("parent_run_id", run.parent_run_id, origin.parent_run_id),
        ("base_step", run.base_step, origin.step),
        (
            "epoch and offset in the data",
            divmod(origin.data_position, max(1, origin.num_rows)),
            (origin.epoch, origin.offset),
        ),
        ("optimizer steps of the parent", _optimizer_steps(facts), origin.optimizer_steps),
    ):
        if told != found:
            where = row("events", facts, f"{FORK}, {what}")
            yield Finding(kind=Kind.ORIGIN, where=where, expected=str(told), found=str(found))


def _optimizer_steps(facts: Facts) -> int:
    """What the parent's ledger says of the step that was forked; a fork at its parent's own beginning repeats that."""
    parent = facts.origin.parent_run_id
    assert parent is not None, "a foreign key"
    update = facts.ledger.stage(parent, facts.origin.step, "update")
    if update is not None:
        return int(update.metrics["training/optimizer_steps"])
    try:
        before = find_origin(facts.ledger, facts.ledger.run(parent))
    except LedgerError:
        before = None
    return before.optimizer_steps if before is not None and before.step == facts.origin.step else -1


def taken_over(facts: Facts) -> Iterator[Finding]:
    """What lies below a fork's folder is what it took over, and its first checkpoint stands where its event says."""
    for name, digest in facts.origin.digests.items():
        if name.startswith("checkpoints/"):
            continue  # named by `checkpoints`; rightly absent once newer ones are kept
        place = facts.folder / name
        found = folder_digest(place) if place.is_dir() else "no such folder"
        if found != digest:
            yield Finding(kind=Kind.ORIGIN, where=str(place), expected=f"digest {digest}", found=found)
    if facts.origin.step not in snapshots.steps_on_disk(facts.checkpoint_folder) or not facts.origin.step:
        return
    place = snapshots.folder_of(facts.checkpoint_folder, facts.origin.step)
    try:
        state, sampler = (
            json.loads((place / name).read_text(encoding="utf-8")) for name in ("state.json", "sampler.json")
        )
        found = (state["optimizer_steps"], sampler["epoch"] * sampler["num_rows"] + sampler["offset"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # a file that is not as it was written is named by `checkpoints`
    expected = (facts.origin.optimizer_steps, facts.origin.data_position)
    if found != expected:
        told, where = "optimizer steps and data position", row("events", facts, FORK)
        yield Finding(kind=Kind.ORIGIN, where=where, expected=f"{told} {found} of {place}", found=str(expected))
