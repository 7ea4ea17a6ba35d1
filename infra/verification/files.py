"""The bytes on the disk against the ledger: checkpoints, what the stages wrote, and what each was made from.

Invariant: every file is read once. Rightly absent are deleted checkpoints, and what only a replay would need of the
steps that every kept checkpoint covers.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from moonshift.core.config import identity_hash
from moonshift.core.errors import CheckpointError

from .. import snapshots
from ..draws import SELECT, round_name
from ..files import files_below, folder_digest, sha256_file
from ..ledger import CheckpointRecord, CheckpointState, StageRecord
from .facts import Facts, Finding, Kind, row
from .lineage import taken_over

FALL_BACK = "Resume falls back to the newest checkpoint that is whole; a copy of this one can be put back."


def checkpoints(facts: Facts) -> Iterator[Finding]:
    """Every checkpoint of the ledger and of the disk, against its manifest and the ledger's hash of that."""
    kept = {record.step: record for record in facts.checkpoints if record.state is CheckpointState.KEPT}
    for step in sorted({*kept, *snapshots.steps_on_disk(facts.checkpoint_folder)}):
        yield from _checkpoint(facts, step, kept.get(step))


def _checkpoint(facts: Facts, step: int, record: CheckpointRecord | None) -> Iterator[Finding]:
    place = snapshots.folder_of(facts.checkpoint_folder, step)

    def wrong(where: Path | str, expected: str, found: str) -> Finding:
        return Finding(kind=Kind.CHECKPOINT, where=str(where), expected=expected, found=found, action=FALL_BACK)

    if not place.exists():
        yield wrong(row("checkpoints", facts, f"step {step}"), f"files in {place}", "no such folder")
        return
    try:
        manifest = snapshots.verify(place)
    except CheckpointError as error:
        yield wrong(place, "files as they were written", str(error))
        return
    if record is None:
        if facts.completed:  # else it waits for its commit, which the next attempt makes
            yield wrong(place, "a row of the ledger that keeps it", "none")
        return
    written = _written(facts, step)
    for what, expected, found in (
        (f"{place / snapshots.MANIFEST}, SHA-256", record.manifest_sha256, sha256_file(place / snapshots.MANIFEST)),
        (f"{place / snapshots.MANIFEST}, step", str(step), str(manifest.step)),
        (f"{place}, bytes of its files", str(record.bytes), str(manifest.bytes)),
        (f"{place}, digest of the stage", written, _digest(place, manifest)),
    ):
        if expected != found:
            yield wrong(what, expected, found)


def _written(facts: Facts, step: int) -> str:
    """Digest of a checkpoint as the stage wrote it, or as the fork took it over."""
    committed = facts.stages.get((step, "checkpoint"))
    if committed is not None:
        return committed.digest
    name = f"checkpoints/{snapshots.folder_of(facts.checkpoint_folder, step).name}"
    return facts.origin.digests.get(name, "none")


def _digest(place: Path, manifest: snapshots.Manifest) -> str:
    """What `folder_digest` says of a checkpoint that verified, without reading its large files again."""
    digest = hashlib.sha256()
    for path in files_below(place):
        name = path.relative_to(place).as_posix()
        known = manifest.files.get(name)
        digest.update(f"{name}\0{known['sha256'] if known else sha256_file(path)}\n".encode())
    return digest.hexdigest()


def outputs(facts: Facts) -> Iterator[Finding]:
    """What every committed stage wrote; a checkpoint's bytes are those of `checkpoints`."""
    covered = _covered(facts)
    for record in facts.stages.values():
        where = row("stages", facts, f"{record.name} of step {record.step}")
        given, place = PurePosixPath(record.path), facts.folder / record.path
        if given.is_absolute() or ".." in given.parts:
            yield Finding(kind=Kind.STAGE, where=f"{where}, path", expected="a folder of the run", found=record.path)
        elif record.name == "checkpoint":
            continue
        elif place.exists():
            found = folder_digest(place)
            if found != record.digest:
                yield Finding(kind=Kind.STAGE, where=str(place), expected=f"digest {record.digest}", found=found)
        elif not _retired(record, covered):
            yield Finding(kind=Kind.STAGE, where=str(place), expected=f"the output of {where}", found="no such folder")


def _covered(facts: Facts) -> int:
    """The step up to which every kept checkpoint has the weights."""
    on_disk = set(snapshots.steps_on_disk(facts.checkpoint_folder))
    kept = {record.step for record in facts.checkpoints if record.state is CheckpointState.KEPT}
    return min(on_disk & kept, default=0)


def _retired(record: StageRecord, covered: int) -> bool:
    """Whether only a replay would need the output, and no replay begins before its step any more."""
    if record.name == SELECT:  # what a step carried over is read by the next one
        return record.step < covered
    return record.name in ("log_probs", "advantage") and record.step <= covered


def lineage(facts: Facts) -> Iterator[Finding]:
    """Every stage was made from what the stages before it wrote, and from the run's config."""
    identity = _identity(facts)
    for record in facts.stages.values():
        inputs = [facts.stages.get((record.step, name)) for name in _inputs(facts, record)]
        digests = [given.digest for given in inputs if given is not None]
        if len(digests) < len(inputs):
            where = row("stages", facts, f"step {record.step}")
            names = ", ".join(_inputs(facts, record))
            yield Finding(kind=Kind.STAGE, where=where, expected=f"what {record.name} reads: {names}", found="not all")
            continue
        expected = _input_digest(identity, record, digests)
        if expected != record.input_digest:
            where = row("stages", facts, f"input_digest of {record.name} of step {record.step}")
            yield Finding(kind=Kind.STAGE, where=where, expected=expected, found=record.input_digest)


def _inputs(facts: Facts, record: StageRecord) -> tuple[str, ...]:
    """Names of the stages of the same step that a stage reads, in order."""
    base, _, round_ = record.name.partition("-")
    filtered = facts.config.algorithm.filter_groups.enable
    rollouts, scores = (SELECT, SELECT) if filtered else ("rollout", "score")
    if base == "score":
        return (round_name("rollout", int(round_ or 1)),)
    if base == SELECT:
        rounds = range(1, facts.rounds(record.step) + 1)
        return tuple(round_name(stage, number) for number in rounds for stage in ("rollout", "score"))
    reads = {
        "log_probs": (rollouts,),
        "advantage": (rollouts, scores, "log_probs"),
        "update": ("advantage",),
    }
    return reads.get(base, ())


def _input_digest(identity: str, record: StageRecord, digests: list[str]) -> str:
    parts = [identity, str(record.step), record.name, *digests]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _identity(facts: Facts) -> str:
    """Hash of the config's mathematics as it was when the run began.

    A later version with a new key has another hash of the same config; the checkpoints keep the old one.
    """
    now = identity_hash(facts.config)
    told = [now]
    for step in snapshots.steps_on_disk(facts.checkpoint_folder):
        manifest = snapshots.folder_of(facts.checkpoint_folder, step) / snapshots.MANIFEST
        with suppress(OSError, ValueError, KeyError, TypeError):  # a broken one is named by `checkpoints`
            told.append(json.loads(manifest.read_text(encoding="utf-8"))["identity"])
    alone = next((record for record in facts.stages.values() if record.name == "rollout"), None)
    fitting = (one for one in told if alone is None or _input_digest(one, alone, []) == alone.input_digest)
    return next(fitting, now)


FILES = (lineage, checkpoints, taken_over, outputs)
