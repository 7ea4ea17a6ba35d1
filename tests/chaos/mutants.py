"""Promises of durability broken on purpose, each in a copy of the sources; the named tests must go red.

A mutant that survives shows a promise that nobody checks. A mutant whose text is no longer in the sources is an error:
it would test nothing.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COPIED = ("core", "infra", "tasks", "flows", "moonshift", "tests", "examples", "pyproject.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One promise, broken."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """test files, or single tests, of which at least one must fail"""


FILES, ATTEMPT, SNAPSHOTS = "tests/infra/test_files.py", "tests/infra/test_attempt.py", "tests/infra/test_snapshots.py"
LEDGER, TRACKING = ("tests/infra/test_ledger.py", "-m", "not slow"), ("tests/infra/test_sync.py",)
COMMITS, ORPHANS = "tests/infra/test_commits.py", "tests/infra/test_orphans.py"
VERIFICATION, MEMORY = "tests/infra/test_verification.py", "tests/core/test_memory.py"

MUTANTS = (
    Mutant(
        name="a folder gets its name before its bytes are on the disk",
        file="infra/files.py",
        old="        flush_below(temporary)\n        rename(temporary, place, alone)\n",
        new="        rename(temporary, place, alone)\n",
        tests=(FILES,),
    ),
    Mutant(
        name="a new name is not flushed",
        file="infra/files.py",
        old="        rename(temporary, place, alone)\n        flush(place.parent)",
        new="        rename(temporary, place, alone)",
        tests=(FILES,),
    ),
    Mutant(
        name="a text is renamed before it is flushed",
        file="infra/files.py",
        old="            flush(temporary)\n            temporary.replace(path)",
        new="            temporary.replace(path)",
        tests=(FILES,),
    ),
    Mutant(
        name="a folder is deleted under its own name",
        file="infra/files.py",
        old="    folder.rename(doomed)\n",
        new="    doomed = folder\n",
        tests=(FILES,),
    ),
    Mutant(
        name="leftovers stay",
        file="infra/files.py",
        old='if path.suffix in (".tmp", ".deleted"):',
        new='if path.suffix in (".nothing",):',
        tests=(FILES, ATTEMPT),
    ),
    Mutant(
        name="a changed byte of a checkpoint counts as whole",
        file="infra/snapshots.py",
        old='if sha256_file(file) != entry["sha256"]:',
        new="if False:",
        tests=(SNAPSHOTS,),
    ),
    Mutant(
        name="the newest checkpoint is taken unverified",
        file="infra/snapshots.py",
        old="            return folder, verify(folder)\n",
        new="            return folder, Manifest(**json.loads((folder / MANIFEST).read_text()))\n",
        tests=(SNAPSHOTS,),
    ),
    Mutant(
        name="the old checkpoint goes before the new one is verified",
        file="infra/snapshots.py",
        old="    verify(folder_of(checkpoints, steps[-1]))\n",
        new="",
        tests=(SNAPSHOTS,),
    ),
    Mutant(
        name="checkpoints are ordered as texts",
        file="infra/snapshots.py",
        old="return sorted(int(match.group(1)) for match in names if match)",
        new="return sorted((int(match.group(1)) for match in names if match), key=str)",
        tests=(SNAPSHOTS,),
    ),
    Mutant(
        name="a manifest may name files outside",
        file="infra/snapshots.py",
        old="if not file.resolve().is_relative_to(folder.resolve()):",
        new="if False:",
        tests=(SNAPSHOTS,),
    ),
    Mutant(
        name="a committed stage runs again",
        file="infra/attempt.py",
        old="        committed = self.commits.stage(self.run_id, step, name)\n        if committed is not None:",
        new="        committed = self.commits.stage(self.run_id, step, name)\n        if committed is None:",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="a stage of other inputs is taken",
        file="infra/attempt.py",
        old="if committed.input_digest != digest:",
        new="if False:",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="the row says another output than the folder holds",
        file="infra/attempt.py",
        old="                content = folder_digest(temporary)\n"
        "                put(temporary, place, self.commits.owned())",
        new="                put(temporary, place, self.commits.owned())\n"
        "                content = folder_digest(place.parent)",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="who has lost the lease still gives output a name",
        file="infra/attempt.py",
        old="                put(temporary, place, self.commits.owned())",
        new="                put(temporary, place, suppress())",
        tests=(COMMITS,),
    ),
    Mutant(
        name="a name that changes is not locked for the lease's owner",
        file="infra/files.py",
        old="        with alone or nullcontext():",
        new="        with alone or nullcontext():\n            pass\n        if True:",
        tests=(FILES,),
    ),
    Mutant(
        name="a row is committed before its files are on the disk",
        file="infra/commits.py",
        old="                    flush_below(place)\n",
        new="",
        tests=(COMMITS,),
    ),
    Mutant(
        name="stages are committed after one that failed",
        file="infra/commits.py",
        old="                before.result()\n",
        new="                before.exception()\n",
        tests=(COMMITS,),
    ),
    Mutant(
        name="a run ends before its last stage is committed",
        file="infra/commits.py",
        old="            if error is None:\n                self.settle()\n",
        new="            pass\n",
        tests=(COMMITS,),
    ),
    Mutant(
        name="what could not be committed stays",
        file="infra/commits.py",
        old="                    clear_uncommitted(self.ledger, self._lease)\n",
        new="                    pass\n",
        tests=(COMMITS,),
    ),
    Mutant(
        name="an attempt that was overtaken deletes what its successor wrote",
        file="infra/uncommitted.py",
        old="    with ledger.owned(lease):",
        new="    if True:",
        tests=(COMMITS,),
    ),
    Mutant(
        name="an attempt deletes what is committed",
        file="infra/uncommitted.py",
        old="            if path not in committed:",
        new="            if True:",
        tests=(COMMITS,),
    ),
    Mutant(
        name="processes of a driver that lives are ended",
        file="infra/orphans.py",
        old=" or _found(lines[0]) is not None:",
        new=":",
        tests=(ORPHANS,),
    ),
    Mutant(
        name="a process that was given an old number is ended",
        file="infra/server_process.py",
        old="abs(process.create_time() - create_time) < 1.0 and lives(process)",
        new="lives(process)",
        tests=(ORPHANS,),
    ),
    Mutant(
        name="half-written output stays after an error",
        file="infra/attempt.py",
        old="                if temporary.exists():\n                    remove(temporary)",
        new="                pass",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="redo logs go before every kept checkpoint covers them",
        file="infra/attempt.py",
        old="        covered = min(kept, default=0)\n",
        new="        covered = max(kept, default=0)\n",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="what a failed try wrote is taken into the next",
        file="infra/recovery.py",
        old="            if undo is not None:\n                undo()\n",
        new="",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="a lost worker is tried for ever",
        file="infra/recovery.py",
        old="            if failed == retries:",
        new="            if failed > retries:",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="a learned memory budget is forgotten",
        file="infra/recovery.py",
        old="        if divisor > known.get(what, 1):",
        new="        if False:",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="a learned memory budget is lowered again",
        file="infra/recovery.py",
        old="        if divisor > known.get(what, 1):",
        new="        if True:",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="a run with too few optimizer steps is complete",
        file="infra/completion.py",
        old="    if taken < planned:",
        new="    if taken < 0:",
        tests=(ATTEMPT,),
    ),
    Mutant(
        name="a stale lease is accepted",
        file="infra/ledger/leases.py",
        old="    if row.token != lease.token:",
        new="    if row.token < lease.token:",
        tests=(*LEDGER,),
    ),
    Mutant(
        name="a released lease is accepted",
        file="infra/ledger/leases.py",
        old="    if row.owner is None:",
        new="    if False:",
        tests=(*LEDGER,),
    ),
    Mutant(
        name="a run that is owned is taken",
        file="infra/ledger/leases.py",
        old="    if lease.owner is not None and lease.expires_at > now and not _is_dead(lease.owner):",
        new="    if False:",
        tests=(*LEDGER,),
    ),
    Mutant(
        name="a stage is committed twice",
        file="infra/ledger/repository.py",
        old="            _refuse_second_commit(session, lease.run_id, commit)\n            session.add(",
        new="            session.merge(",
        tests=(*LEDGER,),
    ),
    Mutant(
        name="a step of too few counts as completed",
        file="infra/ledger/repository.py",
        old="            if done < row.steps_planned:",
        new="            if done < 0:",
        tests=(*LEDGER,),
    ),
    Mutant(
        name="a gap in the steps is passed over",
        file="infra/ledger/reader.py",
        old="        if step != last + 1:\n            break\n",
        new="",
        tests=(*LEDGER,),
    ),
    Mutant(
        name="the outbox forgets what was sent",
        file="infra/ledger/repository.py",
        old=".values(sent=True)",
        new=".values(sent=False)",
        tests=("tests/infra/test_ledger.py::test_each_metric_of_each_step_is_sent_once_and_in_order_over_a_crash",),
    ),
    Mutant(
        name="timestamps of metrics are read from a clock",
        file="infra/tracking.py",
        old="    return run.t0_ms + step * 1000",
        new="    import time\n\n    return int(time.time() * 1000)",
        tests=TRACKING,
    ),
    Mutant(
        name="the sampler begins anew after a resume",
        file="core/datasets/sampler.py",
        old="        return self.stretch((step - 1) * self.batch_size, self.batch_size)",
        new="        return self.stretch(0, self.batch_size)",
        tests=("tests/core/test_sampler.py",),
    ),
    Mutant(
        name="only the first epoch is shuffled",
        file="core/datasets/sampler.py",
        old="shuffled(self.num_rows, self.seed, epoch)[offset]",
        new="(offset if epoch else shuffled(self.num_rows, self.seed, epoch)[offset])",
        tests=("tests/core/test_sampler.py",),
    ),
    Mutant(
        name="a config that changes the mathematics is resumed",
        file="core/config/identity.py",
        old="    return changed + (list",
        new="    return [] + (list",
        tests=("tests/core/test_config.py",),
    ),
    Mutant(
        name="gradients of a failed try are kept",
        file="core/training/memory.py",
        old="                undo()\n",
        new="",
        tests=(MEMORY,),
    ),
    Mutant(
        name="memory that never suffices is tried for ever",
        file="core/training/memory.py",
        old="                if not self.halve(longest):",
        new="                self.halve(longest)\n                if False:",
        tests=(MEMORY,),
    ),
    Mutant(
        name="verification does not read what stages wrote",
        file="infra/verification/files.py",
        old="            if found != record.digest:",
        new="            if False:",
        tests=(VERIFICATION,),
    ),
    Mutant(
        name="a signal is forgotten when its exception is lost",
        file="infra/preemption.py",
        old="        _Note.number = _Note.number or number\n",
        new="",
        tests=("tests/infra/test_preemption.py",),
    ),
    Mutant(
        name="a locked ledger is waited for beyond the grace period",
        file="infra/ledger/transactions.py",
        old=" or self._patience.seconds_left() <= 0",
        new="",
        tests=("tests/infra/test_ledger_patience.py",),
    ),
    Mutant(
        name="a pass that only fills up counts",
        file="core/training/ranks.py",
        old="counts=place < len(cut))",
        new="counts=True)",
        tests=("tests/core/test_ranks.py",),
    ),
    Mutant(
        name="a rank whose memory ran out begins again alone",
        file="core/training/memory.py",
        old="                if self.shared:",
        new="                if False:",
        tests=(MEMORY,),
    ),
)


class MutantError(RuntimeError):
    """The mutant does not fit the sources any more."""


def unfit(mutant: Mutant) -> str:
    """Why a mutant cannot be made from the sources as they are; empty where it can."""
    count = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    return "" if count == 1 else f"{mutant.name}: its text is {count} times in {mutant.file}, not once"


def survives(mutant: Mutant, folder: Path) -> str:
    """Break the promise in a copy below `folder` and run the tests there; empty where they went red.

    Raises:
        MutantError: where the mutant does not fit, or its tests could not be run.
    """
    reason = unfit(mutant)
    if reason:
        raise MutantError(reason)
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    place = folder / mutant.file
    place.write_text(place.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", *mutant.tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 1:
        return ""
    if done.returncode == 0:
        return f"{mutant.name}: every test passed ({' '.join(mutant.tests)})"
    raise MutantError(f"{mutant.name}: pytest could not run its tests: {(done.stdout + done.stderr)[-800:]}")
