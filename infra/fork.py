"""A fork: a new run that goes on from a checkpoint of another one, with a config that may change the mathematics.

Order: first a copy of all that the fork takes over, under a name that no run has; then, in one transaction, the run
with its number, its checkpoint and its event; then the copy is renamed into the run's folder. A kill before the
transaction leaves a folder that nothing names, which the next fork deletes; a kill after it leaves a run that moves
the copy into place itself when it is started (`origin.settle`). A row first could outlive its parent's checkpoint.
"""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from moonshift.core.config import (
    FORK_FIXED,
    changed_below,
    config_from_json,
    identity_hash,
    to_yaml,
)
from moonshift.core.config.schema import Config
from moonshift.core.errors import CheckpointError, ConfigError, LedgerError, MoonshiftError

from . import snapshots
from .draws import CARRIED as CARRIED_METRIC
from .draws import SELECT
from .files import folder_digest, link_folder, publish, sha256_file, storage_errors, write_text
from .home import models_folder, run_folder
from .kl_weight import kl_weight
from .ledger import CheckpointRecord, Ledger, RunRecord
from .origin import CARRIED, FORK, INITIAL, Origin, find_origin, origin_of, settle
from .ownership import new_run
from .preflight import Prepared, prepare
from .recovery import MEMORY_BUDGET, learned_divisors
from .run_config import latest_config

LOCK_S = 600.0
"""Seconds to wait for another fork of this home that is being made."""
_STAGED = ".fork-"
_OWN_FILES = ("config.yaml", snapshots.MANIFEST)
"""Files of a checkpoint that a fork writes anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parent:
    """The run that is forked, and where it stood."""

    run: RunRecord
    config: Config
    origin: Origin
    folder: Path
    step: int
    checkpoint: Path

    def state(self, name: str) -> dict[str, int]:
        """A JSON file of the checkpoint."""
        return json.loads((self.checkpoint / name).read_text(encoding="utf-8"))


def make_fork(ledger: Ledger, run_id: str, step: int, overrides: tuple[str, ...]) -> RunRecord:
    """Enter a run that goes on after `step` of another run, with all that it needs in its own folder.

    The config is the parent's latest with `overrides` over it; an error leaves nothing behind.

    Raises:
        CheckpointError: there is no checkpoint of exactly that step that verifies; the message names those there are.
        ConfigError: an override changes what a fork must keep, or plans no step after `step`.
        MoonshiftError: from the ledger, the preflight or the disk.
    """
    run = ledger.run(run_id)
    folder = run_folder(run_id)
    origin = origin_of(ledger, run)
    with _alone(folder.parent), storage_errors(folder.parent):
        _clear_orphans(ledger, folder.parent)
        settle(origin, folder)
        parent = _Parent(
            run=run,
            config=config_from_json(latest_config(ledger, run)),
            origin=origin,
            folder=folder,
            step=step,
            checkpoint=_checkpoint(folder, run_id, step),
        )
        prepared = _prepared(parent, overrides)
        _refuse(parent, prepared)
        try:
            made = _enter(ledger, parent, prepared)
        except BaseException:
            with suppress(MoonshiftError):  # the first error is the one to show
                _clear_orphans(ledger, folder.parent)
            raise
    settle(origin_of(ledger, made), run_folder(made.run_id))
    return made


@contextmanager
def _alone(runs: Path) -> Iterator[None]:
    """One fork at a time in a home, so that what nothing names is what a kill left."""
    runs.mkdir(parents=True, exist_ok=True)
    lock = FileLock(runs / ".forks.lock", timeout=LOCK_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise LedgerError(
            f"another fork below {runs} has been going on for {LOCK_S:.0f} s; let it end, or end it, and try again."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _clear_orphans(ledger: Ledger, runs: Path) -> None:
    """Delete what forks wrote that were killed or failed before the ledger knew them."""
    waiting = list(runs.glob(f"{_STAGED}*"))
    origins = [find_origin(ledger, run) for run in ledger.runs() if run.base_step] if waiting else []
    known = {origin.staged for origin in origins if origin is not None}
    for path in waiting:
        if path.name not in known:
            shutil.rmtree(path)


def _checkpoint(folder: Path, run_id: str, step: int) -> Path:
    """The verified checkpoint of a step."""
    checkpoints = folder / "checkpoints"
    place = snapshots.folder_of(checkpoints, step)
    try:
        snapshots.verify(place)
    except (CheckpointError, FileNotFoundError) as error:
        there = ", ".join(map(str, _whole(checkpoints))) or "none"
        what = str(error) if place.exists() else f"None of that step is kept (checkpoint.keep) in {checkpoints}."
        raise CheckpointError(
            f"Run {run_id} cannot be forked at step {step}: {what} Steps that it can be forked at: {there}."
        ) from error
    return place


def _whole(checkpoints: Path) -> Iterator[int]:
    """Steps whose checkpoint verifies."""
    for step in snapshots.steps_on_disk(checkpoints):
        with suppress(CheckpointError, FileNotFoundError):
            snapshots.verify(snapshots.folder_of(checkpoints, step))
            yield step


def _prepared(parent: _Parent, overrides: tuple[str, ...]) -> Prepared:
    """The fork's config, checked as that of a run that starts."""
    unnamed = parent.config.model_copy(update={"run": parent.config.run.model_copy(update={"id": None})})
    with TemporaryDirectory(prefix="moonshift-fork-") as folder:
        file = Path(folder) / f"{parent.run.run_id}.yaml"
        write_text(file, to_yaml(unnamed))
        return prepare(str(file), overrides)


def _refuse(parent: _Parent, prepared: Prepared) -> None:
    """Refuse a config that the parent's state does not fit.

    Raises:
        ConfigError: naming the keys.
    """
    config, name = prepared.config, f"A fork of {parent.run.run_id} at step {parent.step}"
    changed = changed_below(parent.config, config, FORK_FIXED)
    if changed:
        raise ConfigError(
            f"{name} goes on with the weights of that step, which these keys have made:\n  "
            + "\n  ".join(changed)
            + "\nPut the old values back, or start a new run with `moonshift train`."
        )
    if config.needs_critic and not (parent.checkpoint / "critic").is_dir():
        raise ConfigError(
            f"{name} cannot use algorithm.adv_estimator={config.algorithm.adv_estimator}: it needs a critic, and "
            f"{parent.checkpoint} has none. Choose an estimator without one, or start a new run."
        )
    if prepared.plan.steps <= parent.step:
        raise ConfigError(
            f"{name} would have no step to make: it plans {prepared.plan.steps} in all, those of its parent included. "
            f"Set trainer.total_training_steps to more than {parent.step}."
        )
    rows = parent.state("sampler.json")["num_rows"]
    same = (rows, parent.config.data.train_batch_size) == (len(prepared.train.prompts), config.data.train_batch_size)
    if config.trainer.total_training_steps is None and not same:
        raise ConfigError(
            f"{name} has other data or another data.train_batch_size, so trainer.total_epochs does not say how many "
            "steps it has in all. Set trainer.total_training_steps."
        )


def _enter(ledger: Ledger, parent: _Parent, prepared: Prepared) -> RunRecord:
    """Copy, publish under a name of its own, and commit the run."""
    config = prepared.config
    staged = run_folder(f"{_STAGED}{uuid.uuid4().hex}")
    building = staged.with_name(f"{staged.name}.tmp")
    building.mkdir()
    checkpoint = snapshots.folder_of(building / "checkpoints", parent.step)
    record = _copy_checkpoint(parent, config, checkpoint)
    groups = _copy_carried(ledger, parent, config, building / CARRIED)
    _copy_initial(ledger, parent, prepared, building / INITIAL)
    origin = replace(
        _origin(ledger, parent, prepared),
        carried=groups,
        digests={
            place.relative_to(building).as_posix(): folder_digest(place)
            for place in (checkpoint, building / INITIAL, building / CARRIED)
            if place.exists()
        },
        staged=staged.name,
    )
    publish(building, staged)
    learned = learned_divisors(ledger, parent.run.run_id)
    return ledger.create_run(
        replace(new_run(prepared), parent_run_id=parent.run.run_id, base_step=parent.step),
        checkpoint=record,
        events=[
            (FORK, asdict(origin)),
            *((MEMORY_BUDGET, {"what": what, "divisor": divisor}) for what, divisor in learned.items()),
        ],
    )


def _origin(ledger: Ledger, parent: _Parent, prepared: Prepared) -> Origin:
    """Where the parent stood, in numbers."""
    sampler = parent.state("sampler.json")
    position = sampler["epoch"] * sampler["num_rows"] + sampler["offset"]
    epoch, offset = divmod(position, len(prepared.train.prompts))
    return Origin(
        parent_run_id=parent.run.run_id,
        step=parent.step,
        data_position=position,
        num_rows=len(prepared.train.prompts),
        epoch=epoch,
        offset=offset,
        optimizer_steps=parent.state("state.json")["optimizer_steps"],
        kl_coef=_kl_coef(ledger, parent, prepared),
    )


def _kl_coef(ledger: Ledger, parent: _Parent, prepared: Prepared) -> float | None:
    """What the parent's adaptive controller had come to; None where the fork begins with its config's value."""
    given = prepared.loaded.provenance["algorithm.kl_ctrl.kl_coef"].source not in ("default", "file")
    if given or any(config.algorithm.kl_ctrl.type == "fixed" for config in (parent.config, prepared.config)):
        return None
    return kl_weight(ledger, parent.run.run_id, parent.config, parent.origin, parent.step + 1)


def _copy_checkpoint(parent: _Parent, config: Config, place: Path) -> CheckpointRecord:
    """The checkpoint under the fork's config and identity; its other files are the parent's, byte for byte.

    Raises:
        CheckpointError: when it was deleted or changed meanwhile.
    """
    before = snapshots.verify(parent.checkpoint)
    place.mkdir(parents=True)
    try:
        link_folder(parent.checkpoint, place, _OWN_FILES)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{parent.checkpoint} was deleted while it was copied; its run has newer ones (checkpoint.keep). Try again "
            "at a later step."
        ) from error
    (place / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    manifest = snapshots.seal(place, step=parent.step, identity=identity_hash(config))
    for name in sorted((before.files.keys() | manifest.files.keys()) - set(_OWN_FILES)):
        if before.files.get(name) != manifest.files.get(name):
            raise CheckpointError(
                f"{place / name} is not what {parent.checkpoint / name} was; the disk may be failing."
            )
    return CheckpointRecord(
        step=parent.step,
        path=place.relative_to(place.parent.parent).as_posix(),
        manifest_sha256=sha256_file(place / snapshots.MANIFEST),
        bytes=manifest.bytes,
    )


def _copy_initial(ledger: Ledger, parent: _Parent, prepared: Prepared, place: Path) -> None:
    """The initial policy that a reference stays at, where the fork's config alone would not lead to the same one.

    Raises:
        CheckpointError: when it is not what it was.
    """
    from moonshift.core.training.model import resolve_model

    inherited = parent.origin.initial(parent.folder)
    warmed = ledger.stage(parent.run.run_id, 0, "warm_start")
    if inherited is not None:
        _copy_known(inherited.parent, parent.origin.digests[INITIAL], place)
    elif warmed is not None:
        _copy_known(parent.folder / warmed.path, warmed.digest, place)
    else:  # a built model follows from the seed
        model = parent.config.actor_rollout_ref.model
        built = resolve_model(
            model.path,
            override_config=model.override_config,
            seed=parent.config.run.seed,
            cache=models_folder(),
            trust_remote_code=model.trust_remote_code,
        )
        if built != prepared.model_folder:
            link_folder(built, place / "model")


def _copy_carried(ledger: Ledger, parent: _Parent, config: Config, place: Path) -> int:
    """Groups that wait for the next step under dynamic sampling; dropped where they are not as the fork's would be."""
    sampling = ("data", "reward", "algorithm.filter_groups", "actor_rollout_ref.rollout")
    if not config.algorithm.filter_groups.enable or changed_below(parent.config, config, sampling):
        return 0
    selected = ledger.stage(parent.run.run_id, parent.step, SELECT)
    if selected is None:
        if parent.origin.carried and parent.origin.step == parent.step:
            _copy_known(parent.folder / CARRIED, parent.origin.digests[CARRIED], place)
            return parent.origin.carried
        return 0
    count = int(selected.metrics[CARRIED_METRIC])
    if count:
        _check(parent.folder / selected.path, selected.digest)
        link_folder(parent.folder / selected.path / "surplus", place)
    return count


def _copy_known(source: Path, digest: str, place: Path) -> None:
    _check(source, digest)
    link_folder(source, place)


def _check(folder: Path, digest: str) -> None:
    if not folder.is_dir() or folder_digest(folder) != digest:
        raise CheckpointError(f"{folder} is not what the ledger says was written there; put a copy back.")
